"""The verifier's scheduler: who gets in, which messages count, whose turn it is, and what a step leaves behind."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from draftwire.distributions import DraftDistributions
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError
from draftwire.randomness import KEY_BYTES
from draftwire.rounds import (
    CommittedTokens,
    DraftBlock,
    DraftTimings,
    ExtraToken,
    Fence,
    FenceVerdict,
    PlainRun,
    TargetSessionSpec,
    Verdict,
)
from draftwire.sampling import SamplingParams
from draftwire.services.verifier.scheduler import Scheduler, Step, StepResult, TargetSession

CONTEXT_LENGTH = 12
VOCAB_SIZE = 100
STOP_TOKEN = 99
PROMPT = [1, 2, 3, 4]


def make_scheduler(max_sessions: int = 4, clock: Callable[[], float] = lambda: 0.0) -> Scheduler:
    return Scheduler(CONTEXT_LENGTH, VOCAB_SIZE, max_sessions, max_draft_tokens=5, clock=clock)


def make_spec(session_id: int = 1, **changes: Any) -> TargetSessionSpec:
    spec = TargetSessionSpec(
        session_id=session_id,
        epoch=0,
        first_round=0,
        choice=0,
        token_ids=PROMPT,
        prompt_len=len(PROMPT),
        sampling=SamplingParams(),
        rule="block",
        verifying_key=bytes(KEY_BYTES),
        max_draft_tokens=3,
        plain_rounds=0,
        stop_token_ids=frozenset({STOP_TOKEN}),
    )
    return replace(spec, **changes)


def make_block(fence: Fence, token_ids: list[int] | None = None, **changes: Any) -> DraftBlock:
    return DraftBlock(fence, token_ids or [10, 11], DraftDistributions.one_hot(VOCAB_SIZE), **changes)


def first_fence(session_id: int = 1, epoch: int = 0) -> Fence:
    """What the first message of a session must say, computed from the prompt alone."""
    return Fence(session_id, epoch, 0, len(PROMPT), CommittedTokens(PROMPT).hash)


def complete(scheduler: Scheduler, step: Step, token_ids: list[int], started_at: float = 0.0) -> Verdict | None:
    return scheduler.complete(step, StepResult(token_ids, len(token_ids) - 1, verify_us=7), started_at)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def run_plain_steps(scheduler: Scheduler, tokens: list[int]) -> list[Verdict]:
    """Decodes up to as many tokens as given, one per step, until the scheduler has no more work."""
    verdicts = []
    for token in tokens:
        step = scheduler.next_step()
        if step is None:
            break
        verdict = complete(scheduler, step, [token])
        assert verdict is not None
        verdicts.append(verdict)
    return verdicts


def send_block(scheduler: Scheduler, fence: Fence) -> FenceVerdict:
    return scheduler.offer_block(make_block(fence))


def send_plain_run(scheduler: Scheduler, fence: Fence) -> FenceVerdict:
    return scheduler.run_plain(PlainRun(fence, 2))


either_message = pytest.mark.parametrize("send", [send_block, send_plain_run])


# Admission


def test_session_beyond_the_limit_is_refused_until_another_closes() -> None:
    scheduler = make_scheduler(max_sessions=2)
    scheduler.open(make_spec(1), lease_id=0)
    scheduler.open(make_spec(2), lease_id=0)
    with pytest.raises(NoRoomError):
        scheduler.open(make_spec(3, plain_rounds=1), lease_id=0)
    assert set(scheduler.sessions) == {(1, 0), (2, 0)}
    assert scheduler.next_step() is None
    scheduler.close(1, 0)
    scheduler.open(make_spec(3), lease_id=0)
    assert set(scheduler.sessions) == {(2, 0), (3, 0)}


def test_session_that_is_open_cannot_be_opened_again() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(), lease_id=1)
    assert scheduler.sessions[1, 0] is session


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": []},
        {"token_ids": [1] * CONTEXT_LENGTH},
        {"token_ids": [1, 2, 3, VOCAB_SIZE]},
        {"prompt_len": 0},
        {"prompt_len": len(PROMPT) + 1},
        {"max_draft_tokens": 6},
        {"rule": "typical"},
    ],
)
def test_spec_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(**changes), lease_id=0)
    assert not scheduler.sessions


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1] * (CONTEXT_LENGTH - 1)},
        {"token_ids": [1, 2, 3, VOCAB_SIZE - 1]},
        {"prompt_len": 1},
        {"max_draft_tokens": 5},
        {"max_draft_tokens": 0},
        {"rule": "token"},
    ],
)
def test_spec_at_the_edge_of_its_range_is_admitted(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(**changes), lease_id=0)
    assert len(scheduler.sessions) == 1


def test_session_goes_on_from_its_first_round() -> None:
    """A session that was moved starts with the round after the last committed one."""
    scheduler = make_scheduler()
    scheduler.open(make_spec(first_round=9, plain_rounds=1), lease_id=0)
    (verdict,) = run_plain_steps(scheduler, [20])
    assert verdict.fence == replace(first_fence(), round=9)


def test_sessions_are_found_by_their_lease() -> None:
    scheduler = make_scheduler()
    opened = [scheduler.open(make_spec(session_id), lease_id=session_id % 2) for session_id in (1, 2, 3)]
    assert scheduler.of_lease(1) == [opened[0], opened[2]]
    assert scheduler.of_lease(5) == []


# Fences


def test_block_for_the_current_round_becomes_a_step() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    block = make_block(first_fence())
    assert scheduler.offer_block(block) is FenceVerdict.CURRENT
    assert scheduler.next_step() == Step(session, block)
    assert scheduler.next_step() is None
    assert not scheduler.dropped


def test_plain_run_for_the_current_round_becomes_steps() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    assert scheduler.run_plain(PlainRun(first_fence(), 2)) is FenceVerdict.CURRENT
    assert len(run_plain_steps(scheduler, [20, 21, 22, 23])) == 2
    assert not scheduler.dropped


@either_message
@pytest.mark.parametrize("wrong", [{}, {"prefix_hash": 1}, {"prefix_len": 999}])
def test_message_for_a_past_round_is_dropped_and_counted(
    send: Callable[[Scheduler, Fence], FenceVerdict], wrong: dict[str, int]
) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert send(scheduler, replace(first_fence(), **wrong)) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    assert scheduler.next_step() is None
    assert session.committed.ids == [*PROMPT, 20]


@either_message
def test_message_of_a_past_epoch_is_dropped_and_counted(send: Callable[[Scheduler, Fence], FenceVerdict]) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(epoch=0), lease_id=0)
    scheduler.close(1, 0)
    scheduler.open(make_spec(epoch=1), lease_id=0)
    assert send(scheduler, first_fence(epoch=0)) is FenceVerdict.STALE
    assert scheduler.dropped.total() == 1
    assert scheduler.next_step() is None


@either_message
def test_message_of_an_unknown_session_is_dropped_and_counted(
    send: Callable[[Scheduler, Fence], FenceVerdict],
) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(1), lease_id=0)
    assert send(scheduler, first_fence(session_id=2)) is FenceVerdict.STALE
    assert scheduler.dropped == {"unknown_session": 1}
    assert scheduler.next_step() is None


@either_message
@pytest.mark.parametrize("wrong", [{"round": 1}, {"prefix_hash": 1}, {"prefix_len": len(PROMPT) - 1}])
def test_message_from_the_future_or_about_another_prefix_is_a_violation(
    send: Callable[[Scheduler, Fence], FenceVerdict], wrong: dict[str, int]
) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    assert send(scheduler, replace(first_fence(), **wrong)) is FenceVerdict.VIOLATION
    assert scheduler.dropped == {"violation": 1}
    assert scheduler.next_step() is None
    assert session.fence == first_fence()


# One piece of work per round


def test_duplicate_of_a_pending_block_is_dropped_and_counted() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    scheduler.offer_block(make_block(first_fence(), [10]))
    assert scheduler.offer_block(make_block(first_fence(), [11])) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    step = next_step(scheduler)
    assert step.block is not None
    assert step.block.token_ids == [10]
    assert scheduler.next_step() is None


@either_message
@pytest.mark.parametrize("in_step", [False, True])
def test_message_is_dropped_while_a_block_decides_the_round(
    send: Callable[[Scheduler, Fence], FenceVerdict], in_step: bool
) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    scheduler.offer_block(make_block(first_fence(), [10]))
    step = next_step(scheduler) if in_step else None
    assert send(scheduler, first_fence()) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    verdict = complete(scheduler, step or next_step(scheduler), [10, 20])
    assert verdict is not None
    assert (verdict.num_draft_tokens, verdict.plain_rounds_left) == (1, 0)
    assert scheduler.next_step() is None


@either_message
@pytest.mark.parametrize("in_step", [False, True])
def test_message_is_dropped_while_a_plain_round_is_decided(
    send: Callable[[Scheduler, Fence], FenceVerdict], in_step: bool
) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    step = next_step(scheduler) if in_step else None
    assert send(scheduler, first_fence()) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    verdict = complete(scheduler, step or next_step(scheduler), [20])
    assert verdict is not None
    assert (verdict.num_draft_tokens, verdict.plain_rounds_left) == (0, 0)
    assert scheduler.next_step() is None


def test_block_is_dropped_between_the_rounds_of_a_plain_run() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert scheduler.offer_block(make_block(session.fence)) is FenceVerdict.STALE
    assert [verdict.num_draft_tokens for verdict in run_plain_steps(scheduler, [21, 22, 23])] == [0, 0]


# What a step leaves behind


def test_completing_commits_the_tokens_so_that_the_next_fence_matches() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.offer_block(make_block(first_fence(), [10, 11]))
    complete(scheduler, next_step(scheduler), [10, 20])
    assert session.committed.ids == [*PROMPT, 10, 20]
    after = Fence(1, 0, 1, 6, CommittedTokens([*PROMPT, 10, 20]).hash)
    assert scheduler.offer_block(make_block(after, [30])) is FenceVerdict.CURRENT
    verdict = complete(scheduler, next_step(scheduler), [30, 31])
    assert verdict is not None
    assert verdict.fence == after
    assert scheduler.run_plain(PlainRun(replace(session.fence, round=2), 1)) is FenceVerdict.CURRENT
    assert next_step(scheduler).block is None


@pytest.mark.parametrize(
    ("draft", "decided", "extra"),
    [
        ([10, 11, 12], [20], ExtraToken.RECOVERED),
        ([10, 11, 12], [10, 11, 20], ExtraToken.RECOVERED),
        ([10, 11, 12], [10, 11, 12, 20], ExtraToken.BONUS),
        ([10], [10, 20], ExtraToken.BONUS),
    ],
)
def test_verdict_of_a_block_says_what_was_decided(draft: list[int], decided: list[int], extra: ExtraToken) -> None:
    scheduler = make_scheduler(clock=lambda: 10.0)
    scheduler.open(make_spec(), lease_id=0)
    timings = DraftTimings(calibration_us=3, draft_us=4)
    scheduler.offer_block(make_block(first_fence(), draft, timings=timings))
    assert complete(scheduler, next_step(scheduler), decided, started_at=10.5) == Verdict(
        fence=first_fence(),
        token_ids=decided,
        num_draft_tokens=len(draft),
        num_accepted_tokens=len(decided) - 1,
        extra=extra,
        plain_rounds_left=0,
        verify_us=7,
        queue_us=500_000,
        timings=timings,
    )


def test_verdict_of_a_plain_round_says_what_was_decided() -> None:
    scheduler = make_scheduler(clock=lambda: 10.0)
    scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    assert complete(scheduler, next_step(scheduler), [20], started_at=10.25) == Verdict(
        fence=first_fence(),
        token_ids=[20],
        num_draft_tokens=0,
        num_accepted_tokens=0,
        extra=ExtraToken.PLAIN,
        plain_rounds_left=2,
        verify_us=7,
        queue_us=250_000,
    )


def test_time_in_the_queue_is_counted_from_each_rounds_own_start() -> None:
    now = [1.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    scheduler.open(make_spec(plain_rounds=2), lease_id=0)
    step, now[0] = next_step(scheduler), 5.0
    complete(scheduler, step, [20], started_at=2.0)  # done at 5.0, when the second round begins to wait
    verdict = complete(scheduler, next_step(scheduler), [21], started_at=5.001)
    assert verdict is not None
    assert verdict.queue_us == pytest.approx(1000, abs=1)


def test_plain_run_counts_down_and_ends() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    verdicts = run_plain_steps(scheduler, [20, 21, 22, 23])
    assert [verdict.plain_rounds_left for verdict in verdicts] == [2, 1, 0]
    assert [verdict.fence.round for verdict in verdicts] == [0, 1, 2]
    assert [verdict.fence.prefix_len for verdict in verdicts] == [4, 5, 6]
    assert session.committed.ids == [*PROMPT, 20, 21, 22]


def test_session_without_plain_rounds_waits_for_work() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=0), lease_id=0)
    assert scheduler.next_step() is None


def test_plain_run_ends_at_a_stop_token() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=6), lease_id=0)
    verdicts = run_plain_steps(scheduler, [20, STOP_TOKEN, 21, 22])
    assert [verdict.plain_rounds_left for verdict in verdicts] == [5, 0]
    assert session.committed.ids == [*PROMPT, 20, STOP_TOKEN]


def test_plain_run_ends_at_the_contexts_end() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=50), lease_id=0)
    verdicts = run_plain_steps(scheduler, [20] * 50)
    assert len(verdicts) == CONTEXT_LENGTH - len(PROMPT)
    assert verdicts[-1].plain_rounds_left == 0
    assert len(session.committed) == CONTEXT_LENGTH


def test_plain_run_of_no_rounds_does_not_decode_for_ever() -> None:
    """Zero can come over the wire. Refusing it would be as good as doing nothing or one round."""
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    with suppress(DraftwireError):
        scheduler.run_plain(PlainRun(first_fence(), 0))
    verdicts = run_plain_steps(scheduler, [20] * 5)
    assert all(verdict.plain_rounds_left >= 0 for verdict in verdicts)
    assert len(verdicts) <= 1


def test_plain_run_in_a_full_context_decodes_nothing() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=50), lease_id=0)
    run_plain_steps(scheduler, [20] * 50)
    with suppress(DraftwireError):
        scheduler.run_plain(PlainRun(session.fence, 1))
    assert run_plain_steps(scheduler, [21]) == []
    assert len(session.committed) == CONTEXT_LENGTH


# Blocks of the wrong size


@pytest.mark.parametrize("length", [0, 4])
def test_block_of_a_wrong_length_is_refused_and_the_round_stays_open(length: int) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(max_draft_tokens=3), lease_id=0)
    with pytest.raises(InvalidRequestError):
        scheduler.offer_block(replace(make_block(first_fence()), token_ids=[10] * length))
    assert scheduler.next_step() is None
    assert scheduler.offer_block(make_block(first_fence(), [10] * 3)) is FenceVerdict.CURRENT


@pytest.mark.parametrize(("draft_len", "fits"), [(2, True), (3, False)])
def test_block_must_leave_room_for_its_extra_token_in_the_context(draft_len: int, fits: bool) -> None:
    scheduler = make_scheduler()
    prompt = [5] * (CONTEXT_LENGTH - 3)
    session = scheduler.open(make_spec(token_ids=prompt), lease_id=0)
    block = make_block(session.fence, [10] * draft_len)
    if fits:
        assert scheduler.offer_block(block) is FenceVerdict.CURRENT
        complete(scheduler, next_step(scheduler), [10, 10, 20])
        assert len(session.committed) == CONTEXT_LENGTH
    else:
        with pytest.raises(InvalidRequestError):
            scheduler.offer_block(block)
        assert scheduler.next_step() is None


def test_stale_block_of_a_wrong_length_is_dropped_not_refused() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert scheduler.offer_block(make_block(first_fence(), [10] * 50)) is FenceVerdict.STALE


def test_abandoned_step_leaves_the_round_open() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.offer_block(make_block(first_fence()))
    scheduler.abandon(next_step(scheduler))
    assert session.fence == first_fence()
    assert scheduler.next_step() is None
    assert scheduler.run_plain(PlainRun(first_fence(), 1)) is FenceVerdict.CURRENT
    (verdict,) = run_plain_steps(scheduler, [20, 21])
    assert verdict.extra is ExtraToken.PLAIN
    assert not scheduler.dropped


def test_another_block_may_follow_an_abandoned_one() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    scheduler.offer_block(make_block(first_fence(), [10]))
    scheduler.abandon(next_step(scheduler))
    better = make_block(first_fence(), [11], attempt=1)
    assert scheduler.offer_block(better) is FenceVerdict.CURRENT
    assert next_step(scheduler).block == better


# Several sessions


def ids_of(steps: list[TargetSession]) -> list[int]:
    return [session.spec.session_id for session in steps]


def test_sessions_take_turns() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, plain_rounds=2), lease_id=0)
    order = []
    while (step := scheduler.next_step()) is not None:
        order.append(step.session)
        complete(scheduler, step, [20])
    assert ids_of(order) == [1, 2, 3, 1, 2, 3]


def test_block_waits_for_one_turn_of_a_long_plain_run_only() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(1, plain_rounds=6), lease_id=0)
    scheduler.open(make_spec(2), lease_id=0)
    step = next_step(scheduler)
    scheduler.offer_block(make_block(first_fence(session_id=2)))
    complete(scheduler, step, [20])
    assert next_step(scheduler).session.spec.session_id == 2


def test_sessions_do_not_see_each_others_tokens() -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.open(make_spec(session_id, plain_rounds=2), lease_id=0) for session_id in (1, 2))
    run_plain_steps(scheduler, [20, 30, 21, 31])
    assert (first.committed.ids, second.committed.ids) == ([*PROMPT, 20, 21], [*PROMPT, 30, 31])


# Closing


def test_closing_takes_back_waiting_work_of_that_session_only() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, plain_rounds=1), lease_id=0)
    closed = scheduler.close(2, 0)
    assert closed is not None
    assert closed.key == (2, 0)
    order = []
    while (step := scheduler.next_step()) is not None:
        order.append(step.session)
    assert ids_of(order) == [1, 3]


def test_closing_an_unknown_session_does_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    assert scheduler.close(1, 5) is None
    assert scheduler.close(2, 0) is None
    assert len(scheduler.sessions) == 1


def test_result_of_a_step_is_dropped_when_the_session_was_closed_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    step = next_step(scheduler)
    scheduler.close(1, 0)
    assert complete(scheduler, step, [20]) is None
    assert scheduler.next_step() is None


def test_result_of_a_step_is_dropped_when_the_session_was_opened_anew_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    step = next_step(scheduler)
    scheduler.close(1, 0)
    reopened = scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    assert complete(scheduler, step, [20]) is None
    assert reopened.fence == first_fence()
    assert len(run_plain_steps(scheduler, [21, 22])) == 1
    assert reopened.committed.ids == [*PROMPT, 21]
