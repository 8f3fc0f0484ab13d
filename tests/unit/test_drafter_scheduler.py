"""The drafter's scheduler: who gets in, which calibrations count, what goes into a step, and what a step means."""

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

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
    fail,
    next_step,
)
from session_specs import changed, draft_spec

from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftSession, Step, StepItem, StepResult
from draftwire.errors import ProtocolViolationError, UnavailableError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftSessionSpec,
    Fence,
    Permit,
    SendDrafted,
)
from draftwire.requests.parameters import SamplingParams
from draftwire_drafter.scheduler import Scheduler

PERMIT = Permit(5, bytes(range(16)))


def make_scheduler(
    max_sessions: int = 4,
    context_length: int = CONTEXT_LENGTH,
    kv_cache_tokens: int = 100_000,
    budget: int = 1000,
) -> Scheduler:
    room, pacer = Room(max_sessions, kv_cache_tokens), FixedPacer(tokens=budget)
    return Scheduler(context_length=context_length, max_draft_tokens=5, room=room, pacer=pacer)


def make_spec(session_id: int = 1, **changes: Any) -> DraftSessionSpec:
    spec = draft_spec(
        session_id=session_id,
        epoch=0,
        choice=0,
        token_ids=PROMPT,
        prompt_len=len(PROMPT),
        sampling=SamplingParams(),
        rule="block",
        drafting_key=bytes(KEY_BYTES),
        stop_token_ids=frozenset(),
        verifier_address="verifier:1",
        target_vocab_size=100,
        max_draft_tokens=3,
        max_len=CONTEXT_LENGTH,
        permit=PERMIT,
    )
    return changed(spec, **changes)


def long_spec(session_id: int, prompt_len: int, **changes: Any) -> DraftSessionSpec:
    """A session with a prompt of any length."""
    given = {"token_ids": [1] * prompt_len, "prompt_len": prompt_len, "max_len": prompt_len + 30}
    return make_spec(session_id, **(given | changes))


def make_calibration(
    known: list[int], new: list[int], round_number: int = 1, session_id: int = 1, **changes: Any
) -> Calibration:
    """Builds the message of an honest gateway, from the ids alone."""
    committed = known + new
    fence = Fence(session_id, 0, round_number, len(committed), CommittedTokens(committed).hash)
    return replace(Calibration(fence, len(known), new, num_draft_tokens=2), **changes)


def with_fence(calibration: Calibration, **changes: int) -> Calibration:
    return replace(calibration, fence=replace(calibration.fence, **changes))


@dataclass(slots=True)
class Engine:
    """Plays the engine: is told what was committed, reads what a step allows, and drafts where all is read."""

    reused: int = 0
    """Tokens of every prompt that need not be read."""
    sequences: list[list[Any]] = field(default_factory=list)
    """For each session that was seen: it, what is committed as far as told, and how much of that is read."""

    def run(self, step: Step) -> StepResult:
        blocks: list[DraftBlock | None] = []
        num_unread: list[int] = []
        num_read = 0
        for item in step.items:
            sequence = self._sequence_of(item)
            assert item.base_len == len(sequence[1]), "a session is told what it does not know yet, and nothing twice"
            sequence[1] = sequence[1] + item.token_ids
            if item.calibration is not None:  # the last token is read again, to draw from its logits
                assert sequence[1] == item.session.committed.ids[: item.calibration.fence.prefix_len]
                sequence[2] = min(sequence[2], len(sequence[1]) - 1)
            unread = len(sequence[1]) - sequence[2]
            taken = unread if item.max_read is None else min(unread, item.max_read)
            assert taken >= 1, "a session that takes part gets on"
            sequence[2] += taken
            num_read += taken
            num_unread.append(unread - taken)
            calibration = item.calibration if taken == unread else None
            blocks.append(self._block(calibration) if calibration else None)
        return StepResult(blocks, num_unread, [self.reused] * len(step.items), num_read, calibration_s=0.01)

    def _block(self, calibration: Calibration) -> DraftBlock:
        tokens = [7] * calibration.num_draft_tokens
        return DraftBlock(calibration.fence, tokens, DraftDistributions(Encoding.ONE_HOT, 100))

    def _sequence_of(self, item: StepItem) -> list[Any]:
        for sequence in self.sequences:
            if sequence[0] is item.session:
                return sequence
        self.sequences.append([item.session, list(item.session.spec.token_ids), self.reused])
        return self.sequences[-1]


def ask(scheduler: Scheduler, session: DraftSession) -> None:
    """Asks a session for another round, after one more token."""
    calibration = make_calibration(session.committed.ids, [10], session.last_asked + 1, session.spec.session_id)
    scheduler.calibrate(with_fence(calibration, epoch=session.spec.epoch))


DRAFTER = Side(
    make_scheduler=make_scheduler,
    make_spec=make_spec,
    engine=Engine,
    ask=ask,
    done=lambda told: [one.session.spec.session_id for one in told if one.is_opened or one.outcome is not None],
    timed=lambda result, seconds: replace(result, calibration_s=seconds),
    out_of_range=[{"max_draft_tokens": 0}, {"target_vocab_size": 0}],
    at_the_edge=[{"max_draft_tokens": 1}, {"target_vocab_size": 1}],
)


class TestDrafterScheduler(SchedulerContract):
    side = DRAFTER


VIOLATIONS = [
    pytest.param(make_calibration([*PROMPT, 9], [10]), id="leaves_a_gap"),
    pytest.param(make_calibration(PROMPT[:3], [4, 10]), id="overlaps"),
    pytest.param(make_calibration(PROMPT, [10], base_len=3), id="base_before_what_is_known"),
    pytest.param(make_calibration(PROMPT, [10], base_len=5), id="base_after_what_is_known"),
    pytest.param(with_fence(make_calibration(PROMPT, [10]), prefix_hash=1), id="other_hash"),
    pytest.param(make_calibration([7, *PROMPT[1:]], [10]), id="other_prefix"),
    pytest.param(with_fence(make_calibration(PROMPT, [10]), prefix_len=6), id="other_length"),
    pytest.param(replace(make_calibration(PROMPT, [10]), token_ids=[10, 11]), id="more_tokens_than_fenced"),
    pytest.param(replace(make_calibration(PROMPT, [10]), token_ids=[11]), id="other_tokens_than_fenced"),
    pytest.param(make_calibration(PROMPT, [10], num_draft_tokens=0), id="no_draft_tokens"),
    pytest.param(make_calibration(PROMPT, [10], num_draft_tokens=4), id="too_many_draft_tokens"),
    pytest.param(make_calibration(PROMPT, [10] * 7, num_draft_tokens=2), id="beyond_max_len"),
]


@pytest.mark.parametrize("calibration", VIOLATIONS)
def test_calibration_that_does_not_continue_its_session_ends_only_that(
    calibration: Calibration,
) -> None:
    """The core closes a session whose calibration raised."""
    scheduler, engine = make_scheduler(), Engine()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id), lease_id=0)
    DRAFTER.run_steps(scheduler, engine=engine)
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(calibration)
    assert scheduler.next_step() is None
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    other = scheduler.sessions[2, 0]
    scheduler.close(1, 0)
    assert DRAFTER.run_steps(scheduler, engine=engine) == [[2]]
    assert other.committed.ids == [*PROMPT, 20]


def test_calibration_before_the_prompt_is_read_does_not_mislead_the_pacer() -> None:
    """Its tokens are unread, too: the session seems to have more to read after the step than before."""
    scheduler, engine = make_scheduler(context_length=100, budget=4), Engine()
    session = scheduler.open(long_spec(1, 8), lease_id=0)
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10] * 20))
    while DRAFTER.run_steps(scheduler, 1, engine):
        assert scheduler.pacer.alone.seconds_per_token is not None
        assert scheduler.pacer.alone.seconds_per_token > 0.0


def test_tokens_committed_during_an_unlimited_step_were_not_read_in_it() -> None:
    """More than a round commits, so that the next step reads them in parts."""
    scheduler, engine = make_scheduler(context_length=100, budget=4), Engine()
    session = scheduler.open(make_spec(max_len=60), lease_id=0)
    DRAFTER.run_steps(scheduler, engine=engine)
    ask(scheduler, session)
    step = next_step(scheduler)
    assert [item.max_read for item in step.items] == [None]
    scheduler.calibrate(make_calibration(session.committed.ids, [10] * 9, round_number=5))
    result = engine.run(step)
    with patch.object(FixedPacer, "learn") as learn:
        scheduler.complete(step, result)
    learn.assert_called_once_with(0, result.num_read, result.calibration_s)
    assert [item.max_read for item in next_step(scheduler).items] == [4]


# All of it in any order


@dataclass(slots=True)
class Known:
    """What an open session should be."""

    last_asked: int = -1
    calibration: Calibration | None = None
    """Whose block was not drafted yet."""
    is_reading: bool = True
    has_shown_permit: bool = False
    cut_at: int | None = None


class DrafterInAnyOrder(AnyOrder):
    """Messages are calibrations and wishes for the block under way; steps end with blocks or errors."""

    side = DRAFTER

    @rule(key=AnyOrder.KEYS, prompt_len=AnyOrder.PROMPTS, room=AnyOrder.ROOMS)
    def open(self, key: tuple[int, int], prompt_len: int, room: int) -> None:
        permit = replace(PERMIT, number=sum(key))
        spec = long_spec(key[0], prompt_len, max_len=prompt_len + room, epoch=key[1], permit=permit)
        self.open_session(key, spec, Known())

    @rule(
        who=AnyOrder.WHO,
        later=st.sampled_from([1, 1, 1, 3, 0, 0, -1]),
        num_new=st.integers(0, 6),
        num_draft_tokens=st.integers(1, 3),
        right_prefix=st.sampled_from([True, True, True, True, False]),
    )
    def calibrate(self, who: int, later: int, num_new: int, num_draft_tokens: int, right_prefix: bool) -> None:
        key = self.key_of(who)
        committed, known = self.expected.get(key, [1]), self.known.get(key, Known(0))
        last = known.last_asked
        number = max(0, last + later)
        new = [10 + num_new * key[0]] * num_new
        calibration = make_calibration(committed, new, number, key[0], num_draft_tokens=num_draft_tokens)
        calibration = with_fence(calibration, epoch=key[1])
        if not right_prefix:
            calibration = with_fence(calibration, prefix_hash=0)
        if key not in self.known or number <= last:
            self.dropped["stale" if key in self.known else "unknown_session"] += 1
            self.scheduler.calibrate(calibration)
        elif not right_prefix or len(committed + new) + num_draft_tokens > self.scheduler.sessions[key].spec.max_len:
            with pytest.raises(ProtocolViolationError):
                self.scheduler.calibrate(calibration)
            self.close(key)  # as the core does
        else:
            self.scheduler.calibrate(calibration)
            self.expected[key] = committed + new
            known.last_asked, known.calibration = number, calibration

    @rule(who=AnyOrder.WHO, off=st.sampled_from([0, 0, 0, -1, 1]))
    def send_drafted(self, who: int, off: int) -> None:
        key = self.key_of(who)
        known = self.known.get(key, Known())
        wish = known.last_asked + off
        was_sent = self.scheduler.send_drafted(SendDrafted(*key, wish))
        assert was_sent == (key in self.known and known.calibration is None and off == 0)
        if known.calibration is not None and off == 0:
            known.cut_at = wish
        else:
            self.dropped["stale" if key in self.known else "unknown_session"] += 1

    @precondition(lambda self: self.step is not None)
    @rule(failing=st.integers(0, 9))
    def finish_step(self, failing: int) -> None:
        items = {id(item.session): item for item in self.step.items}
        assert sum(item.max_read or 0 for item in items.values()) <= 3
        result = fail(self.engine.run(self.step), failing, UnavailableError("no finite logits"))
        completed = self.scheduler.complete(self.step, result)
        self.step = None
        still_open = [item for item in items.values() if self.scheduler.sessions.get(item.session.key) is item.session]
        assert [each.session for each in completed] == [item.session for item in still_open]
        for each in completed:
            known, item = self.known[each.session.key], items[id(each.session)]
            if isinstance(each.outcome, UnavailableError):
                assert each.session.has_shown_permit == known.has_shown_permit
                self.close(each.session.key)  # as the core does
                continue
            if each.outcome is None:  # nothing was wanted, or many new tokens are read in parts
                assert item.calibration is None or item.max_read is not None
            else:
                assert not known.is_reading, "a prompt is read before anything is drafted"
                assert item.calibration is not None
                assert each.outcome.fence == item.calibration.fence
                assert each.outcome.permit == (None if known.has_shown_permit else each.session.spec.permit)
                known.has_shown_permit = True
                assert each.is_flushed == (known.cut_at == each.outcome.fence.round)
                if known.calibration is item.calibration:
                    known.calibration = None
            assert known.is_reading or not each.is_opened
            known.is_reading = known.is_reading and not each.is_opened

    def finish(self) -> None:
        self.finish_step(9)

    @invariant()
    def sessions_are_as_their_messages_made_them(self) -> None:
        for key, session in self.scheduler.sessions.items():
            assert Known(*(getattr(session, name) for name in Known.__slots__)) == self.known[key]
            assert session.queued == (session.is_reading or session.calibration is not None)


TestAnyOrder = DrafterInAnyOrder.TestCase
TestAnyOrder.settings = UNSHRUNK
