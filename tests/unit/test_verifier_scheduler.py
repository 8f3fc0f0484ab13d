"""The verifier's scheduler: who gets in, which messages count, what goes into a step, and what a step leaves behind."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from scheduler_contract import (
    CONTEXT_LENGTH,
    PROMPT,
    AnyOrder,
    FixedPacer,
    SchedulerContract,
    Side,
    ids_of,
    next_step,
)

from draftwire.encoding import Claim, DraftDistributions, decode
from draftwire.errors import (
    BlockViolationError,
    DraftwireError,
    InvalidRequestError,
    UnavailableError,
    Violation,
)
from draftwire.keys import KEY_BYTES
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
from draftwire.services.admission import Room
from draftwire.services.verifier.scheduler import Scheduler, Step, StepItem, StepResult, TargetSession
from draftwire.token_source import TokenSource
from draftwire.verification.target import Judgement, Outcome, StillReading

VOCAB_SIZE = 100
STOP_TOKEN = 99
DRAFTER = 7
OTHER = 8
PERMIT_KEY = bytes(range(16))


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
        if (step := scheduler.next_step()) is None:
            break
        verdict = complete(scheduler, step, [token])
        assert verdict is not None
        verdicts.append(verdict)
    return verdicts


def opened(scheduler: Scheduler | None = None, **changes: Any) -> tuple[Scheduler, TargetSession]:
    scheduler = scheduler or make_scheduler()
    return scheduler, scheduler.open(make_spec(**changes), lease_id=0)


def drafted_for(**changes: Any) -> tuple[Scheduler, TargetSession]:
    """Opens a session whose drafter has shown its permit."""
    scheduler, session = opened(**changes)
    scheduler.take_permit(make_block(first_fence()))
    return scheduler, session


def send_block(scheduler: Scheduler, fence: Fence) -> FenceVerdict:
    return take(scheduler, make_block(fence))


def send_plain_run(scheduler: Scheduler, fence: Fence) -> FenceVerdict:
    return scheduler.run_plain(PlainRun(fence, 2))


MESSAGES = (send_block, send_plain_run)


VERIFIER = Side(
    make_scheduler=make_scheduler,
    make_spec=lambda session_id=1, **changes: make_spec(session_id, **{"plain_rounds": 1, **changes}),
    engine=Engine,
    ask=lambda scheduler, session: scheduler.run_plain(PlainRun(session.fence, 1)),
    messages=MESSAGES,
    done=lambda told: [session.spec.session_id for session, _ in told],
    timed=lambda result, seconds: replace(result, verify_us=int(seconds * 1e6)),
    out_of_range=[
        {"token_ids": [1, 2, 3, VOCAB_SIZE]},
        {"token_ids": [*PROMPT, 30, 31], "max_len": len(PROMPT) + 2},  # moved, with no room beyond what was generated
        {"token_ids": [*PROMPT, 30, 31], "max_len": len(PROMPT)},
        {"first_round": 2**31 + 1},
        {"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))},
        {"sampling": SamplingParams(allowed_token_ids=(1, VOCAB_SIZE))},
        {"sampling": SamplingParams(min_tokens=1), "stop_token_ids": frozenset(range(VOCAB_SIZE))},
    ],
    at_the_edge=[{"token_ids": [1, 2, 3, VOCAB_SIZE - 1]}, {"max_draft_tokens": 0}, {"first_round": 2**31}],
)


class TestVerifierScheduler(SchedulerContract):
    side = VERIFIER


# Rounds


def test_session_that_was_moved_counts_rounds_on_and_ends_at_the_max_len_of_the_whole_text() -> None:
    moved = [*PROMPT, 30, 31, 32]
    scheduler, session = opened(epoch=2, first_round=5, token_ids=moved, max_len=10, plain_rounds=9)
    verdicts = run_plain_steps(scheduler, [20, 21, 22, 23])
    committed = [*moved, 20, 21]
    fences = [Fence(1, 2, 5 + n, 7 + n, CommittedTokens(committed[: 7 + n]).hash) for n in range(3)]
    assert [verdict.fence for verdict in verdicts] == fences
    assert session.committed.ids == [*committed, 22]
    assert verdicts[-1].plain_rounds_left == 0


def test_messages_for_the_current_round_become_steps_and_each_fence_follows_from_what_was_committed() -> None:
    scheduler, session = opened()
    assert scheduler.next_step() is None, "a session without plain rounds waits for work"
    after = Fence(1, 0, 1, 6, CommittedTokens([*PROMPT, 10, 20]).hash)
    for fence, decided in ((first_fence(), [10, 20]), (after, [30, 31])):
        block = make_block(fence, [decided[0], 11])
        assert take(scheduler, block) is FenceVerdict.CURRENT
        step = next_step(scheduler)
        assert [(item.session, item.block) for item in step.items] == [(session, block)]
        assert scheduler.next_step() is None
        verdict = complete(scheduler, step, decided)
        assert verdict is not None
        assert verdict.fence == fence
    assert scheduler.run_plain(PlainRun(session.fence, 2)) is FenceVerdict.CURRENT
    assert [verdict.num_draft_tokens for verdict in run_plain_steps(scheduler, [20] * 4)] == [0, 0]
    assert session.committed.ids == [*PROMPT, 10, 20, 30, 31, 20, 20]
    assert not scheduler.dropped


def test_message_for_a_past_round_is_dropped_and_one_from_the_future_or_about_another_prefix_is_a_violation() -> None:
    past: list[dict[str, int]] = [{}, {"prefix_hash": 1}, {"prefix_len": 999}]
    wrong: list[dict[str, int]] = [{"round": 1}, {"prefix_hash": 1}, {"prefix_len": len(PROMPT) - 1}]
    for send, is_past in itertools.product(MESSAGES, (True, False)):
        for changes in past if is_past else wrong:
            scheduler, session = opened(plain_rounds=int(is_past))
            run_plain_steps(scheduler, [20])
            before = session.fence
            verdict = FenceVerdict.STALE if is_past else FenceVerdict.VIOLATION
            assert send(scheduler, replace(first_fence(), **changes)) is verdict, changes
            assert scheduler.dropped == {verdict.value: 1}
            assert scheduler.next_step() is None
            assert session.fence == before


def test_message_is_dropped_while_its_round_is_decided() -> None:
    """By a block, by a plain round, and while the prompt before them is read in parts, waiting or in a step."""
    for send, has_block, in_step, budget in itertools.product(MESSAGES, (True, False), (True, False), (1000, 3)):
        scheduler, _ = opened(make_scheduler(budget=budget), plain_rounds=0 if has_block else 2)
        if has_block:
            offer(scheduler, make_block(first_fence(), [10]))
        step = next_step(scheduler) if in_step else None
        assert send(scheduler, first_fence()) is FenceVerdict.STALE
        assert scheduler.dropped == {"stale": 1}
        verdict = None
        while verdict is None:
            verdict = complete(scheduler, step or next_step(scheduler), [10, 20] if has_block else [20])
            step = None
        assert (verdict.num_draft_tokens, verdict.plain_rounds_left) == ((1, 0) if has_block else (0, 1))
        if not has_block:
            assert send(scheduler, scheduler.sessions[1, 0].fence) is FenceVerdict.STALE, "a plain run goes on"
            assert [one.num_draft_tokens for one in run_plain_steps(scheduler, [21, 22])] == [0]
        assert scheduler.next_step() is None


# What a step leaves behind


def test_verdict_says_what_was_decided() -> None:
    timings = DraftTimings(calibration_us=3, draft_us=4)
    for draft, decided, extra in (
        ([10, 11, 12], [20], TokenSource.RECOVERED),
        ([10, 11, 12], [10, 11, 20], TokenSource.RECOVERED),
        ([10, 11, 12], [10, 11, 12, 20], TokenSource.BONUS),
        ([10], [10, 20], TokenSource.BONUS),
        ([], [20], TokenSource.PLAIN),
    ):
        now = [10.0]
        scheduler, _ = opened(make_scheduler(clock=lambda now=now: now[0]), plain_rounds=0 if draft else 3)
        if draft:
            offer(scheduler, make_block(first_fence(), draft, timings=timings))
        now[0] = 10.5
        assert complete(scheduler, next_step(scheduler), decided) == Verdict(
            fence=first_fence(),
            token_ids=decided,
            num_draft_tokens=len(draft),
            num_accepted_tokens=len(decided) - 1,
            extra=extra,
            plain_rounds_left=0 if draft else 2,
            verify_us=7,
            queue_us=500_000,
            timings=timings if draft else DraftTimings(),
        )


def test_waiting_for_drafts_is_counted_from_verdict_to_block_and_not_where_nobody_drafts() -> None:
    now = [1.0]
    scheduler, session = opened(make_scheduler(clock=lambda: now[0]))
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
    assert idle_from(99.0) == pytest.approx(6.0), "nobody has waited since"


def test_time_in_the_queue_is_counted_from_each_rounds_own_start() -> None:
    now = [1.0]
    scheduler, _ = opened(make_scheduler(clock=lambda: now[0]), plain_rounds=2)
    now[0] = 2.0
    step, now[0] = next_step(scheduler), 5.0
    first = complete(scheduler, step, [20])  # done at 5.0, when the second round begins to wait
    now[0] = 5.001
    second = complete(scheduler, next_step(scheduler), [21])
    assert first is not None
    assert second is not None
    assert (first.queue_us, second.queue_us) == (pytest.approx(1_000_000, abs=1), pytest.approx(1000, abs=1))


def test_plain_run_counts_down_and_ends_at_a_stop_token_and_at_max_len() -> None:
    for max_len, plain_rounds, tokens, left in (
        (CONTEXT_LENGTH, 3, [20] * 9, [2, 1, 0]),
        (CONTEXT_LENGTH, 6, [20, STOP_TOKEN, 21, 22], [5, 0]),
        (len(PROMPT) + 1, 50, [20] * 9, [0]),
        (9, 50, [20] * 9, [49, 48, 47, 46, 0]),
        (CONTEXT_LENGTH, 50, [20] * 9, [*range(49, 42, -1), 0]),
    ):
        scheduler, session = opened(plain_rounds=plain_rounds, max_len=max_len)
        verdicts = run_plain_steps(scheduler, tokens)
        assert [verdict.plain_rounds_left for verdict in verdicts] == left
        lengths = [(verdict.fence.round, verdict.fence.prefix_len) for verdict in verdicts]
        assert lengths == [(number, len(PROMPT) + number) for number in range(len(left))]
        assert session.committed.ids == PROMPT + tokens[: len(left)]
        if len(session.committed) == max_len:
            with pytest.raises(InvalidRequestError):
                scheduler.run_plain(PlainRun(session.fence, 1))
            assert scheduler.next_step() is None


def test_plain_run_of_no_rounds_is_refused() -> None:
    """Zero can come over the wire; counted down, it would never end."""
    scheduler, _ = opened()
    with pytest.raises(InvalidRequestError):
        scheduler.run_plain(PlainRun(first_fence(), 0))
    assert scheduler.next_step() is None


def test_tokens_that_others_had_read_are_told_in_every_verdict() -> None:
    scheduler = make_scheduler(context_length=100)
    scheduler.open(long_spec(1, 20, plain_rounds=3), lease_id=0)
    engine, told = Engine(reused=16), []
    while (step := scheduler.next_step()) is not None:
        told += scheduler.complete(step, engine.run(step))
    assert [verdict.num_cached_tokens for _, verdict in told if isinstance(verdict, Verdict)] == [16, 16, 16]


def test_block_that_comes_before_the_prompt_is_read_is_kept_until_then() -> None:
    scheduler = make_scheduler(context_length=100, budget=10)
    session = scheduler.open(long_spec(1, 25, plain_rounds=0), lease_id=0)
    offer(scheduler, make_block(session.fence, [10]))
    engine = Engine()
    *parts, told = [scheduler.complete(step, engine.run(step)) for step in iter(scheduler.next_step, None)]
    assert parts == [[], []]
    ((_, verdict),) = told
    assert isinstance(verdict, Verdict)
    assert verdict.token_ids == [10, 20]


def test_whatever_is_ready_goes_into_one_step_and_leaves_when_it_ends() -> None:
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
    engine = Engine()
    scheduler.complete(step, engine.run(step))
    assert [sorted(served) for served in VERIFIER.run_steps(scheduler, engine=engine)] == [[2, 5], [2]]


# Blocks that are refused


def test_block_is_as_long_as_its_session_and_the_extra_token_leave_room_for() -> None:
    for prompt_len, max_len, draft_len, fits in (
        (4, CONTEXT_LENGTH, 0, False),
        (4, CONTEXT_LENGTH, 3, True),  # the session's limit
        (4, CONTEXT_LENGTH, 4, False),
        *((max_len - 3, max_len, draft_len, draft_len == 2) for max_len in (8, CONTEXT_LENGTH) for draft_len in (2, 3)),
    ):
        scheduler, session = opened(token_ids=[5] * prompt_len, max_len=max_len, prompt_len=1)
        if fits:
            assert take(scheduler, make_block(session.fence, [10] * draft_len)) is FenceVerdict.CURRENT
            complete(scheduler, next_step(scheduler), [10] * draft_len + [20])
            assert len(session.committed) == prompt_len + draft_len + 1
        else:
            with pytest.raises(InvalidRequestError):
                offer(scheduler, make_block(session.fence, [10] * draft_len))
        assert scheduler.next_step() is None


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
def test_violation_is_raised_leaves_its_round_open_and_touches_no_other_block(
    violation: Violation, make_bad: MakeBad
) -> None:
    """Nobody but the core ends speculation, and never for what another drafter did."""
    scheduler = make_scheduler()
    good = {session_id: make_block(first_fence(session_id)) for session_id in (1, 3)}
    for session_id in (1, 2, 3, 4):
        scheduler.open(make_spec(session_id, max_len=7 if session_id in (2, 4) else CONTEXT_LENGTH), lease_id=0)
    for session_id in (2, 4):
        bad = scheduler.sessions[session_id, 0]
        scheduler.take_permit(make_block(bad.fence))
        if session_id == 2:
            offer(scheduler, good[1])
        with pytest.raises(BlockViolationError) as raised:
            offer(scheduler, make_bad(bad.fence))
        assert raised.value.violation is violation
        assert (bad.block, bad.queued, bad.fence) == (None, False, first_fence(session_id))
        assert (bad.drafter_id, bad.permit_number) == (DRAFTER, 0)
    offer(scheduler, good[3])
    better = make_block(first_fence(2), [11], attempt=1, permit=None)
    offer(scheduler, better)
    assert scheduler.run_plain(PlainRun(first_fence(4), 1)) is FenceVerdict.CURRENT
    blocks = {item.session.spec.session_id: item.block for item in next_step(scheduler).items}
    assert blocks == {1: good[1], 2: better, 3: good[3], 4: None}


def test_block_is_dropped_whatever_is_wrong_with_it_where_it_is_stale_or_speculation_has_ended() -> None:
    """But for a permit that was forged; see below."""
    for name in VIOLATIONS.keys() - {"from the future", "forged permit"}:
        scheduler, session = drafted_for(plain_rounds=1)
        run_plain_steps(scheduler, [20])
        offer(scheduler, VIOLATIONS[name][1](first_fence()))
        assert scheduler.dropped == {"stale": 1}, name
        assert (session.block, scheduler.next_step()) == (None, None)
    for name in VIOLATIONS.keys() - {"forged permit"}:
        scheduler, session = drafted_for()
        scheduler.end_speculation(session)
        offer(scheduler, make_block(session.fence))
        offer(scheduler, make_block(session.fence, permit=None))
        offer(scheduler, VIOLATIONS[name][1](session.fence))
        assert scheduler.dropped == {"no_speculation": 3}, name
        assert scheduler.next_step() is None


def test_rule_that_needs_no_distributions_takes_blocks_without_them() -> None:
    scheduler, _ = opened(rule="typical")
    assert take(scheduler, make_block(first_fence(), encoding=Encoding.NONE)) is FenceVerdict.CURRENT


# Permits


def test_first_permit_makes_its_sender_the_sessions_drafter_and_later_blocks_need_none() -> None:
    """The first block may be stale: the verifier may have gone on alone while it was drafted."""
    for is_stale in (False, True):
        scheduler, session = opened(plain_rounds=int(is_stale))
        run_plain_steps(scheduler, [20])
        with pytest.raises(BlockViolationError) as raised:
            offer(scheduler, make_block(session.fence, permit=None))
        assert raised.value.violation is Violation.PEER
        first = make_block(first_fence())
        assert take(scheduler, first) is (FenceVerdict.STALE if is_stale else FenceVerdict.CURRENT)
        assert scheduler.take_permit(first) is None, "the same again is no new drafter"
        for number in range(3):
            block = make_block(session.fence, permit=None)
            assert session.queued or take(scheduler, block) is FenceVerdict.CURRENT
            complete(scheduler, next_step(scheduler), [20 + number])
        assert scheduler.dropped == ({"stale": 1} if is_stale else {})


def test_forged_permit_is_a_violation_even_with_a_stale_block_and_changes_nothing() -> None:
    forged = [permit(key=bytes(16)), Permit(1, permit(0).token), Permit(0, permit().token[:-1])]
    forged += [Permit(0, permit().token + b"0"), Permit(0, b"")]
    for shown, is_stale, drafter_id in itertools.product(forged, (False, True), (DRAFTER, OTHER)):
        scheduler, session = opened(plain_rounds=int(is_stale))
        run_plain_steps(scheduler, [20])
        assert scheduler.take_permit(make_block(session.fence)) is session
        with pytest.raises(BlockViolationError) as raised:
            offer(scheduler, make_block(first_fence(), permit=shown, drafter_id=drafter_id))
        assert raised.value.violation is Violation.PEER
        assert (session.drafter_id, session.permit_number) == (DRAFTER, 0)
        assert take(scheduler, make_block(session.fence, permit=None)) is FenceVerdict.CURRENT


def test_session_without_a_key_takes_nobodys_blocks() -> None:
    """Not even of a drafter that makes its permit from the empty key."""
    for shown in (permit(key=b""), permit(), Permit(0, b"")):
        scheduler, session = opened(permit_key=b"")
        with pytest.raises(BlockViolationError):
            offer(scheduler, make_block(session.fence, permit=shown))
        offer(scheduler, make_block(session.fence, permit=None))
        assert scheduler.dropped == {"no_speculation": 1}
        assert scheduler.next_step() is None


def test_permit_of_a_past_epoch_or_another_session_opens_nothing() -> None:
    scheduler = make_scheduler()
    one, other = (scheduler.open(make_spec(number, permit_key=bytes([number] * 16)), lease_id=0) for number in (1, 2))
    with pytest.raises(BlockViolationError):
        offer(scheduler, make_block(one.fence, permit=permit(key=bytes([2] * 16))))
    offer(scheduler, make_block(replace(other.fence, epoch=1), permit=permit(key=bytes([2] * 16))))
    assert scheduler.dropped == {"unknown_session": 1}
    assert (one.drafter_id, other.drafter_id) == (None, None)


def test_higher_number_takes_the_session_over_and_the_earlier_drafter_is_a_stranger() -> None:
    scheduler, session = drafted_for()
    late = make_block(session.fence, permit=None)
    assert scheduler.take_permit(make_block(session.fence, drafter_id=OTHER, permit=permit(3))) is session
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, late)
    assert raised.value.violation is Violation.PEER
    for drafter_id in (DRAFTER, OTHER):
        assert take(scheduler, make_block(session.fence, drafter_id=drafter_id)) is FenceVerdict.STALE, "a lower number"
    assert scheduler.dropped == {"stale": 2}
    assert (session.drafter_id, session.permit_number) == (OTHER, 3)
    assert take(scheduler, make_block(session.fence, drafter_id=OTHER, permit=None)) is FenceVerdict.CURRENT


def test_speculation_that_was_ended_goes_on_with_a_higher_number_alone() -> None:
    scheduler, session = opened()
    scheduler.take_permit(make_block(session.fence, permit=permit(1)))
    scheduler.end_speculation(session)
    for drafter_id, number in itertools.product((DRAFTER, OTHER), (0, 1)):
        shown = make_block(session.fence, drafter_id=drafter_id, permit=permit(number))
        assert scheduler.take_permit(shown) is None
        assert take(scheduler, shown) is FenceVerdict.STALE
        assert (session.drafter_id, session.permit_number) == (None, 1)
    assert scheduler.dropped == {"stale": 2, "no_speculation": 2}
    replacement = make_block(session.fence, drafter_id=OTHER, permit=permit(2))
    assert take(scheduler, replacement) is FenceVerdict.CURRENT
    assert next_step(scheduler).items[0].block is replacement


# All of it in any order


class VerifierInAnyOrder(AnyOrder):
    """Messages are blocks of two drafters and plain runs; steps end with tokens or errors."""

    side = VERIFIER

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[tuple[int, int], int] = {}
        """Of each open session."""
        self.parts: dict[tuple[int, int], tuple[int, int | None]] = {}
        """The highest permit that each open session has seen, and its drafter unless its part has ended."""

    @rule(key=AnyOrder.KEYS, prompt_len=st.integers(1, 20), room=st.integers(1, 40), plain_rounds=st.integers(0, 3))
    def open(self, key: tuple[int, int], prompt_len: int, room: int, plain_rounds: int) -> None:
        spec = long_spec(key[0], prompt_len, epoch=key[1], max_len=prompt_len + room, plain_rounds=plain_rounds)
        if self.open_session(key, spec):
            self.rounds[key], self.parts[key] = 0, (-1, None)

    @rule(
        key=AnyOrder.KEYS,
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
        number, committed = self.rounds.get(key, 0), self.expected.get(key, [1])
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

    @rule(key=AnyOrder.KEYS)
    def end_speculation(self, key: tuple[int, int]) -> None:
        if self.parts.get(key, (-1, None))[1] is not None:  # nobody else can do anything to be sent away for
            self.scheduler.end_speculation(self.scheduler.sessions[key])
            self.parts[key] = (self.parts[key][0], None)

    @precondition(lambda self: self.step is not None)
    @rule(choices=st.lists(st.integers(0, 5), min_size=5, max_size=5))
    def finish_step(self, choices: list[int]) -> None:
        chosen = {item.session.key: choice for item, choice in zip(self.step.items, choices, strict=False)}

        def decide(item: StepItem) -> list[int] | DraftwireError:
            choice = chosen[item.session.key]
            if choice == 5:
                return UnavailableError("no finite logits")
            extra = STOP_TOKEN if choice == 3 else 20 + item.session.spec.session_id
            return [*(item.block.token_ids[:choice] if item.block else []), extra]

        told = self.scheduler.complete(self.step, self.engine.run(self.step, decide))
        members = [item.session for item in self.step.items]
        self.step = None
        for session, result in told:
            assert self.scheduler.sessions[session.key] is session
            assert any(session is member for member in members)
            if isinstance(result, Verdict):
                committed = self.expected[session.key]
                assert (result.fence.round, result.fence.prefix_len) == (self.rounds[session.key], len(committed))
                assert result.fence.prefix_hash == CommittedTokens(committed).hash
                self.rounds[session.key] += 1
                self.expected[session.key] = committed + result.token_ids
            else:
                self.close(session.key)  # as the core does

    def finish(self) -> None:
        self.finish_step([0] * 5)

    def forget(self, key: tuple[int, int]) -> None:
        self.rounds.pop(key, None)
        self.parts.pop(key, None)

    @invariant()
    def sessions_are_as_their_messages_made_them(self) -> None:
        for key, session in self.scheduler.sessions.items():
            assert session.queued == (session.block is not None or session.plain_rounds_left > 0)
            assert session.round == self.rounds[key]
            assert (session.permit_number, session.drafter_id) == self.parts[key]


TestAnyOrder = VerifierInAnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
