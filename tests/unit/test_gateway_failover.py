"""The outer loop when its peers fail: whatever happens to verifiers and drafters, the text goes on as the target's."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import Any, Literal
from unittest.mock import patch

import pytest
from gateway_fakes import (
    GONE,
    PROMPT,
    STOP_TOKEN,
    STORY,
    TOO_SLOW,
    DraftSession,
    FakeDrafter,
    FakeTarget,
    Fate,
    Result,
    TargetSession,
    collect,
    make_loop,
    refuse,
    text_of,
    whole_story,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time, now, run, timed

from draftwire.errors import (
    CompletionInterruptedError,
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.round_parts import LogprobsPart
from draftwire.method.rounds import BlockSent, Calibration, DraftTimings, SendDrafted, TargetSessionSpec
from draftwire.models.description import DRAFTS_ON_OUTCOMES, PARTIAL_BLOCKS
from draftwire.requests.logprobs import TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import MAX_PLACE_S, StructuredOutput
from draftwire_gateway.session import event_queue
from draftwire_gateway.session.committed_text import FinishReason
from draftwire_gateway.session.drafter_seat import NO_BLOCK
from draftwire_gateway.session.event_queue import EventQueue, TaggedInbox
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import (
    BlocksRefused,
    DrafterLost,
    DrafterReady,
    TargetLost,
)
from draftwire_gateway.session.round_trip_estimate import FIRST_TIMEOUT_S, LEAST_FLUSH_S, LEAST_TIMEOUT_S
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.session.verifier_seat import (
    FIRST_WAIT_SECONDS,
    LONGEST_NAMED_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FUTILE_MOVES,
)

LIMITS = LoopSettings(
    plain_run_rounds=4, block_timeout_s=5.0, verdict_timeout_s=20.0, prompt_timeout_s=30.0, failover_timeout_s=10.0
)


# Anything may happen


ANSWER_LOST = UnavailableError("the answer was lost")
"""Of an opening: the session is open there, and works."""
SENT = BlockSent(1, 1, 0)
OPENINGS = [None, GONE, NoRoomError("full"), ProtocolViolationError("unknown lease"), ANSWER_LOST]
"""What an opening at a verifier is refused with."""


@dataclass(frozen=True)
class DraftOpening:
    """What becomes of an opening at a drafter."""

    ready_after: int = 0
    """Verdicts."""
    refusal: Exception | None = None
    lost_after_s: float | None = None
    """When its stream breaks."""


DRAFT_OPENINGS = [
    DraftOpening(),
    DraftOpening(ready_after=3),
    DraftOpening(ready_after=10_000),
    DraftOpening(refusal=NoRoomError("full")),
    DraftOpening(refusal=RuntimeError("a bug")),
    DraftOpening(refusal=GONE, lost_after_s=0.0),
    DraftOpening(lost_after_s=1.0),
]


@dataclass(frozen=True)
class Reply:
    """What a drafter does that is asked for a block."""

    sent_after_s: tuple[float, ...] = ()
    is_deaf: bool = False
    """It cannot be asked."""
    is_lost: bool = False
    is_refused: bool = False
    when_hurried: Literal["sends", "is deaf", "is silent", "lies"] = "is silent"
    """Who lies says that a block was sent that was not."""

    @property
    def is_fault(self) -> bool:
        comes = any(seconds < 5.0 for seconds in self.sent_after_s) or self.when_hurried == "sends"
        comes = comes and self.when_hurried != "lies"
        return self.is_deaf or self.is_lost or self.is_refused or not comes


REPLIES = [
    Reply((0.0,)),
    Reply((0.0, 0.0)),
    Reply((2.0,)),
    Reply((25.0,)),
    Reply((0.0,), is_lost=True),
    Reply(is_lost=True),
    Reply(is_lost=True, is_refused=True),
    Reply(is_refused=True),
    Reply(is_deaf=True),
    Reply(),
    Reply(when_hurried="sends"),
    Reply(when_hurried="is deaf"),
    Reply(when_hurried="lies"),
    Reply((7.0,), when_hurried="lies"),
]


@dataclass(frozen=True)
class Plan:
    """What happens, each list in the order in which there is occasion; where one ends, all goes well."""

    num_targets: int
    num_drafters: int
    openings: list[Exception | None]
    fates: list[Fate]
    draft_openings: list[DraftOpening]
    replies: list[Reply]
    old_ones_speak: bool
    """Whether, whenever a drafter or a block is asked for, whoever drafted before says that it is lost, that it is
    ready, and is refused."""
    accepts: list[int]
    max_tokens: int
    num_speculative_tokens: int
    verdict_s: float
    stop: tuple[int, int] | None
    """Where in the story the stop string begins, and its length."""
    stop_token_at: int | None

    @property
    def story(self) -> list[int]:
        if self.stop_token_at is None:
            return STORY
        return [*STORY[: self.stop_token_at], STOP_TOKEN, *STORY[self.stop_token_at + 1 :]]

    def changes(self) -> dict[str, Any]:
        stop = () if self.stop is None else (text_of(STORY[self.stop[0] : sum(self.stop)]),)
        speculative = self.num_speculative_tokens
        return {"max_tokens": self.max_tokens, "num_speculative_tokens": speculative, "stop": stop}

    def expected(self) -> tuple[list[int], str, FinishReason]:
        """Returns what the target alone would have said."""
        ends = [(self.max_tokens, self.max_tokens, FinishReason.LENGTH)]  # tokens, tokens with text
        if self.stop_token_at is not None:
            ends.append((self.stop_token_at + 1, self.stop_token_at, FinishReason.STOP))
        if self.stop is not None:
            ends.append((sum(self.stop), self.stop[0], FinishReason.STOP))
        # Of those that end with the same token, a stop is the reason; a stop string does not reach over a stop token.
        num_tokens, num_shown, reason = min(ends, key=lambda end: (end[0], end[2] is FinishReason.LENGTH))
        return self.story[:num_tokens], text_of(STORY[:num_shown]), reason


def mostly(usual: Any, others: Sequence[Any], size: int) -> Any:
    return st.lists(st.one_of(st.just(usual), st.sampled_from(others)), max_size=size)


plans = st.builds(
    Plan,
    num_targets=st.integers(1, 3),
    num_drafters=st.integers(0, 3),
    openings=mostly(None, OPENINGS, 8),
    fates=mostly(Fate.TOLD, list(Fate), 12),
    draft_openings=mostly(DRAFT_OPENINGS[0], DRAFT_OPENINGS, 8),
    replies=mostly(REPLIES[0], REPLIES, 12),
    old_ones_speak=st.booleans(),
    accepts=st.lists(st.integers(0, 5), max_size=12),
    max_tokens=st.integers(1, 40),
    num_speculative_tokens=st.integers(0, 5),
    verdict_s=st.sampled_from([0.0, 4.0]),
    stop=st.none() | st.tuples(st.integers(0, 45), st.integers(1, 4)),
    stop_token_at=st.none() | st.integers(0, 45),
).filter(lambda plan: None in (plan.stop, plan.stop_token_at))


@dataclass
class World:
    """Carries out a plan, and remembers who was told what."""

    plan: Plan
    targets: list[FakeTarget] = field(default_factory=list)
    drafters: list[FakeDrafter] = field(default_factory=list)
    attempts: list[TargetSessionSpec] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    """Epochs."""
    draft_sessions: list[DraftSession] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self._openings, self._fates = deque(plan.openings), deque(plan.fates)
        self._draft_openings, self._replies = deque(plan.draft_openings), deque(plan.replies)
        self._opening_of: dict[tuple[int, int], DraftOpening] = {}
        accepts = deque(plan.accepts)
        for number in range(plan.num_targets):
            target = FakeTarget(plan.story, address=f"target:{number}")
            target.accepts = accepts
            target.on_opening = lambda spec, target=target: self._open_target(target, spec)
            target.next_fate = lambda: self._fates.popleft() if self._fates else Fate.TOLD
            target.delay_s = lambda count: plan.verdict_s
            self.targets.append(target)
        for number in range(plan.num_drafters):
            self.drafters.append(self._drafter(number))

    def _drafter(self, number: int) -> FakeDrafter:
        drafter = FakeDrafter(*self.targets, instance_id=100 + number)
        drafter.when_ready = lambda: self._when_ready(drafter)
        drafter.on_opening = lambda session: self._open_drafter(drafter, session)
        drafter.on_calibration = lambda calibration: self._draft(drafter, calibration)
        drafter.on_hurry = lambda command: self._hurry(drafter, command)
        return drafter

    def _open_target(self, target: FakeTarget, spec: TargetSessionSpec) -> Exception | None:
        self.attempts.append(spec)
        error = self._openings.popleft() if self._openings else None
        target.refuses_too_late = error is ANSWER_LOST
        if error is not None:
            self.refused.add(spec.epoch)
        return error

    def _when_ready(self, drafter: FakeDrafter) -> int:
        self.draft_sessions.append(drafter.session)
        opening = self._draft_openings.popleft() if self._draft_openings else DraftOpening()
        self._opening_of[drafter.session.key] = opening
        target = drafter.targets[drafter.spec.verifier_address]
        self._let_old_ones_speak(target, drafter.session)
        return len(target.verdicts) + opening.ready_after

    def _open_drafter(self, drafter: FakeDrafter, session: DraftSession) -> Exception | None:
        opening, lost = self._opening_of[session.key], DrafterLost(GONE)
        if opening.lost_after_s == 0.0:
            session.inbox.put_nowait(lost)
            drafter.targets[session.spec.verifier_address].tell(BlocksRefused(GONE, session.spec.permit.number))
        elif opening.lost_after_s is not None:
            session.is_faulty = True
            asyncio.get_running_loop().call_later(opening.lost_after_s, session.inbox.put_nowait, lost)
        return opening.refusal

    def _draft(self, drafter: FakeDrafter, calibration: Calibration) -> None:
        session, target = drafter.session, drafter.targets[drafter.spec.verifier_address]
        self._reply = reply = self._replies.popleft() if self._replies else Reply((0.0,))
        session.is_faulty = session.is_faulty or reply.is_fault
        if reply.is_deaf:
            raise GONE
        if reply.is_lost:
            session.inbox.put_nowait(DrafterLost(GONE))
        if reply.is_refused:
            target.tell(BlocksRefused(GONE, session.spec.permit.number))
        self._let_old_ones_speak(target, session)
        for seconds in reply.sent_after_s:
            if seconds:
                asyncio.get_running_loop().call_later(seconds, drafter.send_block, calibration)
            else:
                drafter.send_block(calibration)

    def _let_old_ones_speak(self, target: FakeTarget, current: DraftSession) -> None:
        for session in self.draft_sessions if self.plan.old_ones_speak else []:
            if session is not current:
                session.inbox.put_nowait(DrafterLost(GONE))
                session.inbox.put_nowait(DrafterReady())
                target.tell(BlocksRefused(GONE, session.spec.permit.number))

    def _hurry(self, drafter: FakeDrafter, command: SendDrafted) -> None:
        if self._reply.when_hurried == "is deaf":
            raise GONE
        if self._reply.when_hurried == "lies":
            drafter.reply(drafter.session, command.round)
        if self._reply.when_hurried == "sends":
            drafter.send_block(drafter.calibrations[-1], num_draft_tokens=1)

    # What must hold

    @property
    def sessions(self) -> list[TargetSession]:
        """Those that were taken, in order."""
        taken = [session for target in self.targets for session in target.sessions]
        taken = [session for session in taken if session.spec.epoch not in self.refused]
        return sorted(taken, key=lambda session: session.spec.epoch)

    def check_nobody_took_it(self, result: Result) -> None:
        assert (result.ids, result.text, self.sessions, self.draft_sessions) == ([], "", [], [])
        assert len(self.attempts) >= self.plan.num_targets
        self._check_all_is_closed()

    def check(self, statistics: Statistics, is_finished: bool) -> None:
        assert [peer.violations for peer in (*self.targets, *self.drafters) if peer.violations] == []
        self._check_all_is_closed()
        self._check_names_are_new()
        self._check_rounds(statistics)
        self._check_nobody_was_left_without_a_reason(statistics, is_finished)

    def _check_all_is_closed(self) -> None:
        for target in self.targets:
            assert sorted(target.closed) == sorted((spec.session_id, spec.epoch) for spec in target.attempts)
        for drafter in self.drafters:
            assert_unique(drafter.closed)
            assert set(drafter.closed).issuperset(session.key for session in drafter.sessions)

    def _check_names_are_new(self) -> None:
        epochs = [spec.epoch for spec in self.attempts]
        assert epochs == sorted(set(epochs))
        numbers = [session.spec.permit.number for session in self.draft_sessions]
        assert numbers == sorted(set(numbers))
        address_of = {session.key: target.address for target in self.targets for session in target.sessions}
        key_of = {session.key: session.spec.permit_key for session in self.sessions}
        for session in self.draft_sessions:
            assert session.spec.permit.is_made_with(key_of[session.key])
            assert session.spec.verifier_address == address_of[session.key]
        for drafter in self.drafters:
            assert_unique([session.key for session in drafter.sessions])  # a process is asked once within an epoch
            assert_unique([(command.epoch, command.round) for command in drafter.hurried])

    def _check_rounds(self, statistics: Statistics) -> None:
        """Each session goes on exactly where the loop had got in the one before: no number of a round serves twice."""
        first, taken = self.attempts[0], self.sessions
        for spec in self.attempts:
            assert spec.token_ids == [*PROMPT, *self.plan.story[: len(spec.token_ids) - len(PROMPT)]]
            assert spec.max_len == first.max_len
            before = [session for session in taken if session.spec.epoch < spec.epoch]
            if before:
                assert len(spec.token_ids) == prefix_len_at(before[-1], spec.first_round)
            else:
                assert (spec.first_round, spec.token_ids) == (first.first_round, first.token_ids)
        last_round = first.first_round + statistics.num_rounds
        emitted = prefix_len_at(taken[-1], last_round) - len(first.token_ids)
        assert statistics.num_emitted_tokens == emitted

    def _check_nobody_was_left_without_a_reason(self, statistics: Statistics, is_finished: bool) -> None:
        taken = self.sessions
        assert statistics.num_verifiers_lost == len(taken) - is_finished
        assert all(session.may_be_left for session in taken[: statistics.num_verifiers_lost])
        left = {session.key for session in taken if session.may_be_left}
        may_be_lost = [session.is_faulty or session.key in left for session in self.draft_sessions]
        assert all(may_be_lost[:-1])
        assert statistics.num_drafters_lost <= sum(may_be_lost)


def assert_unique(names: list[tuple[int, int]]) -> None:
    assert len(names) == len(set(names))


def prefix_len_at(session: TargetSession, number: int) -> int:
    """Returns how many tokens were committed before a round of a session."""
    index = number - session.spec.first_round
    assert 0 <= index <= len(session.verdicts)
    tokens = [len(verdict.token_ids) for verdict in session.verdicts[:index]]
    return len(session.spec.token_ids) + sum(tokens)


@settings(max_examples=300)
@given(plan=plans)
def test_nothing_is_lost_repeated_or_invented_whatever_happens_to_whom(plan: Plan) -> None:
    world, result = World(plan), Result()
    loop = make_loop(world.targets, world.drafters, LIMITS, **plan.changes())
    ids, text, reason = plan.expected()
    error = run(error_of(loop, result))
    if error is not None and not isinstance(error, CompletionInterruptedError):
        assert isinstance(error, UnavailableError | NoRoomError)
        world.check_nobody_took_it(result)
        return
    world.check(loop.statistics, is_finished=error is None)
    assert result.ids == ids[: len(result.ids)]
    if error is not None:
        assert error.num_generated_tokens == len(result.ids)
        shown, result = result, resume(plan, result, world, loop.statistics.num_rounds)
        result.ids, result.text = shown.ids + result.ids, shown.text + result.text
    assert (result.ids, result.text, result.reason) == (ids, text, reason)


async def error_of(loop: GenerationLoop, result: Result) -> DraftwireError | None:
    """Returns what a generation ends with, if not with a finish; `result` has all that was shown before."""
    try:
        await collect(loop, result)
    except DraftwireError as error:
        return error
    return None


def resume(plan: Plan, shown: Result, before: World, num_rounds: int) -> Result:
    """Takes an interrupted completion up where it ended, on peers that are well."""
    target = FakeTarget(plan.story, accepts=[2] * 40)
    drafter = FakeDrafter(target)
    result = run(collect(make_loop(target, drafter, LIMITS, generated_ids=tuple(shown.ids), **plan.changes())))
    assert target.spec.first_round >= num_rounds, "numbers that made a token are not used again"
    assert target.spec.session_id != before.attempts[0].session_id
    return result


# A verifier is lost


def some_targets(count: int = 2, **arguments: Any) -> list[FakeTarget]:
    return [FakeTarget(address=f"target:{number}", **arguments) for number in range(1, count + 1)]


def fated(target: FakeTarget, *fates: Fate) -> FakeTarget:
    """Gives a verifier's next rounds their fates; all after them are told."""
    left = deque(fates)
    target.next_fate = lambda: left.popleft() if left else Fate.TOLD
    return target


def lost_after(target: FakeTarget, num_verdicts: int) -> FakeTarget:
    """The verifier tells so many verdicts and is lost for ever with the next one."""
    target.after_verdict = lambda count: setattr(target, "connected", count <= num_verdicts)
    return fated(target, *[Fate.TOLD] * num_verdicts, Fate.LOST_UNTOLD)


@pytest.mark.parametrize("fate", [Fate.LOST_UNTOLD, Fate.TOLD_AND_LOST, Fate.SILENT, Fate.LATE])
def test_session_goes_on_elsewhere_with_all_that_was_committed(fate: Fate) -> None:
    for num_before in (0, 1, 3):
        first, second = targets = some_targets(accepts=[2] * 10)
        drafter = FakeDrafter(first, second)
        fated(first, *[Fate.TOLD] * num_before, fate)
        result = whole_story(targets, drafter, LIMITS)
        used = num_before + (fate is Fate.TOLD_AND_LOST)
        ids = [*PROMPT, *STORY[: sum(len(verdict.token_ids) for verdict in first.verdicts[:used])]]
        assert second.spec == replace(
            first.spec,
            epoch=1,
            first_round=used,
            token_ids=ids,
            plain_rounds=second.spec.plain_rounds,
            parameters=replace(first.spec.parameters, shares_text=False),
        ), num_before
        names = [(session.spec.epoch, session.spec.permit.number) for session in drafter.sessions]
        assert names == [(0, 0), (1, 1)], num_before
        assert drafter.spec.token_ids[: len(ids)] == ids
        assert (drafter.spec.verifier_address, result.statistics.num_verifiers_lost) == (second.address, 1)
        assert any(verdict.num_draft_tokens for verdict in second.verdicts)


def interrupted(loop: GenerationLoop) -> tuple[CompletionInterruptedError, Result, float]:
    """Returns the error that a generation ends with, what was shown before it, and how long all took.

    Verdicts of the fakes take no time, so this is how long another verifier was sought.
    """
    result = Result()
    error, seconds = run(timed(error_of(loop, result)))
    assert isinstance(error, CompletionInterruptedError)
    return error, result, seconds


@pytest.mark.parametrize(("num_generated", "failover_s"), [(0, 10.0), (6, 10.0), (0, 0.0)])
def test_completion_is_interrupted_when_no_verifier_is_left(num_generated: int, failover_s: float) -> None:
    """At once where failover is switched off."""
    target, limits = lost_after(FakeTarget(), 3), replace(LIMITS, failover_timeout_s=failover_s)
    loop = make_loop(target, None, limits, generated_ids=tuple(STORY[:num_generated]))
    error, result, waited_s = interrupted(loop)
    assert result.ids == STORY[num_generated : num_generated + 3]
    assert (str(error), error.num_generated_tokens) == ("no verifier can be reached", num_generated + 3)
    assert failover_s <= waited_s <= failover_s + 2 * LONGEST_PAUSE_S * (failover_s > 0.0)
    assert len(target.attempts) == len(target.closed) == 1


def test_completion_is_interrupted_when_all_other_verifiers_stay_full() -> None:
    first, second = targets = some_targets()
    lost_after(first, 1)
    second.open_error = NoRoomError("full")
    error, result, waited_s = interrupted(make_loop(targets, None, LIMITS))
    assert (str(error), error.num_generated_tokens, result.ids) == ("full", 1, STORY[:1])
    assert waited_s >= LIMITS.failover_timeout_s
    assert len(second.attempts) == len(second.closed) > 5


def test_verifier_that_comes_back_in_time_takes_the_session_again() -> None:
    target = fated(FakeTarget(), *[Fate.TOLD] * 2, Fate.LOST_UNTOLD)

    def restart(count: int) -> None:
        if count == 3:
            target.connected = False
            asyncio.get_running_loop().call_later(9.0, setattr, target, "connected", True)

    target.after_verdict = restart
    result = whole_story(target, FakeDrafter(target), LIMITS)
    assert [session.spec.epoch for session in target.sessions] == [0, 1]
    assert result.statistics.num_verifiers_lost == 1


def test_session_that_every_verifier_dies_of_is_given_up() -> None:
    first, second = targets = some_targets()
    first.next_fate = second.next_fate = lambda: Fate.LOST_UNTOLD
    error, result, _ = interrupted(make_loop(targets, None, LIMITS))
    assert (error.num_generated_tokens, result.ids) == (0, [])
    assert len(first.attempts) + len(second.attempts) == MAX_FUTILE_MOVES + 1
    assert first.closed + second.closed == [(spec.session_id, spec.epoch) for spec in first.attempts + second.attempts]


def test_session_that_gets_on_between_losses_is_never_given_up() -> None:
    target = FakeTarget()
    target.next_fate = lambda: Fate.TOLD_AND_LOST
    statistics = whole_story(target, None, LIMITS).statistics
    assert statistics.num_verifiers_lost == 19  # after the last token nothing is awaited any more


def test_verifier_that_hangs_is_not_chosen_again_while_there_is_another() -> None:
    """It is connected, takes sessions, and has the fewest: a pool puts it first."""
    targets = some_targets(3)
    targets[0].silent = targets[1].silent = True
    whole_story(targets, None, LIMITS)
    assert [len(target.attempts) for target in targets] == [1, 1, 1]


def test_silent_verifier_after_a_move_is_not_taken_for_a_slow_drafter() -> None:
    """The one before was lost while a block was awaited; now nothing is, but the first verdict."""
    targets = some_targets(3)
    drafter = FakeDrafter(*targets)
    fated(targets[0], Fate.TOLD, Fate.LOST_UNTOLD)
    targets[1].silent = True
    result = whole_story(targets, drafter, LIMITS)
    assert (drafter.hurried, len(drafter.sessions), result.statistics.num_drafters_lost) == ([], 3, 0)


def test_faultless_loss_is_raised_at_once_but_lost_room_moves_the_session() -> None:
    """Whoever gets `NoRoomError` may send the whole request again, so it must not come once there are tokens."""
    for error in (InvalidRequestError("too long"), ModelMismatchError("other model"), NoRoomError("full")):
        first, second = targets = some_targets()

        def lose(count: int, first: FakeTarget = first, error: DraftwireError = error) -> None:
            if count == 2:
                first.tell(TargetLost(error))

        first.after_verdict = lose
        moves = isinstance(error, NoRoomError)
        if moves:
            assert whole_story(targets, None, LIMITS).statistics.num_verifiers_lost == 1
        else:
            with pytest.raises(type(error), match=str(error)):
                run(collect(make_loop(targets, None, LIMITS)))
        assert (len(first.attempts), len(first.closed), len(second.attempts)) == (1, 1, int(moves))


@pytest.mark.parametrize("is_first", [True, False])
def test_refusal_that_is_not_the_verifiers_fault_is_raised_at_once(is_first: bool) -> None:
    first, second = targets = some_targets()
    refusing, other = (first, second) if is_first else (second, first)
    refusing.open_error = InvalidRequestError("too hot")
    fated(first, Fate.TOLD, Fate.LOST_UNTOLD)
    with pytest.raises(InvalidRequestError, match="too hot"):
        run(collect(make_loop(targets, None, LIMITS)))
    assert len(refusing.attempts) == len(refusing.closed) == 1
    assert len(other.attempts) == len(other.closed) == (0 if is_first else 1)


FULL, DRAINING, UNKNOWN = NoRoomError("full"), UnavailableError("draining"), ProtocolViolationError("unknown lease")


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([FULL, FULL], False),
        ([DRAINING, FULL], False),
        ([DRAINING, DRAINING], True),
        ([UNKNOWN, UNKNOWN], True),
        ([], True),
    ],
)
def test_new_completion_waits_for_a_verifier_to_be_ready_not_for_room(
    errors: list[DraftwireError], waits: bool
) -> None:
    """They may be restarted, one after the other. If one is full, this is said: trying again soon helps."""
    targets = some_targets(len(errors))
    for target, error in zip(targets, errors, strict=True):
        target.open_error = error
    raised, seconds = run(timed(error_of(make_loop(targets, None, LIMITS), Result())))
    assert type(raised) is (UnavailableError if waits else NoRoomError)
    assert FIRST_WAIT_SECONDS * waits <= seconds <= (FIRST_WAIT_SECONDS + 0.1) * waits
    assert all((len(target.attempts) > 3) if waits else (len(target.attempts) == 1) for target in targets)


@pytest.mark.parametrize(("gone_for_s", "waits_s"), [(0.0, 5.0), (3.0, 2.0), (5.0, 0.0), (float("inf"), 0.0)])
def test_new_completion_does_not_wait_for_a_verifier_that_was_gone_before(gone_for_s: float, waits_s: float) -> None:
    async def fail() -> Exception:
        loop = make_loop([], None, LIMITS)
        loop.verifier._peers.usable_at = now() - gone_for_s
        return await error_of(loop, Result())

    raised, seconds = run(timed(fail()))
    assert (type(raised), str(raised)) == (UnavailableError, "no verifier can be reached")
    assert waits_s <= seconds <= waits_s + 0.1


@pytest.mark.parametrize("seconds", [1.0, 5.0])
@in_virtual_time
async def test_consumer_that_leaves_during_the_search_leaves_nothing_open(seconds: float) -> None:
    """After one second the second verifier thinks about it; after five it has refused."""
    first, second = targets = some_targets()
    drafter = FakeDrafter(first, second)
    lost_after(first, 1)
    takes_time = second.open

    async def open_slowly(spec: TargetSessionSpec, inbox: Any) -> None:
        await asyncio.sleep(3.0)
        second.open_error = UnavailableError("draining")
        await takes_time(spec, inbox)

    second.open = open_slowly  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(make_loop(targets, drafter, LIMITS)), seconds)
    assert first.closed == [(first.spec.session_id, 0)]
    assert sorted(drafter.closed) == sorted(session.key for session in drafter.sessions)
    assert [epoch for _, epoch in second.closed] == ([1] if seconds == 1.0 else [1, 2])


def test_session_goes_on_though_its_lost_verifier_cannot_be_closed() -> None:
    first, second = some_targets()
    fated(first, Fate.TOLD, Fate.SILENT)
    first.close = refuse  # type: ignore[method-assign]
    whole_story([first, second], None, LIMITS)


# A drafter is slow, or lost


def two_drafters() -> tuple[FakeTarget, FakeDrafter, FakeDrafter]:
    target = FakeTarget(accepts=[2] * 20)
    return target, FakeDrafter(target, instance_id=101), FakeDrafter(target, instance_id=102)


def assert_kept(result: Result, other: FakeDrafter) -> None:
    """The first drafter was not given up for another one."""
    assert (other.opened, result.statistics.num_drafters_lost, result.drafter_error) == (0, 0, "")


def assert_replaced(result: Result, other: FakeDrafter, reason: str) -> None:
    """One drafter was given up, once, for this reason, and the other one drafts."""
    assert (result.statistics.num_drafters_lost, result.drafter_error) == (1, reason)
    assert other.calibrations


@pytest.mark.parametrize(("number", "timeout_s"), [(0, FIRST_TIMEOUT_S), (3, LEAST_TIMEOUT_S)])
def test_drafter_slower_than_usual_is_asked_once_for_what_it_has_drawn(number: int, timeout_s: float) -> None:
    """How long is usual is learned: of the first block nothing is known, later ones took no time."""
    target, drafter, other = two_drafters()
    asked_at: list[float] = []
    hurried_at: list[float] = []
    drafter.answer_block(number, lambda _: asked_at.append(now()))

    def request_flush(command: SendDrafted) -> None:
        hurried_at.append(now())
        drafter.send_block(drafter.calibrations[-1], num_draft_tokens=2)

    drafter.on_hurry = request_flush
    assert_kept(whole_story(target, [drafter, other], LIMITS, 30), other)
    assert hurried_at[0] - asked_at[0] == pytest.approx(timeout_s)
    fence = drafter.calibrations[number].fence
    assert drafter.hurried == [SendDrafted(target.spec.session_id, 0, fence.round)]
    (verdict,) = [verdict for verdict in target.verdicts if verdict.fence == fence]
    assert (verdict.num_draft_tokens, verdict.num_accepted_tokens) == (2, 2)
    assert len(drafter.calibrations) > number + 1


def test_drafter_that_answers_late_but_in_time_after_the_wish_is_kept() -> None:
    target, drafter, other = two_drafters()
    drafter.answer_block(
        0, lambda block: asyncio.get_running_loop().call_later(1.8 * FIRST_TIMEOUT_S, drafter.send_block, block)
    )
    assert_kept(whole_story(target, [drafter, other], LIMITS), other)
    assert len(drafter.hurried) == 1


def test_drafter_that_is_slow_again_is_asked_again() -> None:
    target, drafter, other = two_drafters()
    drafter.on_calibration = lambda calibration: None
    drafter.on_hurry = lambda command: drafter.send_block(drafter.calibrations[-1], num_draft_tokens=1)
    assert_kept(whole_story(target, [drafter, other], LIMITS), other)
    assert [command.round for command in drafter.hurried] == [block.fence.round for block in drafter.calibrations]
    assert len(drafter.hurried) > 2


def test_drafter_that_cannot_reply_or_be_flushed_is_replaced() -> None:
    """The latter at once, the former when it had `block_timeout_s` for what it has drawn."""
    for on_hurry, more_s, reason in (
        (lambda _: None, LIMITS.block_timeout_s, "no block in time, not even a part of one"),
        (refuse, 0.0, TOO_SLOW),
    ):
        target, drafter, other = two_drafters()
        drafter.description = replace(drafter.description, capabilities=frozenset({PARTIAL_BLOCKS}))
        asked_at: list[float] = []
        drafter.on_hurry = on_hurry
        drafter.answer_block(0, lambda _, asked_at=asked_at: asked_at.append(now()))
        opened_at: list[float] = []
        other.when_ready = lambda opened_at=opened_at: opened_at.append(now()) or 0
        assert_replaced(whole_story(target, [drafter, other], LIMITS), other, reason)
        assert opened_at[0] - asked_at[0] == pytest.approx(FIRST_TIMEOUT_S + more_s)
        assert len(drafter.hurried) == len(drafter.closed) == 1
        assert (drafter.spec.permit.number, other.spec.permit.number) == (0, 1)
        assert other.spec.permit.is_made_with(target.spec.permit_key)
        assert (other.spec.session_id, other.spec.epoch) == (drafter.spec.session_id, drafter.spec.epoch)
        assert target.plain_runs[0].num_rounds == LIMITS.bridge_rounds


@pytest.mark.parametrize(("num_calibrations", "reason"), [(0, "full"), (2, "lies")])
def test_drafter_that_refuses_or_whose_blocks_are_refused_is_replaced(num_calibrations: int, reason: str) -> None:
    target, drafter, other = two_drafters()
    drafter.open_error = NoRoomError("full") if reason == "full" else None
    drafter.answer_block(1, lambda _: target.tell(BlocksRefused(ModelMismatchError("lies"), permit_number=0)))
    assert_replaced(whole_story(target, [drafter, other], LIMITS), other, reason)
    assert (len(drafter.calibrations), drafter.hurried, other.spec.permit.number) == (num_calibrations, [], 1)


def test_late_readiness_of_a_drafter_that_was_given_up_means_nothing() -> None:
    target, drafter, other = two_drafters()
    drafter.answer_block(0, lambda _: drafter.tell(DrafterLost(GONE)))
    other.ready_after = 10_000
    target.after_verdict = lambda count: drafter.tell(DrafterReady()) if drafter.closed else None
    whole_story(target, [drafter, other], LIMITS)
    assert other.opened == 1


def on_outcomes(target: FakeTarget, *drafters: FakeDrafter) -> None:
    """Lets the first drafter begin rounds when the verifier has decided those before, as its calibrations allow."""
    for peer in (target, *drafters):
        capabilities = peer.description.capabilities | {DRAFTS_ON_OUTCOMES}
        peer.description = replace(peer.description, capabilities=capabilities)

    def begin(_: object) -> None:
        latest = drafters[0].calibrations[-1] if drafters[0].calibrations else None
        fence, max_len = target.session.fence, target.spec.max_len
        if latest is not None and fence.round <= latest.fence.round + latest.max_rounds_ahead:
            length = min(latest.num_draft_tokens, max_len - fence.prefix_len - 1)
            if length > 0:
                target.offer_block(fence, length, drafters[0].instance_id, None)

    def send(calibration: Calibration) -> None:
        drafters[0].send_block(calibration)
        begin(calibration)  # its outcome came before it

    target.after_verdict, drafters[0].on_calibration = begin, send


def test_block_that_a_lost_drafter_has_begun_is_no_fault_of_the_verifier() -> None:
    target, drafter, other = two_drafters()
    on_outcomes(target, drafter, other)

    def lose(calibration: Calibration) -> None:
        drafter.tell(DrafterLost(GONE))
        drafter.send_block(calibration)  # it comes before the gateway's request

    drafter.answer_block(1, lose)
    result = whole_story(target, [drafter, other], LIMITS)
    assert_replaced(result, other, str(GONE))
    assert result.statistics.num_verifiers_lost == 0


@in_virtual_time
async def test_slow_reader_makes_no_drafter_faster_that_begins_on_outcomes() -> None:
    """Its blocks are judged while nobody asks for them: they are as long under way as others."""
    target, drafter, _ = two_drafters()
    on_outcomes(target, drafter)
    target.delay_s = lambda count: 0.5
    target.alter = lambda verdict: replace(verdict, timings=DraftTimings(0, 100_000 * verdict.num_draft_tokens))
    loop = make_loop(target, drafter, LIMITS, max_tokens=90)
    learned: list[tuple[float | None, float | None]] = []
    async for _ in loop.run():
        learned.append((drafter.round_trip._fixed_s, drafter.round_trip._pass_s))
        if len(learned) > 10:
            await asyncio.sleep([0.4, 5.0][len(learned) % 2])
    assert learned[10] == pytest.approx((0.1, 0.1))
    assert learned[25] == pytest.approx((0.1, 0.1)), "the last blocks are shorter"


def test_full_drafter_does_not_block_one_with_a_longer_context() -> None:
    target, _, long = two_drafters()
    short = FakeDrafter(target, context_length=len(PROMPT), instance_id=101)
    result = whole_story(target, [short, long], LIMITS)
    assert (short.opened, result.drafter_error) == (0, "")
    assert long.calibrations


def test_drafter_in_quarantine_at_one_verifier_drafts_for_another() -> None:
    first, second = targets = some_targets(accepts=[2] * 20)
    drafter = FakeDrafter(first, second)
    first.quarantined = {drafter.instance_id}
    fated(first, *[Fate.TOLD] * 3, Fate.LOST_UNTOLD)
    whole_story(targets, drafter, LIMITS)
    assert [session.spec.verifier_address for session in drafter.sessions] == [second.address]
    assert drafter.calibrations


def test_drafter_is_not_hurried_because_the_verifier_takes_its_time() -> None:
    """The loop hears of a block when it is judged, and not before: it learns from the first how long that takes."""
    target, drafter, _ = two_drafters()
    target.delay_s, target.work_us = (lambda count: 2.0), 2_000_000
    result = whole_story(target, drafter, LIMITS)
    assert result.statistics.num_drafts > 4
    assert [command.round for command in drafter.hurried] == [drafter.calibrations[0].fence.round]


def test_silent_verifier_is_given_up_and_no_drafter_is_blamed() -> None:
    """The drafter says that its block was sent."""
    first, second = targets = some_targets(accepts=[2] * 20)
    drafter = FakeDrafter(first, second)
    fated(first, Fate.TOLD, Fate.SILENT)
    statistics = whole_story(targets, drafter, LIMITS).statistics
    assert (statistics.num_drafters_lost, statistics.num_verifiers_lost, len(drafter.sessions)) == (0, 1, 2)


@pytest.mark.parametrize("capabilities", [None, frozenset({PARTIAL_BLOCKS})])
def test_verifier_that_stalls_for_a_while_costs_no_drafter(capabilities: frozenset[str] | None) -> None:
    """One step of 6 or 60 s, for which nothing is heard of the verifier: all rounds but the first are drafted."""
    for seconds in (6.0, 60.0):
        target, drafter, other = two_drafters()
        if capabilities is not None:
            drafter.description = replace(drafter.description, capabilities=capabilities)
        target.delay_s = lambda count, seconds=seconds: seconds if count == 3 else 0.008
        limits = replace(LIMITS, verdict_timeout_s=120.0)
        assert_kept(whole_story(target, [drafter, other], limits, 60), other)
        assert [verdict.num_draft_tokens > 0 for verdict in target.verdicts].count(False) == 1
        assert len(drafter.hurried) == 1


class Naps:
    """A drafter that is frozen for a span of time: messages to it wait, and it draws nothing."""

    def __init__(self, drafter: FakeDrafter, start: float, end: float) -> None:
        self._start, self._end, self._num_waiting = start, end, 0
        self._calibrate, self._send_drafted = drafter.calibrate, drafter.send_drafted
        drafter.calibrate = lambda calibration: self._when_awake(self._calibrate, calibration)  # type: ignore[method-assign]
        drafter.send_drafted = lambda command: self._when_awake(self._send_drafted, command)  # type: ignore[method-assign]

    def _when_awake(self, act: Any, message: Any) -> None:
        if self._start <= now() < self._end:
            self._num_waiting += 1  # messages keep their order
            asyncio.get_running_loop().call_at(self._end + 1e-6 * self._num_waiting, act, message)
        else:
            act(message)


def test_frozen_drafter_is_a_short_gap_and_drafts_again_when_it_is_back() -> None:
    """It is neither lost nor replaced, and what was asked of it in its sleep is stale."""
    target, drafter, other = two_drafters()
    target.delay_s = lambda count: 0.02
    Naps(drafter, start=0.1, end=1.0)
    verdict_times: list[float] = []
    target.after_verdict = lambda count: verdict_times.append(now())
    assert_kept(whole_story(target, [drafter, other], LIMITS, 190), other)
    gaps = [after - before for before, after in pairwise(verdict_times)]
    assert max(gaps) <= LEAST_TIMEOUT_S + LEAST_FLUSH_S + 0.021
    assert sum(0.5 < when < 1.0 for when in verdict_times) > 20, "plain rounds go on"
    assert len(drafter.hurried) == 1
    assert target.verdicts[-2].num_draft_tokens > 0


def test_drafter_that_freezes_for_long_is_replaced_where_there_is_another() -> None:
    target, drafter, other = two_drafters()
    target.delay_s = lambda count: 0.05
    Naps(drafter, start=0.3, end=1e6)
    result = whole_story(target, [drafter, other], LIMITS, 190)
    assert_replaced(result, other, NO_BLOCK)


# The law of what is dropped


TOKEN_SECONDS = [(0.001, 0.001), (0.001, 0.08), (0.001, 0.2), (0.06, 0.2)]
"""How long drawing each of two tokens takes."""
DRAFT_LAW, TARGET_LAW = (0.3, 0.7), (0.6, 0.4)


@pytest.mark.parametrize("token_seconds", TOKEN_SECONDS)
def test_drafter_whose_time_depends_on_tokens_is_flushed_and_never_dropped(
    token_seconds: tuple[float, ...],
) -> None:
    """All blocks of three tokens are enumerated: a block that is dropped for its tokens' sake would bias the next one.

    The law of the first token is that of token verification if a block is judged, else the target's. Of others, it is
    the same argument one token later.
    """
    law, hurried = law_of_timed_drafts(token_seconds)
    assert law == pytest.approx(TARGET_LAW)
    assert (hurried > 0) is (sum(token_seconds) > 0.1 / 3)


def test_drafter_with_slow_masks_is_flushed_and_never_dropped() -> None:
    """Nearly as long as a mask may, beside what may delay any token. Without a form the same block is dropped."""
    token_seconds = (0.001, 0.2 + 0.9 * MAX_PLACE_S)
    form = SamplingParams(structured_output=StructuredOutput.regex(".*"))
    law, hurried = law_of_timed_drafts(token_seconds, sampling=form)
    assert law == pytest.approx(TARGET_LAW)
    assert hurried > 0
    law, _ = law_of_timed_drafts(token_seconds)
    assert law != pytest.approx(TARGET_LAW)


def law_of_timed_drafts(token_seconds: tuple[float, ...], **changes: Any) -> tuple[list[float], int]:
    """Returns the law of the first token after blocks of three tokens, each of which takes its time to be drawn, and
    how many of the blocks were flushed. No drafter is given up.
    """
    law, hurried = [0.0, 0.0], 0
    for block in product(range(2), repeat=3):
        target, drafter, other = two_drafters()
        whole_story(target, [drafter, other], replace(LIMITS, plain_run_rounds=1), 30)  # of usual blocks: no time
        pace = drafter.round_trip
        target, drafter, other = two_drafters()
        drafter.round_trip = pace
        draw_in_time(drafter, [token_seconds[token] for token in block])
        assert_kept(whole_story(target, [drafter, other], LIMITS, 8, **changes), other)
        hurried += len(drafter.hurried)
        num_drafted = target.verdicts[1].num_draft_tokens
        mass = math.prod(DRAFT_LAW[token] for token in block)
        law = [before + mass * part for before, part in zip(law, first_token_law(block[0], num_drafted), strict=True)]
    return law, hurried


def draw_in_time(drafter: FakeDrafter, seconds: Sequence[float]) -> None:
    """Lets a drafter draw its first block token by token; a flush ends it after the token that is being drawn."""
    ends = list(accumulate(seconds))

    def send(calibration: Calibration, at: float, num_tokens: int) -> None:
        asyncio.get_running_loop().call_at(at, send_once, calibration, num_tokens)

    def send_once(calibration: Calibration, num_tokens: int) -> None:
        if calibration.fence.round not in drafter.session.sent:
            drafter.send_block(calibration, num_tokens)

    def hurry(command: SendDrafted) -> None:
        calibration, started_at = begun[0]
        index = next(index for index, end in enumerate(ends) if started_at + end >= now())
        send(calibration, started_at + ends[index], index + 1)

    begun: list[tuple[Calibration, float]] = []

    def begin(calibration: Calibration) -> None:
        begun.append((calibration, now()))
        send(calibration, now() + ends[-1], len(ends))

    drafter.answer_block(0, begin)
    drafter.on_hurry = hurry


def first_token_law(first: int, num_drafted: int) -> list[float]:
    """Returns the law of a round's first token, given the block's first token and whether the block was judged."""
    if not num_drafted:
        return list(TARGET_LAW)
    accepted = min(1.0, TARGET_LAW[first] / DRAFT_LAW[first])
    residual = [max(0.0, target - draft) for target, draft in zip(TARGET_LAW, DRAFT_LAW, strict=True)]
    return [
        accepted * (token == first) + (1.0 - accepted) * part / sum(residual) for token, part in enumerate(residual)
    ]


# A verifier is wrong


def verdict_of(**changes: Any) -> Any:
    return lambda verdict: replace(verdict, **changes)


WRONG_VERDICTS: dict[str, Any] = {
    "more tokens accepted than judged": verdict_of(num_accepted_tokens=9, token_ids=STORY[:10]),
    "more accepted than there are": verdict_of(num_accepted_tokens=4),
    "more judged than requested": verdict_of(num_draft_tokens=2**27),
    "fewer tokens than accepted": verdict_of(num_accepted_tokens=2, token_ids=[1]),
    "more tokens than accepted": verdict_of(num_accepted_tokens=0, token_ids=[1, 2]),
    "no token": verdict_of(num_accepted_tokens=0, token_ids=[]),
    "a token beyond the vocabulary": lambda verdict: replace(
        verdict, token_ids=[*verdict.token_ids[:-1], STOP_TOKEN + 1]
    ),
    "plain rounds that nobody requested": verdict_of(plain_rounds_left=1),
    "near-ties of more tokens": verdict_of(num_near_ties=2**32 - 1),
    "cached tokens that there are not": verdict_of(num_cached_tokens=2**32 - 1),
    "log-probabilities that nobody requested": verdict_of(logprobs=LogprobsPart([TokenLogprob(1, -1.0)])),
    "details that nobody requested": verdict_of(logprobs=LogprobsPart(draft=[-1.0])),
}


@pytest.mark.parametrize("name", WRONG_VERDICTS)
def test_verifier_whose_verdict_is_not_of_what_was_requested_is_lost(name: str) -> None:
    """Nothing of it is believed, counted or shown."""
    first, second = targets = some_targets(accepts=[2] * 20)
    drafter = FakeDrafter(first, second)
    first.alter = lambda verdict: WRONG_VERDICTS[name](verdict) if len(first.verdicts) == 3 else verdict
    loop = make_loop(targets, drafter, LIMITS)
    result = run(collect(loop))
    result.assert_whole()
    assert (result.statistics.num_verifiers_lost, result.statistics.num_drafters_lost) == (1, 0)
    assert len(second.attempts) == 1
    assert len(result.statistics.num_accepted_tokens_per_pos) <= 4


def test_plain_run_does_not_grow_while_it_runs() -> None:
    first, second = targets = some_targets()
    first.alter = lambda verdict: replace(verdict, plain_rounds_left=4) if len(first.verdicts) == 1 else verdict
    assert whole_story(targets, None, LIMITS).statistics.num_verifiers_lost == 1
    assert len(second.attempts) == 1


@pytest.mark.parametrize("retry_after_s", [1e9, math.inf])
def test_verifier_does_not_say_how_long_a_session_waits_for_room(retry_after_s: float) -> None:
    first, second = targets = some_targets()
    lost_after(first, 1)
    second.open_error = NoRoomError("full", retry_after_s)
    limits = replace(LIMITS, failover_timeout_s=60.0)
    _, _, waited_s = interrupted(make_loop(targets, None, limits))
    assert 60.0 <= waited_s <= 60.0 + LONGEST_NAMED_PAUSE_S
    assert len(second.attempts) >= 60.0 / LONGEST_NAMED_PAUSE_S


@in_virtual_time
async def test_peer_that_sends_unrequested_events_is_refused_and_no_other() -> None:
    """A loss is never refused: the session would wait for a peer that is gone."""
    queue = EventQueue()
    with patch.object(event_queue, "MAX_UNREAD_EVENTS", 100), patch.object(event_queue, "MAX_UNREAD_OF_DRAFTER", 10):
        verifier, drafter = TaggedInbox(queue, epoch=1), TaggedInbox(queue, epoch=1, permit_number=0)
        for inbox, most in ((drafter, 10), (verifier, 100)):
            for _ in range(most):
                inbox.put_nowait(SENT)
            with pytest.raises(ProtocolViolationError, match="more events"):
                inbox.put_nowait(SENT)
        assert (queue.num_unread(1, 0), queue.num_unread(1, None)) == (10, 100)
        for _ in range(11):  # all of the drafter's and one of the verifier's are read
            await queue.get()
        for inbox, most in ((drafter, 10), (verifier, 1)):
            for _ in range(most):
                inbox.put_nowait(SENT)
            with pytest.raises(ProtocolViolationError, match="more events"):
                inbox.put_nowait(SENT)
        drafter.put_nowait(DrafterLost(GONE))
        verifier.put_nowait(TargetLost(GONE))
    assert (queue.num_unread(1, 0), queue.num_unread(1, None)) == (11, 101)


@in_virtual_time
async def test_events_of_an_earlier_epoch_take_no_room_in_a_later_one() -> None:
    queue = EventQueue()
    for epoch in range(3):
        inbox = TaggedInbox(queue, epoch)
        for _ in range(5):
            inbox.put_nowait(SENT)
        assert [queue.num_unread(before, None) for before in range(epoch)] == [0] * epoch
    TaggedInbox(queue, 1).put_nowait(SENT)  # of a peer that was dropped: it takes nothing from later ones
    assert [(await queue.get()).epoch for _ in range(5)] == [2] * 5
