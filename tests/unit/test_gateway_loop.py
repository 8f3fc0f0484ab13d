"""The outer loop on fakes: the text is the target's own, whatever is accepted and whatever happens to the drafter."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_fakes import (
    DRAFTER,
    PROMPT,
    STOP_TOKEN,
    STORY,
    FakeDrafter,
    FakeTarget,
    Result,
    collect,
    describe,
    make_loop,
    run,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.encoding import Claim, DraftDistributions, decode_one
from draftwire.errors import (
    BlockViolationError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    UnavailableError,
)
from draftwire.keys import Role, derive_key
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import (
    Calibration,
    CommittedTokens,
    Fence,
    Permit,
    PlainRun,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
)
from draftwire.services.admission import Room
from draftwire.services.gateway.config import LoopSettings
from draftwire.services.gateway.loop import Delta, FinishReason
from draftwire.services.gateway.ports import BlocksRefused, DrafterLost, Inbox, TargetLost
from draftwire.services.prefill import PrefillPacer
from draftwire.services.verifier.scheduler import Completed, Scheduler, Step, StepResult
from draftwire.token_source import TokenSource
from draftwire.verification.target import Judgement, Outcome

TEST_SECONDS = 10.0  # a loop that hangs fails, long before pytest's own limit


def assert_whole_story(result: Result, target: FakeTarget, max_tokens: int = 20) -> None:
    assert result.ids == STORY[:max_tokens]
    assert result.text == text_of(STORY[:max_tokens])
    assert result.reason is FinishReason.LENGTH
    assert target.violations == []


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

    def run(self) -> tuple[FakeTarget, FakeDrafter, Result]:
        target, drafter = pair(self.accepts, context_length=self.drafter_context)
        drafter.ready_after = self.ready_after
        limits = LoopSettings(plain_run_rounds=self.plain_run_rounds, bridge_rounds=self.bridge_rounds)
        changes = {"max_tokens": self.max_tokens, "num_speculative_tokens": self.num_speculative_tokens}
        result = run(collect(make_loop(target, drafter, limits, **changes)))
        return target, drafter, result


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


@settings(max_examples=150, deadline=None)
@given(scenario=scenarios)
def test_text_and_ids_are_the_targets_whatever_is_drafted_and_accepted(scenario: Scenario) -> None:
    target, _, result = scenario.run()
    assert_whole_story(result, target, scenario.max_tokens)
    assert result.finish is not None
    assert ("context" in result.finish.drafter_error) == (
        scenario.num_speculative_tokens > 0 and scenario.drafter_context <= len(PROMPT)
    )


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios)
def test_calibrations_carry_exactly_the_ids_committed_since_the_last(scenario: Scenario) -> None:
    target, drafter, _ = scenario.run()
    known = list(PROMPT)
    for calibration in drafter.calibrations:
        assert calibration.base_len == len(known)
        known += calibration.token_ids
        assert known == [*PROMPT, *STORY[: len(known) - len(PROMPT)]]
        fence = calibration.fence
        assert (fence.prefix_len, fence.prefix_hash) == (len(known), CommittedTokens(known).hash)
        assert (fence.session_id, fence.epoch) == (target.spec.session_id, target.spec.epoch)
        assert calibration.attempt == 0
    rounds = [calibration.fence.round for calibration in drafter.calibrations]
    decided = [verdict.fence.round for verdict in target.verdicts if verdict.num_draft_tokens]
    assert rounds == decided == sorted(set(rounds))


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios)
def test_blocks_are_as_long_as_wanted_unless_the_budget_or_the_drafters_context_ends(scenario: Scenario) -> None:
    """The extra token is counted on: a block never drafts the last token of the budget."""
    _, drafter, _ = scenario.run()
    for calibration in drafter.calibrations:
        committed = calibration.fence.prefix_len
        remaining = scenario.max_tokens - (committed - len(PROMPT))
        room = scenario.drafter_context - committed
        assert calibration.num_draft_tokens == min(scenario.num_speculative_tokens, remaining - 1, room)
        assert calibration.num_draft_tokens >= 1


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios)
def test_statistics_add_up(scenario: Scenario) -> None:
    target, _, result = scenario.run()
    assert result.finish is not None
    statistics, verdicts = result.finish.statistics, target.verdicts
    blocks = [verdict for verdict in verdicts if verdict.num_draft_tokens]
    longest = max((verdict.num_draft_tokens for verdict in blocks), default=0)
    per_position = [sum(verdict.num_accepted_tokens > place for verdict in blocks) for place in range(longest)]
    assert statistics.num_prompt_tokens == len(PROMPT)
    assert statistics.num_generated_tokens == scenario.max_tokens
    assert statistics.num_emitted_tokens == sum(len(verdict.token_ids) for verdict in verdicts)
    assert statistics.num_emitted_tokens == statistics.num_rounds + statistics.num_accepted_tokens
    assert statistics.num_rounds == len(verdicts)
    assert statistics.num_drafts == len(blocks)
    assert statistics.num_draft_tokens == sum(verdict.num_draft_tokens for verdict in blocks)
    assert statistics.num_accepted_tokens == sum(verdict.num_accepted_tokens for verdict in blocks)
    assert statistics.num_accepted_tokens_per_pos == per_position
    accepted = [verdict.num_accepted_tokens for verdict in blocks]
    most = max((verdict.num_draft_tokens for verdict in blocks), default=-1)
    assert statistics.acceptance_histogram == [accepted.count(number) for number in range(most + 1)]
    emitted = [len(verdict.token_ids) for verdict in blocks]
    assert statistics.mean_acceptance_length == pytest.approx(sum(emitted) / len(blocks) if blocks else 0.0)
    num_drafted = sum(verdict.num_draft_tokens for verdict in blocks)
    assert statistics.draft_acceptance_rate == (sum(accepted) / num_drafted if num_drafted else 0)
    assert statistics.verify_us == sum(verdict.verify_us for verdict in verdicts)
    assert statistics.queue_us == sum(verdict.queue_us for verdict in verdicts)
    assert statistics.calibration_us == sum(verdict.timings.calibration_us for verdict in blocks)
    assert statistics.draft_us == sum(verdict.timings.draft_us for verdict in blocks)
    assert 0 < statistics.time_to_first_token_us <= statistics.duration_us


async def test_cached_tokens_of_the_prompt_are_counted_once_however_many_rounds_tell_of_them() -> None:
    target, drafter = pair(accepts=[2] * 10)
    target.num_cached_tokens = 2
    result = await collect(make_loop(target, drafter))
    assert result.finish is not None
    assert result.finish.statistics.num_rounds > 2
    assert result.finish.statistics.num_cached_prompt_tokens == 2


async def test_blocks_carry_the_generation_once_the_drafter_is_ready() -> None:
    target, drafter = pair(accepts=[4] * 10)
    assert_whole_story(await collect(make_loop(target, drafter, max_tokens=21)), target, 21)
    drafts = [verdict.num_draft_tokens for verdict in target.verdicts]
    assert drafts == [0, 4, 4, 4, 4]


async def test_deltas_are_shown_round_by_round() -> None:
    target, drafter = pair(accepts=[2, 0, 4])
    deltas = [event async for event in make_loop(target, drafter, max_tokens=10).run() if isinstance(event, Delta)]
    assert [delta.token_ids for delta in deltas] == [verdict.token_ids for verdict in target.verdicts]
    assert [delta.text for delta in deltas] == [text_of(verdict.token_ids) for verdict in target.verdicts]


async def test_specs_say_what_the_request_asks_for() -> None:
    target, drafter = pair()
    sampling = SamplingParams(temperature=0.5, top_k=7)
    loop = make_loop(target, drafter, sampling=sampling, rule="token", num_speculative_tokens=2, seed=11)
    await collect(loop)
    for spec in (target.spec, drafter.spec):
        assert spec.token_ids[: len(PROMPT)] == PROMPT
        assert (spec.prompt_len, spec.sampling, spec.max_draft_tokens) == (len(PROMPT), sampling, 2)
    assert (target.spec.session_id, target.spec.epoch) == (drafter.spec.session_id, drafter.spec.epoch)
    assert (target.spec.rule, target.spec.stop_token_ids) == ("token", {STOP_TOKEN})
    assert target.spec.verifying_key == derive_key(11, Role.VERIFYING)
    assert drafter.spec.drafting_key == derive_key(11, Role.DRAFTING)
    assert drafter.spec.verifier_address == "target:1"
    assert drafter.spec.target_vocab_size == target.description.vocab_size
    assert (target.spec.cache_salt, drafter.spec.cache_salt) == ("", "")
    assert drafter.spec.permit == Permit.make(target.spec.permit_key, 0)


async def test_target_without_speculation_gets_no_key_that_would_let_a_drafter_in() -> None:
    target = FakeTarget()
    await collect(make_loop(target, None, num_speculative_tokens=0))
    assert target.spec.permit_key == b""


@pytest.mark.parametrize(
    ("drafter_context", "drafter_max_len"), [(10_000, len(PROMPT) + 7), (len(PROMPT) + 7, len(PROMPT) + 7), (6, 6)]
)
async def test_sessions_reserve_room_for_prompt_and_budget_as_far_as_each_models_context_goes(
    drafter_context: int, drafter_max_len: int
) -> None:
    target, drafter = pair(context_length=drafter_context)
    assert_whole_story(await collect(make_loop(target, drafter, max_tokens=7)), target, 7)
    assert target.spec.max_len == len(PROMPT) + 7
    assert drafter.spec.max_len == drafter_max_len


async def test_salt_of_the_request_goes_to_both_peers() -> None:
    target, drafter = pair()
    await collect(make_loop(target, drafter, cache_salt="one tenant"))
    assert (target.spec.cache_salt, drafter.spec.cache_salt) == ("one tenant", "one tenant")


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios)
def test_no_block_reaches_beyond_what_the_sessions_reserved(scenario: Scenario) -> None:
    """The verifier counts the extra token, too."""
    target, drafter, _ = scenario.run()
    for calibration in drafter.calibrations:
        reach = calibration.fence.prefix_len + calibration.num_draft_tokens
        assert reach <= drafter.spec.max_len
        assert reach + 1 <= target.spec.max_len
    for plain in target.plain_runs:
        assert plain.fence.prefix_len + plain.num_rounds <= target.spec.max_len


async def test_every_generation_is_a_session_of_its_own() -> None:
    """Two random 64-bit ids are equal with a probability of 5e-20."""
    targets = [FakeTarget(), FakeTarget()]
    for target in targets:
        await collect(make_loop(target, None))
    assert targets[0].spec.session_id != targets[1].spec.session_id


# Where the text ends


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 20])
@pytest.mark.parametrize("with_drafter", [False, True])
async def test_exactly_max_tokens_are_generated(max_tokens: int, with_drafter: bool) -> None:
    target, drafter = pair(accepts=[4] * 10)
    result = await collect(make_loop(target, drafter if with_drafter else None, max_tokens=max_tokens))
    assert_whole_story(result, target, max_tokens)
    assert len(target.committed) == len(PROMPT) + max_tokens  # the verifier did no more than was wanted


@pytest.mark.parametrize("place", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("with_drafter", [False, True])
async def test_stop_token_ends_the_output_right_there(place: int, with_drafter: bool) -> None:
    """After the plain first token, places 1 to 5 are the first block: four accepted tokens and a bonus token."""
    target = FakeTarget([*STORY[:place], STOP_TOKEN, *STORY[place + 1 :]], accepts=[4] * 10)
    drafter = FakeDrafter(target)
    result = await collect(make_loop(target, drafter if with_drafter else None))
    assert result.ids == [*STORY[:place], STOP_TOKEN]
    assert result.text == text_of(STORY[:place])
    assert result.reason is FinishReason.STOP
    assert result.finish is not None
    assert result.finish.statistics.num_generated_tokens == place + 1
    if with_drafter:
        emitted = {0: 1, 1: 6, 3: 6, 5: 6, 6: 11}[place]
        assert result.finish.statistics.num_emitted_tokens == emitted


async def test_stop_token_as_the_last_of_the_budget_is_a_stop() -> None:
    target = FakeTarget([*STORY[:4], STOP_TOKEN, *STORY])
    result = await collect(make_loop(target, None, max_tokens=5))
    assert result.ids[-1] == STOP_TOKEN
    assert result.reason is FinishReason.STOP


@settings(max_examples=80, deadline=None)
@given(
    start=st.integers(0, 12),
    length=st.integers(1, 6),
    accepts=st.lists(st.integers(0, 5), max_size=20),
    num_speculative_tokens=st.integers(0, 5),
)
def test_stop_string_ends_the_output_at_the_token_that_completes_it(
    start: int, length: int, accepts: list[int], num_speculative_tokens: int
) -> None:
    target, drafter = pair(accepts)
    stop = text_of(STORY[start : start + length])
    changes = {"stop": (stop,), "num_speculative_tokens": num_speculative_tokens}
    result = run(collect(make_loop(target, drafter, **changes)))
    assert result.text == text_of(STORY[:start])
    assert result.ids == STORY[: start + length]
    assert result.reason is FinishReason.STOP


async def test_beginning_of_a_stop_string_is_shown_when_the_budget_ends() -> None:
    target = FakeTarget()
    result = await collect(make_loop(target, None, max_tokens=5, stop=(text_of(STORY[3:6]),)))
    assert_whole_story(result, target, 5)


async def test_stop_string_completed_by_the_last_token_of_the_budget_is_a_stop() -> None:
    result = await collect(make_loop(FakeTarget(), None, max_tokens=5, stop=(text_of(STORY[3:5]),)))
    assert result.text == text_of(STORY[:3])
    assert result.reason is FinishReason.STOP


# Without a drafter, or beside one that is not ready


async def test_drafter_is_left_alone_when_speculation_is_off() -> None:
    target, drafter = pair()
    assert_whole_story(await collect(make_loop(target, drafter, num_speculative_tokens=0)), target)
    assert (drafter.opened, drafter.calibrations, drafter.closed) == (0, [], [])


async def test_plain_decoding_asks_for_as_many_rounds_as_allowed_and_left() -> None:
    target = FakeTarget()
    limits = LoopSettings(plain_run_rounds=8)
    assert_whole_story(await collect(make_loop(target, None, limits)), target)
    assert target.spec.plain_rounds == 8
    assert [run.num_rounds for run in target.plain_runs] == [8, 4]


async def test_plain_decoding_asks_for_no_more_rounds_than_the_budget() -> None:
    target = FakeTarget()
    assert_whole_story(await collect(make_loop(target, None, max_tokens=5)), target, 5)
    assert target.spec.plain_rounds == 5
    assert target.plain_runs == []


async def test_generation_does_not_wait_for_a_drafter_that_never_gets_ready() -> None:
    target, drafter = pair()
    drafter.ready_after = 10_000
    limits = LoopSettings(bridge_rounds=3, block_timeout_s=TEST_SECONDS, verdict_timeout_s=TEST_SECONDS)
    assert_whole_story(await collect(make_loop(target, drafter, limits)), target)
    assert target.spec.plain_rounds == 1  # the first verdict comes after one token
    assert [run.num_rounds for run in target.plain_runs] == [3, 3, 3, 3, 3, 3, 1]
    assert drafter.calibrations == []
    await asyncio.sleep(0)
    assert drafter.open_cancelled


async def test_drafter_that_gets_ready_late_is_used_from_then_on() -> None:
    target, drafter = pair(accepts=[4] * 10)
    drafter.ready_after = 5
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    drafted = [verdict.num_draft_tokens > 0 for verdict in target.verdicts]
    assert drafted[:5] == [False] * 5
    assert drafted == sorted(drafted)
    assert drafted[-1]


async def test_plain_runs_go_on_where_the_drafters_context_ends() -> None:
    target, drafter = pair(accepts=[4] * 20, context_length=len(PROMPT) + 9)
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    reach = [calibration.fence.prefix_len + calibration.num_draft_tokens for calibration in drafter.calibrations]
    assert max(reach) == drafter.description.context_length
    assert target.verdicts[-1].num_draft_tokens == 0
    assert drafter.closed == [(target.spec.session_id, target.spec.epoch)]


# The drafter fails


@pytest.mark.parametrize("error", [NoRoomError("full"), UnavailableError("gone"), ModelMismatchError("other words")])
@pytest.mark.parametrize("ready_after", [0, 4])
async def test_drafter_that_refuses_the_session_costs_only_speed(error: Exception, ready_after: int) -> None:
    target, drafter = pair()
    drafter.open_error, drafter.ready_after = error, ready_after
    result = await collect(make_loop(target, drafter))
    assert_whole_story(result, target)
    assert result.finish is not None
    assert result.finish.drafter_error == str(error)
    assert drafter.calibrations == []
    assert max(run.num_rounds for run in target.plain_runs) > LoopSettings().bridge_rounds  # long runs, no bridging


async def test_drafter_that_opens_with_an_unforeseen_error_costs_only_speed() -> None:
    target, drafter = pair()
    drafter.open_error = RuntimeError("a bug")
    assert_whole_story(await collect(make_loop(target, drafter)), target)


def assert_no_plain_run_overlaps_another(target: FakeTarget) -> None:
    assert target.plain_runs
    assert all(target.verdicts[run.fence.round - 1].plain_rounds_left == 0 for run in target.plain_runs)


def lose_block(target: FakeTarget, drafter: FakeDrafter, number: int, then: Callable[[Calibration], None]) -> None:
    """Makes the drafter answer its `number`-th calibration (from 0) with `then` instead of a block."""

    def on_calibration(calibration: Calibration) -> None:
        if len(drafter.calibrations) == number + 1:
            then(calibration)
        else:
            drafter.send_block(calibration)

    drafter.on_calibration = on_calibration


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_drafter_lost_while_a_block_is_awaited_turns_the_same_round_into_a_plain_one(number: int) -> None:
    target, drafter = pair(accepts=[2] * 10)
    lose_block(target, drafter, number, lambda _: drafter.tell(DrafterLost(UnavailableError("gone"))))
    result = await collect(make_loop(target, drafter))
    assert_whole_story(result, target)
    assert len(drafter.calibrations) == number + 1
    assert target.plain_runs[0].fence == drafter.calibrations[-1].fence
    assert result.finish is not None
    assert result.finish.drafter_error == "gone"
    assert drafter.closed == [(target.spec.session_id, target.spec.epoch)]


async def test_drafter_lost_while_no_block_is_awaited_asks_for_nothing_twice() -> None:
    target, drafter = pair()
    drafter.ready_after = 10_000
    target.after_verdict = lambda count: drafter.tell(DrafterLost(UnavailableError("gone"))) if count == 2 else None
    result = await collect(make_loop(target, drafter))
    assert_whole_story(result, target)
    assert_no_plain_run_overlaps_another(target)
    assert result.finish is not None
    assert result.finish.drafter_error == "gone"


async def test_drafter_lost_after_its_context_ended_asks_for_nothing_twice() -> None:
    target, drafter = pair(accepts=[4] * 10, context_length=len(PROMPT) + 5)
    target.after_verdict = lambda count: drafter.tell(DrafterLost(UnavailableError("gone"))) if count == 4 else None
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    assert [verdict.num_draft_tokens for verdict in target.verdicts[:4]] == [0, 4, 0, 0]
    assert_no_plain_run_overlaps_another(target)


async def test_block_that_is_verified_after_the_drafter_was_given_up_is_used_once() -> None:
    """The block and the plain run race for the round at the verifier; here the block wins."""
    target, drafter = pair(accepts=[2] * 10)

    def lose_and_send(calibration: Calibration) -> None:
        drafter.tell(DrafterLost(UnavailableError("gone")))
        drafter.send_block(calibration)

    lose_block(target, drafter, 1, lose_and_send)
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    assert [verdict.num_draft_tokens > 0 for verdict in target.verdicts[:4]] == [False, True, True, False]
    assert len(drafter.calibrations) == 2


async def test_block_that_comes_after_the_plain_run_is_without_effect() -> None:
    """The block and the plain run race for the round at the verifier; here the plain run wins."""
    target, drafter = pair(accepts=[2] * 10)
    late: list[Calibration] = []

    def lose(calibration: Calibration) -> None:
        late.append(calibration)
        drafter.tell(DrafterLost(UnavailableError("gone")))

    lose_block(target, drafter, 1, lose)
    target.after_verdict = lambda count: [drafter.send_block(calibration) for calibration in late] and None
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    assert sum(verdict.num_draft_tokens > 0 for verdict in target.verdicts) == 1


def test_block_that_does_not_come_in_time_turns_the_same_round_into_a_plain_one() -> None:
    target, drafter = pair(accepts=[2] * 10)
    lose_block(target, drafter, 1, lambda _: None)
    result = run(collect(make_loop(target, drafter)))
    assert_whole_story(result, target)
    assert len(drafter.calibrations) == 2
    assert target.plain_runs[0].fence == drafter.calibrations[-1].fence
    assert result.finish is not None
    assert result.finish.drafter_error == "no block in time, not even a part of one"
    assert drafter.closed == [(target.spec.session_id, target.spec.epoch)]


def test_time_limit_of_blocks_does_not_apply_to_the_verifiers_own_work() -> None:
    """The first verdict and the first after the drafter's context ended are plain, and slower than a block may be."""
    target, drafter = pair(accepts=[4] * 10, context_length=len(PROMPT) + 5)
    target.delay_s = lambda count: 3.0 * LoopSettings().block_timeout_s if count in (0, 2) else 0.0
    result = run(collect(make_loop(target, drafter)))
    assert_whole_story(result, target)
    assert [verdict.num_draft_tokens for verdict in target.verdicts[:3]] == [0, 4, 0]
    assert drafter.hurried == []
    assert result.finish is not None
    assert result.finish.drafter_error == ""


async def test_drafter_that_cannot_be_asked_for_a_block_costs_only_speed() -> None:
    """The link's outbox raises when the drafter reads its stream too slowly."""
    target, drafter = pair(accepts=[2] * 10)

    def refuse(calibration: Calibration) -> None:
        raise UnavailableError("a peer reads its stream too slowly")

    lose_block(target, drafter, 1, refuse)
    result = await collect(make_loop(target, drafter))
    assert_whole_story(result, target)
    assert result.finish is not None
    assert result.finish.drafter_error == "a peer reads its stream too slowly"


@pytest.mark.parametrize("failing", ["target", "drafter"])
async def test_peer_that_cannot_be_told_to_close_does_not_fail_a_finished_generation(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's outbox raises when the peer reads its stream too slowly. The other peer must be told all the same."""
    target, drafter = pair(accepts=[2] * 10)
    broken, other = (target, drafter) if failing == "target" else (drafter, target)

    def refuse(session_id: int, epoch: int) -> None:
        raise UnavailableError("a peer reads its stream too slowly")

    monkeypatch.setattr(broken, "close", refuse)
    assert_whole_story(await collect(make_loop(target, drafter)), target)
    assert len(other.closed) == 1


class SchedulerTarget:
    """A verifier made of the real scheduler, whose steps the test runs by hand."""

    def __init__(self) -> None:
        self.connected = True
        self.description = describe("target")
        self.address = "target:1"
        room, pacer = Room(max_sessions=1, kv_cache_tokens=10_000), PrefillPacer(max_added_latency_s=1.0)
        self.scheduler = Scheduler(10_000, STOP_TOKEN + 1, max_draft_tokens=8, room=room, pacer=pacer)
        self.inbox: Inbox
        self.permit_key = b""
        self.block_step: Step | None = None
        self.plain_run_came = asyncio.Event()
        """After the block."""

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        self.inbox, self.permit_key = inbox, spec.permit_key
        self.scheduler.open(spec, lease_id=0)

    def run_plain(self, run: PlainRun) -> None:
        self.scheduler.run_plain(run)
        if self.block_step is not None:
            self.plain_run_came.set()

    def offer_block(self, calibration: Calibration, encoding: Encoding) -> None:
        """Takes a block of one token."""
        vocab_size = STOP_TOKEN + 1
        draft = decode_one(Claim([0], DraftDistributions(encoding, vocab_size)), vocab_size)
        permit, has_distributions = Permit.make(self.permit_key, 0), encoding is not Encoding.NONE
        block = ReceivedBlock(calibration.fence, [0], draft, has_distributions, DRAFTER, permit=permit)
        self.scheduler.take_permit(block)
        self.scheduler.offer_block(block)

    def close(self, session_id: int, epoch: int) -> None:
        self.scheduler.close(session_id, epoch)

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return True

    async def run_plain_steps(self) -> None:
        while True:
            step = self.scheduler.next_step()
            if step is not None:
                (item,) = step.items
                assert item.block is None
                token = STORY[len(item.session.committed) - len(PROMPT)]
                ((_, verdict),) = self.finish(step, Judgement([token], 0))
                assert isinstance(verdict, Verdict)
                self.inbox.put_nowait(verdict)
            await asyncio.sleep(0.001)

    def finish(self, step: Step, outcome: Outcome) -> list[Completed]:
        return self.scheduler.complete(step, StepResult([outcome], [1], [0], num_tokens=1, verify_us=1))


async def test_block_decided_after_the_plain_run_came_does_not_leave_the_next_round_undecided() -> None:
    """A drafter is given up while the verifier scores its block: the plain run finds the round taken and is dropped."""
    target = SchedulerTarget()
    drafter = FakeDrafter(FakeTarget())

    def send_block(calibration: Calibration) -> None:
        target.offer_block(calibration, Encoding.ONE_HOT)
        target.block_step = target.scheduler.next_step()  # the engine works on it
        drafter.tell(DrafterLost(UnavailableError("gone")))

    drafter.on_calibration = send_block
    limits = LoopSettings(verdict_timeout_s=1.0)
    generating = asyncio.create_task(collect(make_loop(target, drafter, limits, max_tokens=5)))
    verifying = asyncio.create_task(target.run_plain_steps())
    await asyncio.wait_for(target.plain_run_came.wait(), TEST_SECONDS)
    assert target.block_step is not None
    (item,) = target.block_step.items
    token = STORY[len(item.session.committed) - len(PROMPT)]
    ((_, verdict),) = target.finish(target.block_step, Judgement([token], 0))
    assert isinstance(verdict, Verdict)
    target.inbox.put_nowait(verdict)
    try:
        assert (await generating).ids == STORY[:5]
    finally:
        verifying.cancel()


async def test_refused_block_leaves_its_round_to_a_plain_run() -> None:
    target = SchedulerTarget()
    drafter = FakeDrafter(FakeTarget())
    refusals = []

    def send_bad_block(calibration: Calibration) -> None:
        with pytest.raises(BlockViolationError) as refusal:
            target.offer_block(calibration, Encoding.NONE)
        refusals.append(refusal)
        target.inbox.put_nowait(BlocksRefused(ModelMismatchError("the verifier refused a block"), 0))

    drafter.on_calibration = send_bad_block
    verifying = asyncio.create_task(target.run_plain_steps())
    try:
        assert (await collect(make_loop(target, drafter, max_tokens=5))).ids == STORY[:5]
    finally:
        verifying.cancel()
    assert len(refusals) == 1


# Messages out of place


@pytest.mark.parametrize(
    "misplace",
    [
        pytest.param(lambda fence: replace(fence, round=fence.round - 1), id="old_round"),
        pytest.param(lambda fence: replace(fence, round=fence.round + 1), id="future_round"),
        pytest.param(lambda fence: replace(fence, epoch=fence.epoch + 1), id="other_epoch"),
        pytest.param(lambda fence: replace(fence, session_id=fence.session_id ^ 1), id="other_session"),
        pytest.param(lambda fence: replace(fence, prefix_hash=fence.prefix_hash ^ 1), id="other_prefix"),
        pytest.param(lambda fence: replace(fence, prefix_len=fence.prefix_len - 1), id="other_length"),
    ],
)
@pytest.mark.parametrize("with_drafter", [False, True])
async def test_verdict_that_is_not_of_the_current_round_is_ignored(
    misplace: Callable[[Fence], Fence], with_drafter: bool
) -> None:
    target, drafter = pair(accepts=[2] * 10)

    def disturb(count: int) -> None:
        wrong = Verdict(misplace(target.fence), [51, 50, 49], 2, 2, TokenSource.BONUS, plain_rounds_left=0)
        target.tell(wrong)

    target.after_verdict = disturb
    result = await collect(make_loop(target, drafter if with_drafter else None))
    assert_whole_story(result, target)
    assert result.finish is not None
    assert result.finish.statistics.num_rounds == len(target.verdicts)


async def test_verdict_that_comes_twice_counts_once() -> None:
    target, drafter = pair(accepts=[2] * 10)
    target.after_verdict = lambda count: target.tell(target.verdicts[-1])
    result = await collect(make_loop(target, drafter))
    assert_whole_story(result, target)
    assert result.finish is not None
    assert result.finish.statistics.num_rounds == len(target.verdicts)


# The verifier fails, or the user leaves


def assert_both_closed(target: FakeTarget, drafter: FakeDrafter) -> None:
    key = (target.spec.session_id, target.spec.epoch)
    assert (target.closed, drafter.closed) == ([key], [key])


@pytest.mark.parametrize("error", [InvalidRequestError("too hot"), NoRoomError("full")])
async def test_refusal_of_the_only_verifier_is_raised(error: Exception) -> None:
    target, drafter = pair()
    target.open_error = error
    with pytest.raises(type(error), match=str(error)):
        await collect(make_loop(target, drafter))
    assert len(target.attempts) == len(target.closed) == 1
    assert drafter.opened == 0


async def test_both_peers_are_closed_at_the_end() -> None:
    target, drafter = pair(accepts=[2] * 10)
    await collect(make_loop(target, drafter))
    assert_both_closed(target, drafter)


@pytest.mark.parametrize("after", [1, 2, 4])
async def test_both_peers_are_closed_when_the_consumer_leaves_early(after: int) -> None:
    target, drafter = pair(accepts=[1] * 20)
    events = make_loop(target, drafter).run()
    for _ in range(after):
        assert isinstance(await anext(events), Delta)
    assert target.closed == []
    await events.aclose()
    assert_both_closed(target, drafter)


async def test_both_peers_are_closed_when_the_consumer_is_cancelled_while_it_waits() -> None:
    target, drafter = pair()
    target.after_verdict = lambda count: setattr(target, "silent", count == 2)
    consumer = asyncio.create_task(collect(make_loop(target, drafter)))
    while not target.silent:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.cancel()
    with suppress(asyncio.CancelledError):
        await consumer
    assert consumer.cancelled()
    assert_both_closed(target, drafter)


async def test_opening_of_the_drafter_is_cancelled_when_the_consumer_leaves() -> None:
    target, drafter = pair()
    drafter.ready_after = 10_000
    events = make_loop(target, drafter).run()
    await anext(events)
    await events.aclose()
    await asyncio.sleep(0)
    assert drafter.open_cancelled
    assert_both_closed(target, drafter)


async def test_errors_meant_for_users_pass_through_unchanged() -> None:
    target, drafter = pair()
    target.after_verdict = lambda count: target.tell(TargetLost(ModelMismatchError("other words")))
    with pytest.raises(ModelMismatchError, match=r"^other words$"):
        await collect(make_loop(target, drafter))
    assert len(target.attempts) == 1
