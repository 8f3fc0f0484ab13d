"""A session whose lengths are chosen: what it asks its drafter for, what it costs, and whom it teaches."""

import random
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import PROMPT, STORY, FakeDrafter, FakeTarget, collect, describe, make_generation
from gateway_fakes import make_loop as make_fake_loop
from virtual_time import run

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.requested_generation import RequestedGeneration, SpeculationDefaults, complete_request
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.pairs import Pairs
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser

DEFAULTS = SpeculationDefaults(4, 16, "block", adapts_length=True)


def requested(**changes: Any) -> RequestedGeneration:
    return RequestedGeneration([list(PROMPT)], SamplingParams(), "", max_tokens=20, **changes)


def completed(defaults: SpeculationDefaults = DEFAULTS, temperature: float = 1.0, **changes: Any) -> tuple[bool, int]:
    """Returns whether lengths are chosen, and the fixed or largest one."""
    request = replace(requested(**changes), sampling=SamplingParams(temperature))
    (generation,) = complete_request(request, describe("target"), defaults)
    return generation.adapts_length, generation.num_speculative_tokens


def test_lengths_are_chosen_if_none_is_given_and_random_numbers_are_fresh() -> None:
    assert completed() == (True, 8)
    assert completed(seed=5) == (False, 4), "equal requests draw equal numbers"
    assert completed(seed=5, temperature=0.0) == (True, 8), "it draws none"
    assert completed(seed=5, rule="coupled") == (True, 8), "its tokens do not depend on what is drafted"
    assert completed(seed=5, temperature=0.0, num_speculative_tokens=6) == (False, 6)
    assert completed(num_speculative_tokens=6) == (False, 6)
    assert completed(num_speculative_tokens=0) == (False, 0)
    assert completed(SpeculationDefaults(4, 16, "block")) == (False, 4), "speculation: fixed"
    assert completed(SpeculationDefaults(0, 16, "block", adapts_length=True)) == (False, 0), "none by default"
    assert completed(SpeculationDefaults(2, 3, "block", adapts_length=True)) == (True, 3)


def test_only_known_ways_of_speculation_are_configured() -> None:
    assert GatewayConfig().speculation == "adaptive"
    with pytest.raises(InvalidRequestError, match="speculation must be adaptive or fixed, not 'often'"):
        GatewayConfig(speculation="often")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes choosers say lengths in turn, for ever."""

    def set_lengths(*lengths: int) -> None:
        turns = iter(lengths * 10_000)

        def arm_of(chooser: PredictingChooser, session: object) -> Arm:
            length = next(turns)
            return Arm(DraftSource.DRAFTER, length) if length else PLAIN

        monkeypatch.setattr(PredictingChooser, "arm_of", arm_of)
        monkeypatch.setattr(PredictingChooser, "num_plain_rounds", lambda chooser, most, now: min(most, 2))
        monkeypatch.setattr(PredictingChooser, "observe", lambda *_, **__: None)

    return set_lengths


def loop_of(target: FakeTarget, drafters: list[FakeDrafter], pairs: Pairs, **changes: Any) -> GenerationLoop:
    changes = {"adapts_length": True, "num_speculative_tokens": 8, "max_tokens": 60} | changes
    return make_fake_loop(target, drafters, pairs=pairs, **changes)


def test_text_is_the_targets_whatever_lengths_are_chosen(choose: Any) -> None:
    generator = random.Random(3)
    for _ in range(30):
        choose(*(generator.choice((0, 1, 2, 3, 8)) for _ in range(17)))
        target = FakeTarget(accepts=[generator.randrange(9) for _ in range(80)])
        drafter = FakeDrafter(target)
        result = run(collect(loop_of(target, [drafter], Pairs(16, 4))))
        result.assert_whole(60)
        assert (target.violations, drafter.violations) == ([], [])


def test_session_that_does_not_draft_opens_no_drafter_and_says_why(choose: Any) -> None:
    choose(0)
    target, rounds = FakeTarget(), list[RoundTimes]()
    drafter = FakeDrafter(target)
    result = run(collect(loop_of(target, [drafter], Pairs(16, 4), observers=[rounds.append])))
    result.assert_whole(60)
    assert drafter.sessions == [], "its prefill alone would cost time"
    assert {one.why_plain for one in rounds} == {WhyPlain.DOES_NOT_PAY}
    assert {run_.num_rounds for run_ in target.plain_runs[:-1]} <= {1, 2}, "runs end when another length has its turn"


def test_drafter_opens_when_drafting_pays_and_stays_open_when_it_does_not(choose: Any) -> None:
    choose(*[0] * 8, *[3] * 20, *[0] * 8)
    target = FakeTarget(accepts=[3] * 40)
    drafter = FakeDrafter(target)
    result = run(collect(loop_of(target, [drafter], Pairs(16, 4))))
    result.assert_whole(60)
    assert len(drafter.sessions) == 1
    assert {each.num_draft_tokens for each in drafter.calibrations} <= {3}
    assert result.statistics.draft_length_histogram[0] > 0 < result.statistics.draft_length_histogram[3]
    assert sum(result.statistics.draft_length_histogram) == result.statistics.num_rounds


def test_what_a_request_with_a_seed_produced_teaches_nobody() -> None:
    """Equal seeds draw equal numbers: see test_law_of_chosen_lengths.py for what it would do to the text."""
    pairs = Pairs(16, 4)
    for changes in ({"seed": 5}, {"num_speculative_tokens": 4}):
        (generation,) = complete_request(requested(**changes), describe("target"), DEFAULTS)
        target = FakeTarget(accepts=[2] * 40)
        loop = loop_of(
            target,
            [FakeDrafter(target)],
            pairs,
            adapts_length=generation.adapts_length,
            num_speculative_tokens=generation.num_speculative_tokens,
        )
        run(collect(loop)).assert_whole(60)
        assert pairs.explain() == {}
    target = FakeTarget(accepts=[2] * 40)
    run(collect(loop_of(target, [FakeDrafter(target)], pairs))).assert_whole(60)
    (chooser,) = pairs.choosers.values()
    assert chooser.acceptance[DraftSource.DRAFTER].num_drafts > 5
    assert chooser.num_sessions == 0, "it was counted out"


def test_sessions_are_counted_while_they_run_and_after_a_failure_not() -> None:
    pairs = Pairs(16, 4)
    target = FakeTarget(accepts=[2] * 40)
    loop = loop_of(target, [FakeDrafter(target)], pairs)

    async def stop_early() -> int:
        events = loop.run()
        await anext(events)
        running = next(iter(pairs.explain().values())).num_sessions
        await events.aclose()
        return running

    assert run(stop_early()) == 1
    assert next(iter(pairs.explain().values())).num_sessions == 0


def test_chosen_lengths_need_a_drafter_only_if_there_is_one() -> None:
    result = run(collect(loop_of(FakeTarget(), [], Pairs(16, 4))))
    assert result.ids == STORY[:60]
    assert make_generation(adapts_length=True).adapts_length
