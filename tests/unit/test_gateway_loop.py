"""The outer loop on fakes: the text is the target's own, whatever is accepted and whatever happens to the drafter."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_fakes import (
    GONE,
    PROMPT,
    STOP_TOKEN,
    STORY,
    TOO_SLOW,
    FakeDrafter,
    FakeTarget,
    Result,
    collect,
    make_loop,
    refuse,
    text_of,
    whole_story,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time, run

from draftwire.errors import (
    ModelMismatchError,
    NoRoomError,
)
from draftwire.method.keys import Role, derive_key
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    Fence,
    Permit,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire_gateway.session.committed_text import Delta, FinishReason
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import DrafterLost

TEST_SECONDS = 10.0  # a loop that hangs fails, long before pytest's own limit


def pair(accepts: list[int] | None = None, **drafter_arguments: Any) -> tuple[FakeTarget, FakeDrafter]:
    target = FakeTarget(accepts=accepts)
    return target, FakeDrafter(target, **drafter_arguments)


# The text is the target's


@dataclass(frozen=True)
class Scenario:
    """One way in which a generation may go."""

    accepts: list[int]
    num_speculative_tokens: int
    max_tokens: int
    ready_after: int
    drafter_context: int
    bridge_rounds: int
    plain_run_rounds: int


scenarios = st.builds(
    Scenario,
    accepts=st.lists(st.integers(0, 6), max_size=40),
    num_speculative_tokens=st.integers(0, 6),
    max_tokens=st.integers(1, 40),
    ready_after=st.integers(0, 6),
    drafter_context=st.one_of(st.just(10_000), st.integers(1, 60)),
    bridge_rounds=st.integers(1, 4),
    plain_run_rounds=st.integers(1, 9),
)


@settings(max_examples=200)
@given(scenario=scenarios)
def test_text_calibrations_and_statistics_are_right_for_any_acceptance(
    scenario: Scenario,
) -> None:
    target, drafter = pair(scenario.accepts, context_length=scenario.drafter_context)
    drafter.ready_after, target.num_cached_tokens = scenario.ready_after, 2
    limits = LoopSettings(plain_run_rounds=scenario.plain_run_rounds, bridge_rounds=scenario.bridge_rounds)
    speculative = scenario.num_speculative_tokens
    result = whole_story(target, drafter, limits, scenario.max_tokens, num_speculative_tokens=speculative)
    has_no_room = speculative > 0 and scenario.drafter_context <= len(PROMPT)
    assert ("context" in result.drafter_error) == has_no_room
    assert len(target.session.committed) == len(PROMPT) + scenario.max_tokens, "the verifier did no more"
    told = [(verdict.token_ids, text_of(verdict.token_ids)) for verdict in target.verdicts]
    assert [(delta.token_ids, delta.text) for delta in result.deltas] == told, "round by round"
    check_sessions(scenario, target, drafter)
    check_calibrations(target, drafter)
    check_blocks(scenario, target, drafter)
    check_statistics(result, target.verdicts)


def check_sessions(scenario: Scenario, target: FakeTarget, drafter: FakeDrafter) -> None:
    """They reserve room for prompt and budget, as far as each model's context goes."""
    needed = len(PROMPT) + scenario.max_tokens
    assert target.spec.max_len == needed
    assert all(session.spec.max_len == min(needed, scenario.drafter_context) for session in drafter.sessions)
    speculates = scenario.num_speculative_tokens > 0
    assert (target.spec.permit_key != b"") == speculates, "the key would let a drafter in"
    assert drafter.opened <= speculates


def check_calibrations(target: FakeTarget, drafter: FakeDrafter) -> None:
    """They carry exactly the ids committed since the last."""
    known = list(PROMPT)
    for calibration in drafter.calibrations:
        assert calibration.base_len == len(known)
        known += calibration.token_ids
        assert known == [*PROMPT, *STORY[: len(known) - len(PROMPT)]]
        key, number = (target.spec.session_id, target.spec.epoch), calibration.fence.round
        assert calibration.fence == Fence(*key, number, len(known), CommittedTokens(known).hash)
    rounds = [calibration.fence.round for calibration in drafter.calibrations]
    decided = [verdict.fence.round for verdict in target.verdicts if verdict.num_draft_tokens]
    assert rounds == decided == sorted(set(rounds))


def check_blocks(scenario: Scenario, target: FakeTarget, drafter: FakeDrafter) -> None:
    """As long as wanted, unless the budget or the drafter's context ends; the verifier reserved room for all.

    The extra token is counted on: a block never drafts the last token of the budget, or of the context.
    """
    for calibration in drafter.calibrations:
        committed, length = calibration.fence.prefix_len, calibration.num_draft_tokens
        remaining = scenario.max_tokens - (committed - len(PROMPT))
        room = scenario.drafter_context - committed - 1
        assert length == min(scenario.num_speculative_tokens, remaining - 1, room) >= 1
        assert committed + length <= min(drafter.spec.max_len, target.spec.max_len - 1)
    assert all(plain.fence.prefix_len + plain.num_rounds <= target.spec.max_len for plain in target.plain_runs)


def check_statistics(result: Result, verdicts: list[Verdict]) -> None:
    blocks = [verdict for verdict in verdicts if verdict.num_draft_tokens]
    drafted, accepted = ([getattr(block, f"num_{kind}_tokens") for block in blocks] for kind in ("draft", "accepted"))
    statistics, longest = result.statistics, max(drafted, default=0)
    emitted = sum(accepted) + len(blocks)
    expected = {
        "num_prompt_tokens": len(PROMPT),
        "num_cached_prompt_tokens": 2,  # however many rounds tell of them
        "num_generated_tokens": len(result.ids),
        "num_emitted_tokens": sum(len(verdict.token_ids) for verdict in verdicts),
        "num_rounds": len(verdicts),
        "num_drafts": len(blocks),
        "num_draft_tokens": sum(drafted),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": [sum(count > place for count in accepted) for place in range(longest)],
        "acceptance_histogram": [accepted.count(number) for number in range(longest + 1)] if blocks else [],
        "mean_acceptance_length": pytest.approx(emitted / len(blocks) if blocks else 0.0),
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if blocks else 0.0,
        "verify_us": sum(verdict.verify_us for verdict in verdicts),
        "queue_us": sum(verdict.queue_us for verdict in verdicts),
        "calibration_us": sum(verdict.timings.calibration_us for verdict in blocks),
        "draft_us": sum(verdict.timings.draft_us for verdict in blocks),
    }
    assert {name: getattr(statistics, name) for name in expected} == expected
    assert statistics.num_emitted_tokens == statistics.num_rounds + statistics.num_accepted_tokens
    assert emitted == sum(len(block.token_ids) for block in blocks)
    assert 0 < statistics.time_to_first_token_us <= statistics.duration_us


@pytest.mark.parametrize("salt", ["", "one tenant"])
def test_specs_say_what_the_request_asks_for(salt: str) -> None:
    target, drafter = pair()
    sampling = SamplingParams(temperature=0.5, top_k=7)
    wanted = {"sampling": sampling, "rule": "token", "num_speculative_tokens": 2, "seed": 11, "cache_salt": salt}
    whole_story(target, drafter, **wanted)
    verifying, drafting = target.spec, drafter.spec
    for spec in (verifying, drafting):
        assert spec.token_ids[: len(PROMPT)] == PROMPT
        assert (spec.session_id, spec.epoch) == (verifying.session_id, verifying.epoch)
        assert spec.parameters == SessionParameters(
            len(PROMPT), sampling, RuleFacts("token"), 2, frozenset({STOP_TOKEN}), cache_salt=salt, shares_text=True
        )
    assert verifying.verifying_key == derive_key(11, Role.VERIFYING)
    assert drafting.drafting_key == derive_key(11, Role.DRAFTING)
    assert (drafting.verifier_address, drafting.target_vocab_size) == ("target:1", target.description.vocab_size)
    assert drafting.permit == Permit.make(verifying.permit_key, 0)


# Where the text ends


@settings(max_examples=160)
@given(
    start=st.integers(0, 12),
    length=st.integers(1, 6),
    is_token=st.booleans(),
    accepts=st.lists(st.integers(0, 5), max_size=20),
    num_speculative_tokens=st.integers(0, 5),
)
def test_stop_ends_output_at_its_token_or_at_the_end_of_its_string(
    start: int, length: int, is_token: bool, accepts: list[int], num_speculative_tokens: int
) -> None:
    story = [*STORY[:start], *[STOP_TOKEN] * length, *STORY] if is_token else STORY
    stop = () if is_token else (text_of(STORY[start : start + length]),)
    target = FakeTarget(story, accepts)
    loop = make_loop(target, FakeDrafter(target), stop=stop, num_speculative_tokens=num_speculative_tokens)
    result = run(collect(loop))
    ids = story[: start + (1 if is_token else length)]
    assert (result.text, result.ids, result.reason) == (text_of(STORY[:start]), ids, FinishReason.STOP)
    statistics, num_emitted = result.statistics, sum(len(verdict.token_ids) for verdict in target.verdicts)
    assert (statistics.num_generated_tokens, statistics.num_emitted_tokens) == (len(ids), num_emitted)


def test_budget_that_ends_with_a_stop_is_a_stop_and_within_one_is_none() -> None:
    stops_last = FakeTarget([*STORY[:4], STOP_TOKEN, *STORY])
    cases: list[tuple[FakeTarget, tuple[str, ...], int, FinishReason]] = [
        (stops_last, (), 4, FinishReason.STOP),
        (FakeTarget(), (text_of(STORY[3:5]),), 3, FinishReason.STOP),
        (FakeTarget(), (text_of(STORY[3:6]),), 5, FinishReason.LENGTH),
    ]
    for target, stop, num_shown, reason in cases:
        result = run(collect(make_loop(target, None, max_tokens=5, stop=stop)))
        assert (result.ids, result.text) == (target.story[:5], text_of(STORY[:num_shown]))
        assert result.reason is reason


# Without a drafter, or beside one that is not ready


def test_plain_decoding_asks_for_as_many_rounds_as_allowed_and_left() -> None:
    for max_tokens, first, others in ((20, 8, [8, 4]), (5, 5, [])):
        target = FakeTarget()
        whole_story(target, None, LoopSettings(plain_run_rounds=8), max_tokens)
        assert target.spec.plain_rounds == first
        assert [run.num_rounds for run in target.plain_runs] == others


def test_generation_does_not_wait_for_a_drafter_that_never_gets_ready() -> None:
    target, drafter = pair()
    drafter.ready_after = 10_000
    limits = LoopSettings(bridge_rounds=3, block_timeout_s=TEST_SECONDS, verdict_timeout_s=TEST_SECONDS)
    whole_story(target, drafter, limits)
    assert target.spec.plain_rounds == 1  # the first verdict comes after one token
    assert [run.num_rounds for run in target.plain_runs] == [3, 3, 3, 3, 3, 3, 1]
    assert (drafter.calibrations, drafter.open_cancelled) == ([], True)


def test_drafter_that_gets_ready_is_used_from_the_end_of_the_plain_run_on() -> None:
    for ready_after, num_plain in ((0, 1), (4, 5)):
        target, drafter = pair(accepts=[4] * 10)
        drafter.ready_after = ready_after
        whole_story(target, drafter, LoopSettings(bridge_rounds=4))
        drafted = [verdict.num_draft_tokens > 0 for verdict in target.verdicts]
        assert drafted == [False] * num_plain + [True] * (len(drafted) - num_plain)


def test_plain_runs_go_on_where_the_drafters_context_ends() -> None:
    target, drafter = pair(accepts=[4] * 20, context_length=len(PROMPT) + 9)
    whole_story(target, drafter)
    reach = [calibration.fence.prefix_len + calibration.num_draft_tokens for calibration in drafter.calibrations]
    assert (max(reach), target.verdicts[-1].num_draft_tokens) == (drafter.description.context_length - 1, 0)
    assert_both_closed(target, drafter)


# The drafter fails


@pytest.mark.parametrize("ready_after", [0, 4])
def test_drafter_that_refuses_the_session_costs_only_speed(ready_after: int) -> None:
    for error in (NoRoomError("full"), GONE, ModelMismatchError("other words"), RuntimeError("a bug")):
        target, drafter = pair()
        drafter.open_error, drafter.ready_after = error, ready_after
        result = whole_story(target, drafter)
        assert result.drafter_error == str(error) or isinstance(error, RuntimeError)
        assert drafter.calibrations == []
        assert max(run.num_rounds for run in target.plain_runs) > LoopSettings().bridge_rounds, "no bridging"


@pytest.mark.parametrize(
    ("act", "told"),
    [(lambda drafter: drafter.tell(DrafterLost(GONE)), "gone"), (lambda _: None, ""), (refuse, TOO_SLOW)],
    ids=["lost", "asleep", "cannot be asked"],
)
def test_failed_block_of_a_drafter_makes_the_same_round_a_plain_one(
    act: Callable[[FakeDrafter], None], told: str
) -> None:
    for number in (0, 1, 2):
        target, drafter = pair(accepts=[2] * 10)
        drafter.answer_block(number, lambda _, drafter=drafter: act(drafter))
        result = whole_story(target, drafter)
        assert (len(drafter.calibrations), result.drafter_error) == (number + 1, told)
        assert target.plain_runs[0].fence == drafter.calibrations[-1].fence
        assert_both_closed(target, drafter)


def test_drafter_lost_while_no_block_is_awaited_asks_for_nothing_twice() -> None:
    unready, full = pair(), pair(accepts=[4] * 10, context_length=len(PROMPT) + 6)
    unready[1].ready_after = 10_000
    for (target, drafter), lost_after in ((unready, 2), (full, 4)):

        def lose(count: int, drafter: FakeDrafter = drafter, lost_after: int = lost_after) -> None:
            if count == lost_after:
                drafter.tell(DrafterLost(GONE))

        target.after_verdict = lose
        assert whole_story(target, drafter).drafter_error == "gone"
        assert target.plain_runs
        assert all(target.verdicts[run.fence.round - 1].plain_rounds_left == 0 for run in target.plain_runs)
    assert [verdict.num_draft_tokens for verdict in full[0].verdicts[:4]] == [0, 4, 0, 0]


@pytest.mark.parametrize("block_wins", [False, True])
def test_block_and_plain_run_that_race_for_a_round_decide_it_once(block_wins: bool) -> None:
    """The drafter was given up: its block comes before the plain run, which finds it being judged, or after it."""
    target, drafter = pair(accepts=[2] * 10)
    target.delay_s = lambda count: 1.0

    def lose(calibration: Calibration) -> None:
        drafter.tell(DrafterLost(GONE))
        if block_wins:
            drafter.send_block(calibration)
        else:
            asyncio.get_running_loop().call_later(0.5, drafter.send_block, calibration)

    drafter.answer_block(1, lose)
    whole_story(target, drafter)
    assert [verdict.num_draft_tokens > 0 for verdict in target.verdicts[:4]] == [False, True, block_wins, False]
    assert len(drafter.calibrations) == 2
    assert sum(verdict.num_draft_tokens > 0 for verdict in target.verdicts) == 1 + block_wins


def test_time_limit_of_blocks_does_not_apply_to_the_verifiers_own_work() -> None:
    """The first verdict and the first after the drafter's context ended are plain, and slower than a block may be."""
    target, drafter = pair(accepts=[4] * 10, context_length=len(PROMPT) + 6)
    target.delay_s = lambda count: 3.0 * LoopSettings().block_timeout_s if count in (0, 2) else 0.0
    result = whole_story(target, drafter)
    assert [verdict.num_draft_tokens for verdict in target.verdicts[:3]] == [0, 4, 0]
    assert (drafter.hurried, result.drafter_error) == ([], "")


def test_peer_that_cannot_be_closed_does_not_fail_a_finished_generation() -> None:
    """The other peer must be told all the same."""
    for failing in (0, 1):
        peers = pair(accepts=[2] * 10)
        peers[failing].close = refuse  # type: ignore[method-assign]
        whole_story(*peers)
        assert len(peers[1 - failing].closed) == 1


# Messages out of place


MISPLACED: dict[str, Callable[[Fence], Fence]] = {
    "old round": lambda fence: replace(fence, round=fence.round - 1),
    "future round": lambda fence: replace(fence, round=fence.round + 1),
    "other epoch": lambda fence: replace(fence, epoch=fence.epoch + 1),
    "other session": lambda fence: replace(fence, session_id=fence.session_id ^ 1),
    "other prefix": lambda fence: replace(fence, prefix_hash=fence.prefix_hash ^ 1),
    "other length": lambda fence: replace(fence, prefix_len=fence.prefix_len - 1),
}


@pytest.mark.parametrize("with_drafter", [False, True])
def test_verdict_of_another_round_or_a_second_one_is_ignored(with_drafter: bool) -> None:
    for name in (*MISPLACED, "twice"):
        target, drafter = pair(accepts=[2] * 10)

        def disturb(count: int, target: FakeTarget = target, name: str = name) -> None:
            if name == "twice":
                target.tell(target.verdicts[-1])
            else:
                fence = MISPLACED[name](target.session.fence)
                target.tell(Verdict(fence, [51, 50, 49], 2, 2, TokenSource.BONUS, plain_rounds_left=0))

        target.after_verdict = disturb
        result = whole_story(target, drafter if with_drafter else None)
        assert result.statistics.num_rounds == len(target.verdicts), name


# The verifier fails, or the user leaves


def assert_both_closed(target: FakeTarget, drafter: FakeDrafter) -> None:
    key = (target.spec.session_id, target.spec.epoch)
    assert (target.closed, drafter.closed) == ([key], [key])


def test_both_peers_are_closed_at_the_end() -> None:
    target, drafter = pair(accepts=[2] * 10)
    whole_story(target, drafter)
    assert_both_closed(target, drafter)


@pytest.mark.parametrize(("after", "ready_after"), [(1, 0), (2, 0), (4, 0), (1, 10_000)])
@in_virtual_time
async def test_both_peers_are_closed_when_the_consumer_leaves_early(after: int, ready_after: int) -> None:
    """And an opening that goes on is cancelled."""
    target, drafter = pair(accepts=[1] * 20)
    drafter.ready_after = ready_after
    events = make_loop(target, drafter).run()
    for _ in range(after):
        assert isinstance(await anext(events), Delta)
    assert target.closed == []
    await events.aclose()
    await asyncio.sleep(0)
    assert drafter.open_cancelled == (ready_after > 0)
    assert_both_closed(target, drafter)


@in_virtual_time
async def test_both_peers_are_closed_when_the_waiting_consumer_is_cancelled() -> None:
    target, drafter = pair()
    target.after_verdict = lambda count: setattr(target, "silent", count == 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(make_loop(target, drafter)), 1.0)
    assert len(target.verdicts) == 2
    assert_both_closed(target, drafter)
