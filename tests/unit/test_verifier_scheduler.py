"""The verifier's scheduler: who gets in, which messages count, what goes into a step, and what a step leaves behind."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwire.encoding import Claim, DraftDistributions, decode
from draftwire.errors import (
    BlockViolationError,
    DraftwireError,
    InvalidRequestError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
    Violation,
)
from draftwire.keys import KEY_BYTES
from draftwire.models.kv_cache import blocks_for
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import (
    CommittedTokens,
    DraftTimings,
    Fence,
    FenceVerdict,
    Permit,
    PlainRun,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
)
from draftwire.services.admission import ClosedEarly, Room
from draftwire.services.prefill import PrefillPacer
from draftwire.services.verifier.scheduler import Completed, Scheduler, Step, StepItem, StepResult, TargetSession
from draftwire.token_source import TokenSource
from draftwire.verification.target import Judgement, Outcome, StillReading

CONTEXT_LENGTH = 12
VOCAB_SIZE = 100
STOP_TOKEN = 99
PROMPT = [1, 2, 3, 4]
DRAFTER = 7
OTHER = 8
PERMIT_KEY = bytes(range(16))


@dataclass(slots=True)
class FixedPacer(PrefillPacer):
    """Allows the same number of prompt tokens in every step, and notes what it was told."""

    max_added_latency_s: float = 1.0
    tokens: int = 1000
    asked: list[bool] = field(default_factory=list)

    def budget(self, sessions_run: bool, is_alone: bool = False) -> int:
        self.asked.append(sessions_run)
        return self.tokens


def make_scheduler(
    max_sessions: int = 4,
    clock: Callable[[], float] = lambda: 0.0,
    context_length: int = CONTEXT_LENGTH,
    kv_cache_tokens: int = 100_000,
    budget: int = 1000,
) -> Scheduler:
    room, pacer = Room(max_sessions, kv_cache_tokens), FixedPacer(tokens=budget)
    return Scheduler(context_length, VOCAB_SIZE, max_draft_tokens=5, room=room, pacer=pacer, clock=clock)


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
        max_len=CONTEXT_LENGTH,
        permit_key=PERMIT_KEY,
    )
    return replace(spec, **changes)


def long_spec(session_id: int, prompt_len: int, **changes: Any) -> TargetSessionSpec:
    """A session that wants one token after a prompt of any length."""
    given = {"prompt_len": 1, "max_len": prompt_len + 30, "plain_rounds": 1, **changes}
    return make_spec(session_id, **{"token_ids": [1] * prompt_len, **given})


def make_block(
    fence: Fence, token_ids: list[int] | None = None, encoding: Encoding = Encoding.ONE_HOT, **changes: Any
) -> ReceivedBlock:
    """A block as it comes out of the edge, where its distributions were decoded. It shows the first permit."""
    token_ids = [10, 11] if token_ids is None else token_ids
    (draft,) = decode([Claim(token_ids, DraftDistributions(encoding, VOCAB_SIZE))], VOCAB_SIZE)
    given = {"drafter_id": DRAFTER, "has_distributions": encoding is not Encoding.NONE, "permit": permit()} | changes
    return ReceivedBlock(fence, token_ids, draft, **given)


def permit(number: int = 0, key: bytes = PERMIT_KEY) -> Permit:
    return Permit.make(key, number)


def offer(scheduler: Scheduler, block: ReceivedBlock) -> None:
    """Does what the core does with a block."""
    scheduler.take_permit(block)
    scheduler.offer_block(block)


def take(scheduler: Scheduler, block: ReceivedBlock) -> FenceVerdict:
    """Offers a block and returns what became of it, as `run_plain` does."""
    session = scheduler.sessions.get((block.fence.session_id, block.fence.epoch))
    try:
        offer(scheduler, block)
    except BlockViolationError as error:
        if error.violation is Violation.PREFIX:
            return FenceVerdict.VIOLATION
        raise
    return FenceVerdict.CURRENT if session is not None and session.block is block else FenceVerdict.STALE


def first_fence(session_id: int = 1, epoch: int = 0) -> Fence:
    """What the first message of a session must say, computed from the prompt alone."""
    return Fence(session_id, epoch, 0, len(PROMPT), CommittedTokens(PROMPT).hash)


Decide = Callable[[StepItem], list[int] | DraftwireError]
"""Says what a round commits."""


def accept_all(item: StepItem) -> list[int] | DraftwireError:
    return [*(item.block.token_ids if item.block else []), 20]


@dataclass(slots=True)
class Engine:
    """Plays the engine: reads what a step allows, and decides as it is told where all is read."""

    reused: int = 0
    """Tokens of every prompt that need not be read."""
    caches: list[list[Any]] = field(default_factory=list)
    """A session and its tokens in the cache, for each."""

    def run(self, step: Step, decide: Decide = accept_all) -> StepResult:
        outcomes: list[Outcome] = []
        num_unread: list[int] = []
        num_tokens = 0
        for item in step.items:
            cache = self._cache_of(item.session)
            unread = len(item.session.committed) - cache[1]
            assert unread >= 1, "there is something to read"
            decided = decide(item) if unread <= item.max_read else None
            if decided is None:
                assert item.max_read >= 1, "a session that takes part gets on"
                cache[1] += item.max_read
                num_tokens += item.max_read
                outcomes.append(StillReading())
            elif isinstance(decided, DraftwireError):
                outcomes.append(decided)
            else:
                cache[1] = len(item.session.committed) + len(decided) - 1
                num_tokens += unread + (len(item.block.token_ids) if item.block else 0)
                outcomes.append(Judgement(decided, len(decided) - 1))
            is_judged = isinstance(decided, list)
            num_unread.append(1 if is_judged else len(item.session.committed) - cache[1])
        return StepResult(outcomes, num_unread, [self.reused] * len(step.items), num_tokens, verify_us=7)

    def _cache_of(self, session: TargetSession) -> list[Any]:
        for cache in self.caches:
            if cache[0] is session:
                return cache
        first = session.num_reused is None  # else another engine of the test was there before
        self.caches.append([session, self.reused if first else len(session.committed) - session.num_unread])
        return self.caches[-1]


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def ids_of(step: Step) -> list[int]:
    return [item.session.spec.session_id for item in step.items]


def complete(scheduler: Scheduler, step: Step, token_ids: list[int]) -> Verdict | None:
    """Finishes a step of one item with a decision; None if nothing is to be told."""
    told = scheduler.complete(step, Engine().run(step, lambda item: token_ids))
    if not told:
        return None
    ((_, verdict),) = told
    assert isinstance(verdict, Verdict)
    return verdict


def run_plain_steps(scheduler: Scheduler, tokens: list[int]) -> list[Verdict]:
    """Decodes up to as many tokens of one session as given, one per step, until the scheduler has no more work."""
    verdicts = []
    for token in tokens:
        step = scheduler.next_step()
        if step is None:
            break
        verdict = complete(scheduler, step, [token])
        assert verdict is not None
        verdicts.append(verdict)
    return verdicts


def run_steps(scheduler: Scheduler, limit: int, engine: Engine | None = None) -> list[list[Completed]]:
    """Runs at most so many steps, all to their end, and returns what each of them told."""
    engine, told = engine or Engine(), []
    for _ in range(limit):
        step = scheduler.next_step()
        if step is None:
            break
        told.append(scheduler.complete(step, engine.run(step)))
    return told


def send_block(scheduler: Scheduler, fence: Fence) -> FenceVerdict:
    return take(scheduler, make_block(fence))


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


def test_session_reserves_room_for_its_max_len_until_it_closes() -> None:
    scheduler = make_scheduler(context_length=1000, kv_cache_tokens=160)
    scheduler.open(make_spec(1, max_len=100), lease_id=0)
    assert scheduler.room.num_free_blocks == 3
    with pytest.raises(NoRoomError):
        scheduler.open(make_spec(2, max_len=49, plain_rounds=1), lease_id=0)
    assert set(scheduler.sessions) == {(1, 0)}
    assert scheduler.next_step() is None
    scheduler.open(make_spec(3, max_len=48), lease_id=0)
    scheduler.close(1, 0)
    scheduler.open(make_spec(2, max_len=49), lease_id=0)
    assert scheduler.room.num_free_blocks == 3


def test_refused_session_reserves_nothing() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(max_draft_tokens=6), lease_id=0)
    assert scheduler.room.usage == 0.0


def test_session_that_is_open_cannot_be_opened_again() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(), lease_id=1)
    assert scheduler.sessions[1, 0] is session
    scheduler.close(1, 0)
    assert scheduler.room.usage == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": []},
        {"token_ids": [1] * CONTEXT_LENGTH},
        {"token_ids": [1, 2, 3, VOCAB_SIZE]},
        {"prompt_len": 0},
        {"prompt_len": len(PROMPT) + 1},
        {"max_draft_tokens": 6},
        {"rule": "tipical"},
        {"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))},
        {"sampling": SamplingParams(allowed_token_ids=(1, VOCAB_SIZE))},
        {"max_len": CONTEXT_LENGTH + 1},
        {"max_len": len(PROMPT)},
        {"max_len": 0},
    ],
)
def test_spec_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(plain_rounds=1, **changes), lease_id=0)
    assert not scheduler.sessions
    assert scheduler.next_step() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1] * (CONTEXT_LENGTH - 1)},
        {"token_ids": [1, 2, 3, VOCAB_SIZE - 1]},
        {"prompt_len": 1},
        {"max_draft_tokens": 5},
        {"max_draft_tokens": 0},
        {"rule": "token"},
        {"max_len": len(PROMPT) + 1},
        {"max_len": CONTEXT_LENGTH},
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


def test_session_that_was_moved_counts_rounds_on_and_ends_at_the_max_len_of_the_whole_text() -> None:
    scheduler = make_scheduler()
    moved = [*PROMPT, 30, 31, 32]
    spec = make_spec(epoch=2, first_round=5, token_ids=moved, prompt_len=len(PROMPT), max_len=10, plain_rounds=9)
    session = scheduler.open(spec, lease_id=0)
    verdicts = run_plain_steps(scheduler, [20, 21, 22, 23])
    committed = [*moved, 20, 21]
    fences = [Fence(1, 2, 5 + n, 7 + n, CommittedTokens(committed[: 7 + n]).hash) for n in range(3)]
    assert [verdict.fence for verdict in verdicts] == fences
    assert session.committed.ids == [*committed, 22]
    assert verdicts[-1].plain_rounds_left == 0


@pytest.mark.parametrize("max_len", [len(PROMPT) + 2, len(PROMPT)])
def test_session_that_was_moved_needs_room_beyond_what_was_generated(max_len: int) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(token_ids=[*PROMPT, 30, 31], prompt_len=len(PROMPT), max_len=max_len), lease_id=0)


def test_sessions_are_found_by_their_lease() -> None:
    scheduler = make_scheduler()
    opened = [scheduler.open(make_spec(session_id), lease_id=session_id % 2) for session_id in (1, 2, 3)]
    assert scheduler.of_lease(1) == [opened[0], opened[2]]
    assert scheduler.of_lease(5) == []


# Fences


def test_block_for_the_current_round_goes_into_the_next_step() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    block = make_block(first_fence())
    assert take(scheduler, block) is FenceVerdict.CURRENT
    (item,) = next_step(scheduler).items
    assert item.session is session
    assert item.block is block
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
    offer(scheduler, make_block(first_fence(), [10]))
    assert take(scheduler, make_block(first_fence(), [11])) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    (item,) = next_step(scheduler).items
    assert item.block is not None
    assert item.block.token_ids == [10]
    assert scheduler.next_step() is None


@either_message
@pytest.mark.parametrize("in_step", [False, True])
def test_message_is_dropped_while_a_block_decides_the_round(
    send: Callable[[Scheduler, Fence], FenceVerdict], in_step: bool
) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    offer(scheduler, make_block(first_fence(), [10]))
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


@either_message
def test_message_is_dropped_while_the_prompt_is_read_in_parts(send: Callable[[Scheduler, Fence], FenceVerdict]) -> None:
    scheduler = make_scheduler(context_length=100, budget=10)
    session = scheduler.open(long_spec(1, 25), lease_id=0)
    run_steps(scheduler, 1)
    assert send(scheduler, session.fence) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}


def test_block_is_dropped_between_the_rounds_of_a_plain_run() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert take(scheduler, make_block(session.fence)) is FenceVerdict.STALE
    assert [verdict.num_draft_tokens for verdict in run_plain_steps(scheduler, [21, 22, 23])] == [0, 0]


# What a step leaves behind


def test_completing_commits_the_tokens_so_that_the_next_fence_matches() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    offer(scheduler, make_block(first_fence(), [10, 11]))
    complete(scheduler, next_step(scheduler), [10, 20])
    assert session.committed.ids == [*PROMPT, 10, 20]
    after = Fence(1, 0, 1, 6, CommittedTokens([*PROMPT, 10, 20]).hash)
    assert take(scheduler, make_block(after, [30])) is FenceVerdict.CURRENT
    verdict = complete(scheduler, next_step(scheduler), [30, 31])
    assert verdict is not None
    assert verdict.fence == after
    assert scheduler.run_plain(PlainRun(replace(session.fence, round=2), 1)) is FenceVerdict.CURRENT
    assert next_step(scheduler).items[0].block is None


@pytest.mark.parametrize(
    ("draft", "decided", "extra"),
    [
        ([10, 11, 12], [20], TokenSource.RECOVERED),
        ([10, 11, 12], [10, 11, 20], TokenSource.RECOVERED),
        ([10, 11, 12], [10, 11, 12, 20], TokenSource.BONUS),
        ([10], [10, 20], TokenSource.BONUS),
    ],
)
def test_verdict_of_a_block_says_what_was_decided(draft: list[int], decided: list[int], extra: TokenSource) -> None:
    now = [10.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    scheduler.open(make_spec(), lease_id=0)
    timings = DraftTimings(calibration_us=3, draft_us=4)
    offer(scheduler, make_block(first_fence(), draft, timings=timings))
    now[0] = 10.5
    assert complete(scheduler, next_step(scheduler), decided) == Verdict(
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
    now = [10.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    now[0] = 10.25
    assert complete(scheduler, next_step(scheduler), [20]) == Verdict(
        fence=first_fence(),
        token_ids=[20],
        num_draft_tokens=0,
        num_accepted_tokens=0,
        extra=TokenSource.PLAIN,
        plain_rounds_left=2,
        verify_us=7,
        queue_us=250_000,
    )


def test_waiting_for_drafts_is_counted_from_verdict_to_block_and_not_where_nobody_drafts() -> None:
    now = [1.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    session = scheduler.open(make_spec(), lease_id=0)
    offer(scheduler, make_block(first_fence(), [10]))
    complete(scheduler, next_step(scheduler), [20])
    assert scheduler.draft_wait_s == 0.0, "the first block waits for nobody's verdict"
    now[0] = 1.5
    offer(scheduler, make_block(session.fence, [10]))
    assert scheduler.draft_wait_s == pytest.approx(0.5)
    complete(scheduler, next_step(scheduler), [21])
    now[0] = 3.0
    scheduler.run_plain(PlainRun(session.fence, 1))
    complete(scheduler, next_step(scheduler), [22])
    assert scheduler.draft_wait_s == pytest.approx(0.5)


def test_engine_is_known_to_stand_still_while_sessions_wait_for_blocks() -> None:
    now = [0.0]
    scheduler = make_scheduler(clock=lambda: now[0])

    def idle_from(start: float) -> float:
        now[0] = start
        assert scheduler.next_step() is None
        return scheduler.idle.waited(now[0])

    sessions = [scheduler.open(make_spec(session_id=number), lease_id=0) for number in (1, 2)]
    for session in sessions:
        offer(scheduler, make_block(session.fence, [10]))
        complete(scheduler, next_step(scheduler), [20])
    assert idle_from(1.0) == 0.0
    now[0] = 3.0
    offer(scheduler, make_block(sessions[0].fence, [10]))  # the other one still waits, but there is work
    step = next_step(scheduler)
    now[0] = 4.0
    complete(scheduler, step, [21])
    assert scheduler.idle.waited(now[0]) == pytest.approx(2.0)
    assert idle_from(5.0) == pytest.approx(2.0)
    now[0] = 6.0
    scheduler.close(*sessions[0].key)
    now[0] = 8.0
    scheduler.run_plain(PlainRun(sessions[1].fence, 1))
    assert scheduler.idle.waited(now[0]) == pytest.approx(5.0)
    step = next_step(scheduler)
    now[0] = 9.0
    complete(scheduler, step, [22])
    idle_from(10.0)
    now[0] = 11.0
    scheduler.close(*sessions[1].key)
    now[0] = 99.0
    assert scheduler.next_step() is None
    assert scheduler.idle.waited(now[0]) == pytest.approx(6.0), "nobody has waited since"


def test_time_in_the_queue_is_counted_from_each_rounds_own_start() -> None:
    now = [1.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    scheduler.open(make_spec(plain_rounds=2), lease_id=0)
    now[0] = 2.0
    step, now[0] = next_step(scheduler), 5.0
    first = complete(scheduler, step, [20])  # done at 5.0, when the second round begins to wait
    now[0] = 5.001
    second = complete(scheduler, next_step(scheduler), [21])
    assert first is not None
    assert second is not None
    assert first.queue_us == pytest.approx(1_000_000, abs=1)
    assert second.queue_us == pytest.approx(1000, abs=1)


def timed(result: StepResult, seconds: float) -> StepResult:
    return replace(result, verify_us=int(seconds * 1e6))


def test_duration_of_steps_with_and_without_prompt_tokens_teaches_the_pacer() -> None:
    """A step costs a second and 10 ms for each prompt token that was really read."""
    scheduler = make_scheduler(context_length=1000, budget=400)
    engine = Engine(reused=16)
    scheduler.open(long_spec(1, 17, plain_rounds=9), lease_id=0)
    for _ in range(2):
        step = next_step(scheduler)
        scheduler.complete(step, timed(engine.run(step), 1.0))
    for session_id, (prompt_len, num_steps) in enumerate([(216, 1), (816, 2)], start=2):
        scheduler.open(long_spec(session_id, prompt_len), lease_id=0)
        for _ in range(num_steps):
            step = next_step(scheduler)
            scheduler.complete(step, timed(engine.run(step), 1.0 + 0.01 * (prompt_len - 16) / num_steps))
            assert scheduler.pacer.beside.seconds_per_token == pytest.approx(0.01)


def test_session_that_was_closed_before_it_was_opened_is_refused() -> None:
    """The two messages travel on different connections; nobody would close it again."""
    scheduler = make_scheduler()
    scheduler.close(1, 0)
    with pytest.raises(ProtocolViolationError):
        scheduler.open(make_spec(1), lease_id=0)
    assert scheduler.room.num_free_blocks == make_scheduler().room.num_free_blocks
    scheduler.open(replace(make_spec(1), epoch=1), lease_id=0)


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


@pytest.mark.parametrize("max_len", [len(PROMPT) + 1, 9, CONTEXT_LENGTH])
def test_plain_run_ends_at_max_len(max_len: int) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=50, max_len=max_len), lease_id=0)
    verdicts = run_plain_steps(scheduler, [20] * 50)
    assert len(verdicts) == max_len - len(PROMPT)
    assert verdicts[-1].plain_rounds_left == 0
    assert len(session.committed) == max_len


def test_plain_run_of_no_rounds_does_not_decode_for_ever() -> None:
    """Zero can come over the wire. Refusing it would be as good as doing nothing or one round."""
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    with suppress(DraftwireError):
        scheduler.run_plain(PlainRun(first_fence(), 0))
    verdicts = run_plain_steps(scheduler, [20] * 5)
    assert all(verdict.plain_rounds_left >= 0 for verdict in verdicts)
    assert len(verdicts) <= 1


def test_plain_run_beyond_max_len_is_refused_and_decodes_nothing() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=50, max_len=6), lease_id=0)
    run_plain_steps(scheduler, [20] * 50)
    with pytest.raises(InvalidRequestError):
        scheduler.run_plain(PlainRun(session.fence, 1))
    assert run_plain_steps(scheduler, [21]) == []
    assert len(session.committed) == 6


def test_tokens_that_others_had_read_are_counted_once_and_told_in_every_verdict() -> None:
    scheduler = make_scheduler(context_length=100)
    scheduler.open(long_spec(1, 20, plain_rounds=3), lease_id=0)
    told = run_steps(scheduler, 9, Engine(reused=16))
    assert [verdict.num_cached_tokens for ((_, verdict),) in told] == [16, 16, 16]
    assert scheduler.prefix_tokens == {"queried": 20, "reused": 16}


# Blocks that are refused, sessions that fail


@pytest.mark.parametrize("length", [0, 4])
def test_block_of_a_wrong_length_is_refused_and_the_round_stays_open(length: int) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(max_draft_tokens=3), lease_id=0)
    with pytest.raises(InvalidRequestError):
        offer(scheduler, make_block(first_fence(), [10] * length))
    assert scheduler.next_step() is None
    assert take(scheduler, make_block(first_fence(), [10] * 3)) is FenceVerdict.CURRENT


@pytest.mark.parametrize(("draft_len", "fits"), [(2, True), (3, False)])
@pytest.mark.parametrize("max_len", [8, CONTEXT_LENGTH])
def test_block_must_leave_room_for_its_extra_token_in_max_len(max_len: int, draft_len: int, fits: bool) -> None:
    scheduler = make_scheduler()
    prompt = [5] * (max_len - 3)
    session = scheduler.open(make_spec(token_ids=prompt, max_len=max_len), lease_id=0)
    block = make_block(session.fence, [10] * draft_len)
    if fits:
        assert take(scheduler, block) is FenceVerdict.CURRENT
        complete(scheduler, next_step(scheduler), [10, 10, 20])
        assert len(session.committed) == max_len
    else:
        with pytest.raises(InvalidRequestError):
            offer(scheduler, block)
        assert scheduler.next_step() is None


def test_stale_block_of_a_wrong_length_is_dropped_not_refused() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert take(scheduler, make_block(first_fence(), [10] * 50)) is FenceVerdict.STALE


MakeBad = Callable[[Fence], ReceivedBlock]

VIOLATIONS: dict[str, tuple[Violation, MakeBad]] = {
    "another prefix": (Violation.PREFIX, lambda fence: make_block(replace(fence, prefix_hash=1))),
    "from the future": (Violation.PREFIX, lambda fence: make_block(replace(fence, round=fence.round + 1))),
    "too long": (Violation.LENGTH, lambda fence: make_block(fence, [10] * 4)),
    "beyond max_len": (Violation.LENGTH, lambda fence: make_block(fence, [10] * 3)),
    "empty": (Violation.LENGTH, lambda fence: make_block(fence, [])),
    "no distributions": (Violation.NO_DISTRIBUTIONS, lambda fence: make_block(fence, encoding=Encoding.NONE)),
    "found in decoding": (Violation.TOKEN_ID, lambda fence: make_block(fence, [VOCAB_SIZE])),
    "wrong data": (Violation.ENCODING, lambda fence: make_block(fence, encoding=Encoding.DENSE_FLOAT32)),
    "another drafter": (Violation.PEER, lambda fence: make_block(fence, drafter_id=OTHER, permit=None)),
    "another's permit": (Violation.PEER, lambda fence: make_block(fence, drafter_id=OTHER)),
    "forged permit": (Violation.PEER, lambda fence: make_block(fence, permit=Permit(9, permit(8).token))),
}
every_violation = pytest.mark.parametrize(("violation", "make_bad"), VIOLATIONS.values(), ids=VIOLATIONS.keys())


@every_violation
def test_violation_is_raised_and_touches_no_block_of_another_session(violation: Violation, make_bad: MakeBad) -> None:
    scheduler = make_scheduler()
    good = {session_id: make_block(first_fence(session_id)) for session_id in (1, 3)}
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, max_len=7 if session_id == 2 else CONTEXT_LENGTH), lease_id=0)
    bad = scheduler.sessions[2, 0]
    scheduler.take_permit(make_block(first_fence(2)))
    offer(scheduler, good[1])
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, make_bad(bad.fence))
    offer(scheduler, good[3])
    assert raised.value.violation is violation
    assert (bad.block, bad.queued, bad.fence) == (None, False, first_fence(2))
    step = next_step(scheduler)
    assert ids_of(step) == [1, 3]
    assert [item.block for item in step.items] == [good[1], good[3]]


@every_violation
def test_round_of_a_refused_block_stays_open_for_a_plain_run(violation: Violation, make_bad: MakeBad) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(max_len=7), lease_id=0)
    scheduler.take_permit(make_block(first_fence()))
    with pytest.raises(BlockViolationError):
        offer(scheduler, make_bad(session.fence))
    assert scheduler.run_plain(PlainRun(session.fence, 1)) is FenceVerdict.CURRENT
    (verdict,) = run_plain_steps(scheduler, [20, 21])
    assert verdict.extra is TokenSource.PLAIN


@every_violation
def test_block_of_the_sessions_drafter_is_taken_after_a_violation(violation: Violation, make_bad: MakeBad) -> None:
    """Nobody but the core ends speculation, and never for what another drafter did."""
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(max_len=7), lease_id=0)
    scheduler.take_permit(make_block(first_fence()))
    with pytest.raises(BlockViolationError):
        offer(scheduler, make_bad(session.fence))
    assert (session.drafter_id, session.permit_number) == (DRAFTER, 0)
    better = make_block(session.fence, [11], attempt=1, permit=None)
    offer(scheduler, better)
    assert next_step(scheduler).items[0].block is better


@pytest.mark.parametrize("name", [name for name in VIOLATIONS if name not in ("from the future", "forged permit")])
def test_stale_block_is_dropped_whatever_is_wrong_with_it_but_a_forged_permit(name: str) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    scheduler.take_permit(make_block(first_fence()))
    run_plain_steps(scheduler, [20])
    offer(scheduler, VIOLATIONS[name][1](first_fence()))
    assert scheduler.dropped == {"stale": 1}
    assert session.block is None
    assert scheduler.next_step() is None


@pytest.mark.parametrize("name", [name for name in VIOLATIONS if name != "forged permit"])
def test_blocks_after_the_end_of_speculation_are_dropped(name: str) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.take_permit(make_block(session.fence))
    scheduler.end_speculation(session)
    offer(scheduler, make_block(session.fence))
    offer(scheduler, make_block(session.fence, permit=None))
    offer(scheduler, VIOLATIONS[name][1](session.fence))
    assert scheduler.dropped == {"no_speculation": 3}
    assert scheduler.next_step() is None


# Permits


def test_first_block_makes_its_sender_the_sessions_drafter_and_later_ones_need_no_permit() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    assert scheduler.take_permit(make_block(session.fence)) is session
    for number in range(3):
        block = make_block(session.fence, permit=None if number else permit())
        assert take(scheduler, block) is FenceVerdict.CURRENT
        complete(scheduler, next_step(scheduler), [20])
    assert not scheduler.dropped


def test_block_without_a_permit_is_a_strangers_where_nobody_has_shown_one() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, make_block(session.fence, permit=None))
    assert raised.value.violation is Violation.PEER
    assert take(scheduler, make_block(session.fence)) is FenceVerdict.CURRENT


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize(
    "forged",
    [
        permit(key=bytes(16)),
        Permit(1, permit(0).token),
        Permit(0, permit().token[:-1]),
        Permit(0, permit().token + b"0"),
        Permit(0, b""),
    ],
)
@pytest.mark.parametrize("drafter_id", [DRAFTER, OTHER])
def test_forged_permit_is_a_violation_even_with_a_stale_block_and_changes_nothing(
    forged: Permit, is_stale: bool, drafter_id: int
) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=int(is_stale)), lease_id=0)
    run_plain_steps(scheduler, [20])
    scheduler.take_permit(make_block(session.fence))
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, make_block(first_fence(), permit=forged, drafter_id=drafter_id))
    assert raised.value.violation is Violation.PEER
    assert (session.drafter_id, session.permit_number) == (DRAFTER, 0)
    assert take(scheduler, make_block(session.fence, permit=None)) is FenceVerdict.CURRENT


@pytest.mark.parametrize("shown", [permit(key=b""), permit(), Permit(0, b"")])
def test_session_without_a_key_takes_nobodys_blocks(shown: Permit) -> None:
    """Not even of a drafter that makes its permit from the empty key."""
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(permit_key=b""), lease_id=0)
    with pytest.raises(BlockViolationError):
        offer(scheduler, make_block(session.fence, permit=shown))
    offer(scheduler, make_block(session.fence, permit=None))
    assert scheduler.dropped == {"no_speculation": 1}
    assert scheduler.next_step() is None


def test_permit_counts_although_its_block_is_stale() -> None:
    """The verifier may have gone on alone while the first block was drafted; the second shows no permit."""
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    run_plain_steps(scheduler, [20])
    assert take(scheduler, make_block(first_fence())) is FenceVerdict.STALE
    assert take(scheduler, make_block(session.fence, permit=None)) is FenceVerdict.CURRENT


def test_permit_of_a_past_epoch_or_another_session_opens_nothing() -> None:
    scheduler = make_scheduler()
    one, other = (scheduler.open(make_spec(number, permit_key=bytes([number] * 16)), lease_id=0) for number in (1, 2))
    with pytest.raises(BlockViolationError):
        offer(scheduler, make_block(one.fence, permit=permit(key=bytes([2] * 16))))
    offer(scheduler, make_block(replace(other.fence, epoch=1), permit=permit(key=bytes([2] * 16))))
    assert scheduler.dropped == {"unknown_session": 1}
    assert (one.drafter_id, other.drafter_id) == (None, None)


def test_higher_number_takes_the_session_over_and_the_earlier_drafter_is_a_stranger() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.take_permit(make_block(session.fence))
    late = make_block(session.fence, permit=None)
    assert scheduler.take_permit(make_block(session.fence, drafter_id=OTHER, permit=permit(3))) is session
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, late)
    assert raised.value.violation is Violation.PEER
    assert take(scheduler, make_block(session.fence, drafter_id=OTHER, permit=None)) is FenceVerdict.CURRENT


@pytest.mark.parametrize("drafter_id", [DRAFTER, OTHER])
@pytest.mark.parametrize("has_ended", [False, True])
def test_lower_number_is_stale_whoever_shows_it(drafter_id: int, has_ended: bool) -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.take_permit(make_block(session.fence, drafter_id=DRAFTER, permit=permit(1)))
    if has_ended:
        scheduler.end_speculation(session)
    assert take(scheduler, make_block(session.fence, drafter_id=drafter_id)) is FenceVerdict.STALE
    assert scheduler.dropped == {"stale": 1}
    assert (session.drafter_id, session.permit_number) == (None if has_ended else DRAFTER, 1)


def test_speculation_that_was_ended_goes_on_with_a_higher_number_alone() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    scheduler.take_permit(make_block(session.fence))
    scheduler.end_speculation(session)
    for drafter_id in (DRAFTER, OTHER):
        assert scheduler.take_permit(make_block(session.fence, drafter_id=drafter_id)) is None
        assert take(scheduler, make_block(session.fence, drafter_id=drafter_id)) is FenceVerdict.STALE
    assert scheduler.dropped == {"no_speculation": 2}
    replacement = make_block(session.fence, drafter_id=OTHER, permit=permit(1))
    assert take(scheduler, replacement) is FenceVerdict.CURRENT
    assert next_step(scheduler).items[0].block is replacement


def test_same_permit_again_is_no_new_drafter() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    assert scheduler.take_permit(make_block(session.fence)) is session
    assert scheduler.take_permit(make_block(session.fence)) is None
    assert take(scheduler, make_block(session.fence)) is FenceVerdict.CURRENT


def test_rule_that_needs_no_distributions_takes_blocks_without_them() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(rule="typical"), lease_id=0)
    assert take(scheduler, make_block(first_fence(), encoding=Encoding.NONE)) is FenceVerdict.CURRENT


@pytest.mark.parametrize("error", [InvalidRequestError("no good"), UnavailableError("no finite logits")])
def test_error_of_one_session_leaves_the_others_in_the_step_alone(error: DraftwireError) -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id), lease_id=0)
        offer(scheduler, make_block(first_fence(session_id), [10, 11]))
    step = next_step(scheduler)

    def decide(item: StepItem) -> list[int] | DraftwireError:
        return error if item.session.spec.session_id == 2 else accept_all(item)

    told = scheduler.complete(step, Engine().run(step, decide))
    results = {session.spec.session_id: result for session, result in told}
    assert results[2] is error
    for session_id in (1, 3):
        verdict = results[session_id]
        assert isinstance(verdict, Verdict)
        assert (verdict.fence, verdict.token_ids) == (first_fence(session_id), [10, 11, 20])
    assert scheduler.sessions[2, 0].committed.ids == PROMPT
    scheduler.close(2, 0)
    for session_id in (1, 3):
        assert take(scheduler, make_block(scheduler.sessions[session_id, 0].fence)) is FenceVerdict.CURRENT
    assert ids_of(next_step(scheduler)) == [1, 3]


# Steps of several sessions


def test_whatever_is_ready_goes_into_one_step() -> None:
    scheduler = make_scheduler(max_sessions=6)
    for session_id, plain_rounds in ((1, 0), (2, 3), (3, 0), (4, 1), (5, 0)):
        scheduler.open(make_spec(session_id, plain_rounds=plain_rounds), lease_id=0)
    block = make_block(first_fence(3))
    offer(scheduler, block)
    scheduler.run_plain(PlainRun(first_fence(5), 2))
    step = next_step(scheduler)
    assert sorted(ids_of(step)) == [2, 3, 4, 5]
    assert [item.block for item in step.items if item.block is not None] == [block]
    assert scheduler.next_step() is None


def test_plain_runs_advance_together_and_leave_when_they_end() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, plain_rounds=session_id), lease_id=0)
    served = [sorted(session.spec.session_id for session, _ in told) for told in run_steps(scheduler, 9)]
    assert served == [[1, 2, 3], [2, 3], [3]]


def test_work_that_comes_during_a_step_goes_into_the_next_one() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(1, plain_rounds=6), lease_id=0)
    scheduler.open(make_spec(2), lease_id=0)
    step = next_step(scheduler)
    assert ids_of(step) == [1]
    offer(scheduler, make_block(first_fence(session_id=2)))
    scheduler.open(make_spec(3, plain_rounds=1), lease_id=0)
    scheduler.complete(step, Engine().run(step))
    assert sorted(ids_of(next_step(scheduler))) == [1, 2, 3]


def test_sessions_do_not_see_each_others_tokens() -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.open(make_spec(session_id, plain_rounds=2), lease_id=0) for session_id in (1, 2))
    engine = Engine()
    for tokens in ({1: [20], 2: [30]}, {1: [21], 2: [31]}):
        step = next_step(scheduler)
        told = scheduler.complete(step, engine.run(step, lambda item: tokens[item.session.spec.session_id]))  # noqa: B023
        for session, verdict in told:
            assert isinstance(verdict, Verdict)
            assert verdict.token_ids == tokens[session.spec.session_id]
    assert (first.committed.ids, second.committed.ids) == ([*PROMPT, 20, 21], [*PROMPT, 30, 31])


# Prompts


def test_pacer_knows_whether_a_session_is_past_its_prompt() -> None:
    """A session counts even while it waits for its drafter: its block may come at any time."""
    scheduler = make_scheduler(context_length=100, budget=10)
    scheduler.open(long_spec(1, 15), lease_id=0)
    run_steps(scheduler, 2)
    scheduler.open(long_spec(2, 5), lease_id=0)
    run_steps(scheduler, 1)
    scheduler.close(1, 0)
    scheduler.close(2, 0)
    scheduler.open(long_spec(3, 5), lease_id=0)
    run_steps(scheduler, 1)
    assert scheduler.pacer.asked == [False, False, True, False]  # type: ignore[attr-defined]


def test_reading_prompts_divide_the_budget_while_running_sessions_always_get_in() -> None:
    scheduler = make_scheduler(max_sessions=9, context_length=1000, budget=30)
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, plain_rounds=5), lease_id=0)
    run_steps(scheduler, 1)
    for session_id, length in ((4, 100), (5, 50), (6, 100)):
        scheduler.open(long_spec(session_id, length), lease_id=0)
    step = next_step(scheduler)
    assert sorted(ids_of(step)) == [1, 2, 3, 4, 5]
    shares = {item.session.spec.session_id: item.max_read for item in step.items}
    assert [shares[session_id] for session_id in (4, 5)] == [15, 15]


@pytest.mark.parametrize("prompt_len", [1, 9, 10, 11, 20, 25])
def test_prompt_is_read_in_parts_and_decided_with_the_last(prompt_len: int) -> None:
    scheduler = make_scheduler(context_length=100, budget=10)
    session = scheduler.open(long_spec(1, prompt_len), lease_id=0)
    told = run_steps(scheduler, 99)
    num_steps = max(1, -(-prompt_len // 10))
    assert [len(each) for each in told] == [0] * (num_steps - 1) + [1]
    assert len(session.committed) == prompt_len + 1


def test_block_that_comes_before_the_prompt_is_read_is_kept_until_then() -> None:
    scheduler = make_scheduler(context_length=100, budget=10)
    session = scheduler.open(long_spec(1, 25, plain_rounds=0), lease_id=0)
    block = make_block(session.fence, [10])
    offer(scheduler, block)
    *parts, ((_, verdict),) = run_steps(scheduler, 99)
    assert parts == [[], []]
    assert isinstance(verdict, Verdict)
    assert verdict.token_ids == [10, 20]


def test_long_prompt_does_not_block_a_short_one() -> None:
    scheduler = make_scheduler(context_length=1000, budget=20)
    scheduler.open(long_spec(1, 500), lease_id=0)
    run_steps(scheduler, 1)
    scheduler.open(long_spec(2, 10), lease_id=0)
    (((session, _),),) = run_steps(scheduler, 1)
    assert session.spec.session_id == 2


def test_running_session_gets_a_round_in_every_step_while_long_prompts_are_read() -> None:
    scheduler = make_scheduler(context_length=1000, budget=4)
    engine = Engine()
    scheduler.open(make_spec(1, plain_rounds=6), lease_id=0)
    run_steps(scheduler, 1, engine)
    scheduler.open(long_spec(2, 500), lease_id=0)
    scheduler.open(long_spec(3, 500), lease_id=0)
    told = run_steps(scheduler, 8, engine)
    served = [[session.spec.session_id for session, _ in each] for each in told]
    assert served == [[1]] * 5 + [[]] * 3


def test_session_whose_share_is_nothing_stays_queued_and_gets_on_later() -> None:
    scheduler = make_scheduler(max_sessions=9, context_length=100, budget=2)
    sessions = [scheduler.open(long_spec(session_id, 6), lease_id=0) for session_id in range(1, 6)]
    step = next_step(scheduler)
    assert len(step.items) == 1
    assert all(session.queued for session in sessions)
    scheduler.complete(step, Engine().run(step))
    run_steps(scheduler, 99)
    assert [len(session.committed) for session in sessions] == [7] * 5
    assert not any(session.queued for session in sessions)


def test_short_prompt_gets_on_even_where_more_prompts_wait_than_tokens_may_be_read() -> None:
    """21 prompts and 16 tokens a step, of which 8 are for the shortest: three steps for its 20 tokens."""
    scheduler = make_scheduler(max_sessions=64, context_length=1000, budget=16)
    engine = Engine()
    for session_id in range(1, 21):
        scheduler.open(long_spec(session_id, 500), lease_id=0)
    scheduler.open(long_spec(99, 20), lease_id=0)
    told = run_steps(scheduler, 3, engine)
    assert [session.spec.session_id for each in told for session, _ in each] == [99]


def test_long_prompt_gets_on_although_shorter_ones_keep_coming() -> None:
    """As many short prompts come as leave, always more than tokens may be read."""
    scheduler = make_scheduler(max_sessions=64, context_length=1000, budget=4)
    engine = Engine()
    long = scheduler.open(long_spec(1, 40), lease_id=0)
    for session_id in range(2, 8):
        scheduler.open(long_spec(session_id, 3), lease_id=0)
    newcomers = itertools.count(100)
    for _ in range(300):
        for session, _ in itertools.chain(*run_steps(scheduler, 1, engine)):
            scheduler.close(*session.key)
            if session is long:
                return
            scheduler.open(long_spec(next(newcomers), 3), lease_id=0)
    pytest.fail("the long prompt starves")


# Closing


def test_closing_takes_back_waiting_work_of_that_session_only() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2, 3):
        scheduler.open(make_spec(session_id, plain_rounds=1), lease_id=0)
    closed = scheduler.close(2, 0)
    assert closed is not None
    assert closed.key == (2, 0)
    assert ids_of(next_step(scheduler)) == [1, 3]


def test_closing_an_unknown_session_does_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    usage = scheduler.room.usage
    assert scheduler.close(1, 5) is None
    assert scheduler.close(2, 0) is None
    assert len(scheduler.sessions) == 1
    assert scheduler.room.usage == usage


def test_closing_during_a_step_drops_the_outcome_and_frees_the_room_once() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id, plain_rounds=3), lease_id=0)
    step = next_step(scheduler)
    assert scheduler.close(1, 0) is not None
    assert scheduler.close(1, 0) is None
    told = scheduler.complete(step, Engine().run(step))
    assert [session.spec.session_id for session, _ in told] == [2]
    assert ids_of(next_step(scheduler)) == [2]
    scheduler.close(2, 0)
    assert scheduler.room.usage == 0.0


@pytest.mark.parametrize("reading", [False, True])
def test_outcome_is_dropped_when_the_session_was_opened_anew_meanwhile(reading: bool) -> None:
    scheduler = make_scheduler(budget=3 if reading else 1000)
    scheduler.open(make_spec(plain_rounds=3), lease_id=0)
    step = next_step(scheduler)
    scheduler.close(1, 0)
    reopened = scheduler.open(make_spec(plain_rounds=1), lease_id=0)
    assert scheduler.complete(step, Engine().run(step)) == []
    assert reopened.fence == first_fence()
    assert reopened.num_unread == len(PROMPT)
    assert reopened.num_reused is None
    scheduler.pacer.tokens = 1000  # type: ignore[attr-defined]
    assert len(run_plain_steps(scheduler, [21, 22])) == 1
    assert reopened.committed.ids == [*PROMPT, 21]


# All of it in any order


class AnyOrder(RuleBasedStateMachine):
    """Sessions of few names that open, get messages, take part in steps and close in any order."""

    KEYS = st.tuples(st.integers(1, 5), st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(max_sessions=4, context_length=64, kv_cache_tokens=160, budget=3)
        self.scheduler.closed_early = ClosedEarly(bound=0)  # so that every session can be opened sooner or later
        self.engine = Engine()
        self.step: Step | None = None
        self.expected: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """Round and committed tokens of each open session."""
        self.parts: dict[tuple[int, int], tuple[int, int | None]] = {}
        """The highest permit that each open session has seen, and its drafter unless its part has ended."""

    @rule(
        key=KEYS,
        prompt_len=st.integers(1, 20),
        room=st.integers(1, 40),
        plain_rounds=st.integers(0, 3),
    )
    def open(self, key: tuple[int, int], prompt_len: int, room: int, plain_rounds: int) -> None:
        spec = replace(
            long_spec(key[0], prompt_len, max_len=prompt_len + room, plain_rounds=plain_rounds), epoch=key[1]
        )
        fits = len(self.expected) < 4 and blocks_for(spec.max_len) <= self.scheduler.room.num_free_blocks
        if key in self.expected:
            with pytest.raises(InvalidRequestError):
                self.scheduler.open(spec, lease_id=0)
        elif not fits:
            with pytest.raises(NoRoomError):
                self.scheduler.open(spec, lease_id=0)
        else:
            self.scheduler.open(spec, lease_id=0)
            self.expected[key] = (0, list(spec.token_ids))
            self.parts[key] = (-1, None)

    @rule(
        key=KEYS,
        is_block=st.booleans(),
        amount=st.integers(0, 4),
        rounds_off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        right_prefix=st.sampled_from([True, True, True, True, False]),
        sender=st.sampled_from([(DRAFTER, None), (DRAFTER, 0), (DRAFTER, 0), (OTHER, None), (OTHER, 1), (DRAFTER, 2)]),
    )
    def message(
        self,
        key: tuple[int, int],
        is_block: bool,
        amount: int,
        rounds_off: int,
        right_prefix: bool,
        sender: tuple[int, int | None],
    ) -> None:
        number, committed = self.expected.get(key, (0, [1]))
        prefix_hash = CommittedTokens(committed).hash if right_prefix else 0
        fence = Fence(*key, max(0, number + rounds_off), len(committed), prefix_hash)
        session = self.scheduler.sessions.get(key)
        is_current = fence.round == number and right_prefix
        wanted = FenceVerdict.CURRENT if is_current else FenceVerdict.VIOLATION
        if session is None or fence.round < number or (is_current and session.queued):
            wanted = FenceVerdict.STALE
        if session is not None and is_block:
            shown = -1 if sender[1] is None else sender[1]
            if shown > self.parts[key][0]:
                self.parts[key] = (shown, sender[0])
            highest, drafter = self.parts[key]
            if (sender[1] is not None and shown < highest) or (highest >= 0 and drafter is None):
                wanted = FenceVerdict.STALE
            elif sender[0] != drafter and wanted is not FenceVerdict.STALE:
                with pytest.raises(BlockViolationError) as raised:
                    self._send(fence, is_block, amount, sender)
                assert raised.value.violation is Violation.PEER
                return
        if wanted is FenceVerdict.CURRENT:
            assert session is not None
            room = session.spec.max_len - len(committed)
            good = 1 <= amount <= 3 and amount < room if is_block else amount >= 1 and room >= 1
            if not good:
                with pytest.raises(InvalidRequestError):
                    self._send(fence, is_block, amount, sender)
                assert not session.queued
                return
        assert self._send(fence, is_block, amount, sender) is wanted
        assert wanted is not FenceVerdict.CURRENT or (session is not None and session.queued)

    def _send(self, fence: Fence, is_block: bool, amount: int, sender: tuple[int, int | None]) -> FenceVerdict:
        if is_block:
            drafter_id, number = sender
            shown = None if number is None else permit(number)
            return take(self.scheduler, make_block(fence, [10] * amount, drafter_id=drafter_id, permit=shown))
        return self.scheduler.run_plain(PlainRun(fence, amount))

    @rule(key=KEYS)
    def end_speculation(self, key: tuple[int, int]) -> None:
        if self.parts.get(key, (-1, None))[1] is not None:  # nobody else can do anything to be sent away for
            self.scheduler.end_speculation(self.scheduler.sessions[key])
            self.parts[key] = (self.parts[key][0], None)

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_step(self) -> None:
        has_work = any(session.queued for session in self.scheduler.sessions.values())
        running = [session for session in self.scheduler.sessions.values() if session.queued and not session.is_reading]
        self.step = self.scheduler.next_step()
        assert (self.step is not None) == has_work
        if self.step is not None:
            members = [item.session for item in self.step.items]
            assert len({session.key for session in members}) == len(members)
            assert all(any(session is member for member in members) for session in running)
            assert sum(item.max_read for item in self.step.items if item.session.is_reading) <= 3

    @precondition(lambda self: self.step is not None)
    @rule(choices=st.lists(st.integers(0, 5), min_size=5, max_size=5))
    def finish_step(self, choices: list[int]) -> None:
        assert self.step is not None
        chosen = {item.session.key: choice for item, choice in zip(self.step.items, choices, strict=False)}

        def decide(item: StepItem) -> list[int] | DraftwireError:
            choice = chosen[item.session.key]
            if choice == 5:
                return UnavailableError("no finite logits")
            return [*(item.block.token_ids[:choice] if item.block else []), STOP_TOKEN if choice == 3 else 20]

        told = self.scheduler.complete(self.step, self.engine.run(self.step, decide))
        members = [item.session for item in self.step.items]
        self.step = None
        for session, result in told:
            assert self.scheduler.sessions[session.key] is session
            assert any(session is member for member in members)
            if isinstance(result, Verdict):
                number, committed = self.expected[session.key]
                assert (result.fence.round, result.fence.prefix_len) == (number, len(committed))
                assert result.fence.prefix_hash == CommittedTokens(committed).hash
                self.expected[session.key] = (number + 1, committed + result.token_ids)
            else:
                self.close(session.key)  # as the core does

    @rule(key=KEYS)
    def close(self, key: tuple[int, int]) -> None:
        closed = self.scheduler.close(*key)
        assert (closed is not None) == (self.expected.pop(key, None) is not None)
        self.parts.pop(key, None)

    @invariant()
    def accounts_add_up(self) -> None:
        scheduler = self.scheduler
        assert set(scheduler.sessions) == set(self.expected)
        ready = scheduler._ready
        assert len({id(session) for session in ready}) == len(ready)
        assert all(scheduler.sessions.get(session.key) is session for session in ready)
        in_step = [item.session for item in self.step.items] if self.step else []
        for key, session in scheduler.sessions.items():
            assert session.queued == any(session is other for other in [*ready, *in_step])
            assert session.queued == (session.block is not None or session.plain_rounds_left > 0)
            assert (session.round, session.committed.ids) == self.expected[key]
            assert (session.permit_number, session.drafter_id) == self.parts[key]
            assert len(session.committed) <= session.spec.max_len
        reserved = sum(blocks_for(session.spec.max_len) for session in scheduler.sessions.values())
        assert scheduler.room.num_free_blocks == blocks_for(160) - reserved

    def teardown(self) -> None:
        """Whoever has work is served, sooner or later."""
        if self.step is not None:
            self.finish_step([0] * 5)
        for _ in range(300):  # sessions hold at most 4 * 60 tokens
            self.begin_step()
            if self.step is None:
                break
            self.finish_step([0] * 5)
        assert self.step is None
        assert not any(session.queued for session in self.scheduler.sessions.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
