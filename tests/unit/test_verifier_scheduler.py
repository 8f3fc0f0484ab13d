"""The verifier's scheduler: who gets in, which messages count, what goes into a step, and what a step leaves behind."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from scheduler_contract import (
    CONTEXT_LENGTH,
    PROMPT,
    UNSHRUNK,
    AnyOrder,
    FixedPacer,
    SchedulerContract,
    Side,
    next_step,
)
from session_specs import changed, target_spec

from draftwire.engine.admission import Room
from draftwire.engine.target_session import Step, StepItem, StepResult, TargetSession, mask_us_of
from draftwire.errors import (
    BlockViolationError,
    DraftwireError,
    InvalidRequestError,
    UnavailableError,
    Violation,
)
from draftwire.method.encoding import Claim, DraftDistributions, decode
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import StepSize
from draftwire.method.rounds import (
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
from draftwire.method.token_source import TokenSource
from draftwire.options.ahead.held_blocks import HeldBlocks, HeldTally
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.options.model_free.local_texts import LocalText
from draftwire.options.model_free.registry import TextDrafters
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.deciding import Judgement, JudgingOutcome, StillReading
from draftwire_verifier.draft_waits import DraftWaits
from draftwire_verifier.local_sources import LocalSources
from draftwire_verifier.scheduler import Scheduler

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
    return Scheduler(
        context_length=context_length,
        vocab_size=VOCAB_SIZE,
        max_draft_tokens=5,
        room=room,
        pacer=pacer,
        waits=DraftWaits(clock),
        local=LocalSources([partial(LocalText.open, TextDrafters(), VOCAB_SIZE)]).find,
        report_of=LogprobsReport.of,
        hold=partial(HeldBlocks, HeldTally()),
    )


def make_spec(session_id: int = 1, **changes: Any) -> TargetSessionSpec:
    spec = target_spec(
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
    return changed(spec, **changes)


def long_spec(session_id: int, prompt_len: int, **changes: Any) -> TargetSessionSpec:
    """A session that wants one token after a prompt of any length."""
    given = {"prompt_len": 1, "max_len": prompt_len + 30, "plain_rounds": 1, **changes}
    return make_spec(session_id, **{"token_ids": [1] * prompt_len, **given})


def make_block(
    fence: Fence,
    token_ids: list[int] | None = None,
    encoding: Encoding = Encoding.ONE_HOT,
    vocab_size: int = VOCAB_SIZE,
    **changes: Any,
) -> ReceivedBlock:
    """A block as it comes out of the edge, where its distributions were decoded. It shows the first permit."""
    token_ids = [10, 11] if token_ids is None else token_ids
    (draft,) = decode([Claim(token_ids, DraftDistributions(encoding, vocab_size))], VOCAB_SIZE)
    given = {"drafter_id": DRAFTER, "has_distributions": encoding is not Encoding.NONE, "permit": permit()} | changes
    return ReceivedBlock(fence, token_ids, draft, **given)


def permit(number: int = 0, key: bytes = PERMIT_KEY) -> Permit:
    return Permit.make(key, number)


def offer(scheduler: Scheduler, block: ReceivedBlock) -> None:
    """Does what the core does with a block."""
    scheduler.take_permit(block)
    scheduler.offer_block(block)


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
        outcomes: list[JudgingOutcome] = []
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


VERIFIER = Side(
    make_scheduler=make_scheduler,
    make_spec=lambda session_id=1, **changes: make_spec(session_id, **{"plain_rounds": 1, **changes}),
    engine=Engine,
    ask=lambda scheduler, session: scheduler.run_plain(PlainRun(session.fence, 1)),
    done=lambda told: [session.spec.session_id for session, _ in told],
    timed=lambda result, seconds: replace(result, verify_us=int(seconds * 1e6)),
    out_of_range=[
        {"rule": "tipical"},
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
            step=StepSize(len(PROMPT) + len(draft), 1, len(PROMPT)),
        )


def test_verdicts_say_what_the_masks_of_their_own_session_took() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2):
        opened(scheduler, session_id=session_id, plain_rounds=3)
    step = next_step(scheduler)
    automata = {1: None, 2: SimpleNamespace(take_cpu_s=lambda: 0.0003)}
    for item in step.items:
        item.session.automaton = automata[item.session.spec.session_id]  # type: ignore[assignment]
    result = replace(Engine().run(step, lambda item: [20]), mask_us=mask_us_of(step.items))
    told = {session.spec.session_id: verdict for session, verdict in scheduler.complete(step, result)}
    assert {number: verdict.mask_us for number, verdict in told.items() if isinstance(verdict, Verdict)} == {
        1: 0,
        2: 300,
    }


def test_waiting_for_drafts_counts_from_verdict_to_block_if_any_drafts() -> None:
    now = [1.0]
    scheduler, session = opened(make_scheduler(clock=lambda: now[0]))
    offer(scheduler, make_block(first_fence(), [10]))
    complete(scheduler, next_step(scheduler), [20])
    assert scheduler.waits.draft_wait_s == 0.0, "the first block waits for nobody's verdict"
    now[0] = 1.5
    offer(scheduler, make_block(session.fence, [10]))
    assert scheduler.waits.draft_wait_s == pytest.approx(0.5)
    complete(scheduler, next_step(scheduler), [21])
    now[0] = 3.0
    scheduler.run_plain(PlainRun(session.fence, 1))
    complete(scheduler, next_step(scheduler), [22])
    assert scheduler.waits.draft_wait_s == pytest.approx(0.5)


def test_engine_is_known_to_stand_still_while_sessions_wait_for_blocks() -> None:
    now = [0.0]
    scheduler = make_scheduler(clock=lambda: now[0])

    def idle_from(start: float) -> float:
        now[0] = start
        assert scheduler.next_step() is None
        return scheduler.waits.idle.waited(now[0])

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
    assert scheduler.waits.idle.waited(now[0]) == pytest.approx(2.0)
    assert idle_from(5.0) == pytest.approx(2.0)
    now[0] = 6.0
    scheduler.close(*sessions[0].key)
    now[0] = 8.0
    scheduler.run_plain(PlainRun(sessions[1].fence, 1))
    assert scheduler.waits.idle.waited(now[0]) == pytest.approx(5.0)
    step = next_step(scheduler)
    now[0] = 9.0
    complete(scheduler, step, [22])
    idle_from(10.0)
    now[0] = 11.0
    scheduler.close(*sessions[1].key)
    assert idle_from(99.0) == pytest.approx(6.0), "nobody has waited since"


@dataclass
class InStep:
    """Two sessions whose steps take 0.1 s, alone or together, and whose blocks usually come 0.04 s after verdicts."""

    now: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(clock=lambda: self.now, context_length=100)
        specs = (make_spec(session_id=number, max_len=100) for number in (1, 2))
        self.first, self.second = (self.scheduler.open(spec, lease_id=0) for spec in specs)
        self.engine = Engine()
        for _ in range(4):
            self.offer(self.first, self.second)
            assert self.judge() == [self.first, self.second]
            self.now += 0.04

    def offer(self, *sessions: TargetSession) -> None:
        for session in sessions:
            offer(self.scheduler, make_block(session.fence, [10]))

    def judge(self, decide: Decide = accept_all) -> list[TargetSession]:
        """Runs the next step and returns who took part; nobody if there is none."""
        step = self.scheduler.next_step()
        if step is None:
            return []
        self.now += 0.1
        self.scheduler.complete(step, replace(self.engine.run(step, decide), verify_us=100_000))
        return [item.session for item in step.items]


def test_step_waits_for_a_session_whose_block_is_expected_soon() -> None:
    two = InStep()
    two.now -= 0.01
    two.offer(two.first)
    assert two.judge() == []
    assert two.scheduler.holds_for_s == pytest.approx(0.01)
    waited = two.scheduler.waits.idle.waited(two.now)
    two.now += 0.01
    assert two.scheduler.waits.idle.waited(two.now) == pytest.approx(waited + 0.01), "the engine has nothing to do"
    two.offer(two.second)
    assert two.judge() == [two.first, two.second]
    assert two.scheduler.holds_for_s is None
    assert two.scheduler.waits.gathering.held_s == pytest.approx(0.01)


def test_wait_counts_as_undisturbed_if_no_step_began_in_it() -> None:
    two = InStep()
    assert two.scheduler.waits.gathering.undisturbed.seconds == pytest.approx(0.04)
    two.now += 0.1  # both are late, so that nobody waits for the second
    two.offer(two.first)
    assert two.judge() == [two.first]
    before = two.scheduler.waits.gathering.undisturbed.seconds
    two.now += 0.3
    two.offer(two.second)
    assert two.scheduler.waits.gathering.undisturbed.seconds == before, "a step was beside it"
    two.offer(two.first)
    assert two.scheduler.waits.gathering.undisturbed.seconds != before


def test_step_waits_no_longer_than_the_block_is_expected() -> None:
    two = InStep()
    two.offer(two.first)
    assert two.judge() == []
    two.now += 0.04
    assert two.judge() == [two.first]
    two.offer(two.second)
    assert two.judge() == [], "the late one waits for the other's next block in turn"
    two.offer(two.first)
    assert two.judge() == [two.second, two.first]


def test_step_that_waits_for_a_session_begins_when_that_is_closed() -> None:
    two = InStep()
    two.offer(two.first)
    assert two.judge() == []
    two.scheduler.close(*two.second.key)
    assert two.judge() == [two.first]
    assert two.scheduler.holds_for_s is None


def test_nothing_is_waited_for_when_the_session_that_was_ready_is_closed() -> None:
    two = InStep()
    two.offer(two.first)
    assert two.judge() == []
    two.scheduler.close(*two.first.key)
    assert two.judge() == []
    assert two.scheduler.holds_for_s is None, "else the engine would be asked again and again"


@pytest.mark.parametrize("last", [[STOP_TOKEN], None], ids=["stop token", "max_len"])
def test_no_block_is_waited_for_where_the_text_is_over(last: list[int] | None) -> None:
    """The gateway closes the session, but only when it has the verdict; its drafter may have sent a block meanwhile."""
    two = InStep()
    two.offer(two.first, two.second)
    ending = last or [20] * (two.second.spec.max_len - len(two.second.committed))
    assert two.judge(lambda item: ending if item.session is two.second else [20]) == [two.first, two.second]
    assert two.scheduler.waits.since == {two.first: two.now}
    two.now += 0.03
    two.offer(two.first)
    assert two.judge() == [two.first], "at once"
    assert two.scheduler.waits.gathering.held_s == 0.0
    waited_s = two.scheduler.waits.draft_wait_s
    two.scheduler.close(*two.first.key)
    assert two.judge() == []
    assert two.scheduler.waits.idle.waited(two.now) == two.scheduler.waits.idle.waited(two.now + 1.0), "nobody waits"
    if last is not None:  # beyond max_len it is refused
        two.offer(two.second)
    assert two.scheduler.waits.draft_wait_s == waited_s


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


def test_tokens_that_others_had_read_are_told_in_every_verdict() -> None:
    scheduler = make_scheduler(context_length=100)
    scheduler.open(long_spec(1, 20, plain_rounds=3), lease_id=0)
    engine, told = Engine(reused=16), []
    while (step := scheduler.next_step()) is not None:
        told += scheduler.complete(step, engine.run(step))
    assert [verdict.num_cached_tokens for _, verdict in told if isinstance(verdict, Verdict)] == [16, 16, 16]


# Blocks that are refused


MakeBad = Callable[[Fence], ReceivedBlock]

VIOLATIONS: dict[str, tuple[Violation, MakeBad]] = {
    "another prefix": (Violation.PREFIX, lambda fence: make_block(replace(fence, prefix_hash=1))),
    "from the future": (Violation.PREFIX, lambda fence: make_block(replace(fence, round=fence.round + 1))),
    "too long": (Violation.LENGTH, lambda fence: make_block(fence, [10] * 4)),
    "beyond max_len": (Violation.LENGTH, lambda fence: make_block(fence, [10] * 3)),
    "empty": (Violation.LENGTH, lambda fence: make_block(fence, [])),
    "no distributions": (Violation.NO_DISTRIBUTIONS, lambda fence: make_block(fence, encoding=Encoding.NONE)),
    "found in decoding": (Violation.TOKEN_ID, lambda fence: make_block(fence, [VOCAB_SIZE])),
    "more rows than the target": (Violation.ENCODING, lambda fence: make_block(fence, vocab_size=VOCAB_SIZE + 1)),
    "wrong data": (Violation.ENCODING, lambda fence: make_block(fence, encoding=Encoding.DENSE_FLOAT32)),
    "another drafter": (Violation.PEER, lambda fence: make_block(fence, drafter_id=OTHER, permit=None)),
    "another's permit": (Violation.PEER, lambda fence: make_block(fence, drafter_id=OTHER)),
    "forged permit": (Violation.PEER, lambda fence: make_block(fence, permit=Permit(9, permit(8).token))),
}
every_violation = pytest.mark.parametrize(("violation", "make_bad"), VIOLATIONS.values(), ids=VIOLATIONS.keys())


@every_violation
def test_violation_is_raised_leaves_its_round_open_and_spares_other_blocks(
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
    better = make_block(first_fence(2), [11], permit=None)
    offer(scheduler, better)
    assert scheduler.run_plain(PlainRun(first_fence(4), 1)) is FenceVerdict.CURRENT
    blocks = {item.session.spec.session_id: item.block for item in next_step(scheduler).items}
    assert blocks == {1: good[1], 2: better, 3: good[3], 4: None}


def test_bad_block_is_dropped_if_it_is_stale_or_speculation_has_ended() -> None:
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
    scheduler, session = opened(rule="typical")
    block = make_block(first_fence(), encoding=Encoding.NONE)
    offer(scheduler, block)
    assert session.block is block


# Permits


def test_forged_permit_is_a_violation_even_of_a_stale_block() -> None:
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
        scheduler.offer_block(make_block(session.fence, permit=None))
        assert session.queued


def test_session_without_a_key_takes_nobodys_blocks() -> None:
    """Not even of a drafter that makes its permit from the empty key."""
    for shown in (permit(key=b""), permit(), Permit(0, b"")):
        scheduler, session = opened(permit_key=b"")
        with pytest.raises(BlockViolationError):
            offer(scheduler, make_block(session.fence, permit=shown))
        offer(scheduler, make_block(session.fence, permit=None))
        assert scheduler.dropped == {"no_speculation": 1}
        assert scheduler.next_step() is None


# All of it in any order


@dataclass(slots=True)
class Known:
    """What an open session should be."""

    round: int
    plain_rounds_left: int
    permit_number: int = -1
    drafter_id: int | None = None
    block: ReceivedBlock | None = None


class VerifierInAnyOrder(AnyOrder):
    """Messages are blocks of two drafters and plain runs; steps end with tokens or errors."""

    side = VERIFIER
    ROUNDS_OFF = st.sampled_from([0, 0, 0, 0, -1, 1])
    WRONG = st.sampled_from([*[{}] * 8, {"prefix_hash": 0}, {"prefix_len": 999}])
    """Fields of a fence that a message has wrong."""

    @rule(
        key=AnyOrder.KEYS,
        prompt_len=AnyOrder.PROMPTS,
        room=AnyOrder.ROOMS,
        plain_rounds=st.integers(0, 3),
        first_round=st.sampled_from([0, 5]),
    )
    def open(
        self, key: tuple[int, int], prompt_len: int, room: int, plain_rounds: int = 0, first_round: int = 0
    ) -> None:
        max_len = prompt_len + room
        changes = {"epoch": key[1], "max_len": max_len, "plain_rounds": plain_rounds, "first_round": first_round}
        self.open_session(key, long_spec(key[0], prompt_len, **changes), Known(first_round, plain_rounds))

    def fence(self, key: tuple[int, int], rounds_off: int, wrong: dict[str, int]) -> tuple[Fence, str]:
        """Returns what a message says, and why it would be dropped; it would not if that is empty."""
        number = self.known[key].round if key in self.known else 0
        committed = CommittedTokens(self.expected.get(key, [1]))
        fence = Fence(*key, max(0, number + rounds_off), len(committed), committed.hash)
        is_current = fence.round == number and not wrong
        if key not in self.known:
            reason = "unknown_session"
        elif fence.round < number or (is_current and self.scheduler.sessions[key].queued):
            reason = "stale"
        else:
            reason = "" if is_current else "violation"
        return replace(fence, **wrong), reason

    def room(self, key: tuple[int, int]) -> int:
        return self.scheduler.sessions[key].spec.max_len - len(self.expected[key])

    @rule(who=AnyOrder.WHO, amount=st.integers(0, 4), rounds_off=ROUNDS_OFF, wrong=WRONG)
    def run_plain(self, who: int, amount: int, rounds_off: int, wrong: dict[str, int]) -> None:
        key = self.key_of(who)
        fence, reason = self.fence(key, rounds_off, wrong)
        if not reason and (amount == 0 or self.room(key) == 0):
            with pytest.raises(InvalidRequestError):
                self.scheduler.run_plain(PlainRun(fence, amount))
            return
        verdicts = {"": FenceVerdict.CURRENT, "violation": FenceVerdict.VIOLATION}
        assert self.scheduler.run_plain(PlainRun(fence, amount)) is verdicts.get(reason, FenceVerdict.STALE)
        if reason:
            self.dropped[reason] += 1
        else:
            self.known[key].plain_rounds_left = amount

    @rule(
        who=AnyOrder.WHO,
        amount=st.integers(0, 4),
        rounds_off=ROUNDS_OFF,
        wrong=WRONG,
        sender=st.sampled_from([(DRAFTER, None), (DRAFTER, 0), (DRAFTER, 0), (OTHER, None), (OTHER, 1), (DRAFTER, 2)]),
    )
    def offer(
        self,
        who: int,
        amount: int,
        rounds_off: int,
        wrong: dict[str, int],
        sender: tuple[int, int | None],
    ) -> None:
        key = self.key_of(who)
        fence, reason = self.fence(key, rounds_off, wrong)
        drafter_id, number = sender
        shown = None if number is None else permit(number)
        block = make_block(fence, [10] * amount, drafter_id=drafter_id, permit=shown)
        known, violation = self.known.get(key), None
        is_new = known is not None and number is not None and number > known.permit_number
        assert self.scheduler.take_permit(block) is (self.scheduler.sessions[key] if is_new else None)
        if known is not None:
            if is_new:
                known.permit_number, known.drafter_id = number, drafter_id
            if number is not None and number < known.permit_number:
                reason = "stale"
            elif known.drafter_id is None and known.permit_number >= 0:
                reason = "no_speculation"
            elif drafter_id != known.drafter_id and reason != "stale":
                violation = Violation.PEER
            elif reason == "violation":
                violation = Violation.PREFIX
            elif not reason and not 1 <= amount <= min(3, self.room(key) - 1):
                violation = Violation.LENGTH
        if reason:
            self.dropped[reason] += 1
        if violation is not None:
            with pytest.raises(BlockViolationError) as raised:
                self.scheduler.offer_block(block)
            assert raised.value.violation is violation
            return
        self.scheduler.offer_block(block)
        if known is not None and not reason:
            known.block = block

    @rule(who=AnyOrder.WHO)
    def end_speculation(self, who: int) -> None:
        key = self.key_of(who)
        if key in self.known and self.known[key].drafter_id is not None:  # nobody else can be sent away
            self.scheduler.end_speculation(self.scheduler.sessions[key])
            self.known[key].drafter_id = None

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
        items = {id(item.session): item for item in self.step.items}
        self.step = None
        for session, result in told:
            assert self.scheduler.sessions[session.key] is session
            if not isinstance(result, Verdict):
                self.close(session.key)  # as the core does
                continue
            known, committed = self.known[session.key], self.expected[session.key]
            assert items[id(session)].block is known.block
            assert result.fence == Fence(*session.key, known.round, len(committed), CommittedTokens(committed).hash)
            committed += result.token_ids
            known.round += 1
            if known.block is None:
                is_over = STOP_TOKEN in result.token_ids or self.room(session.key) == 0
                known.plain_rounds_left = 0 if is_over else known.plain_rounds_left - 1
            known.block = None
            assert result.plain_rounds_left == known.plain_rounds_left

    def finish(self) -> None:
        self.finish_step([0] * 5)

    @invariant()
    def sessions_are_as_their_messages_made_them(self) -> None:
        for key, session in self.scheduler.sessions.items():
            found = Known(*(getattr(session, name) for name in Known.__slots__))
            assert found == self.known[key]
            assert session.queued == (session.block is not None or session.plain_rounds_left > 0)


TestAnyOrder = VerifierInAnyOrder.TestCase
TestAnyOrder.settings = UNSHRUNK
