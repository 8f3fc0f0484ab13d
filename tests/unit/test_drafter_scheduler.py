"""The drafter's scheduler: who gets in, which calibrations count, what goes into a step, and what a step means."""

import itertools
from collections.abc import Iterator
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
    fail,
    ids_of,
    next_step,
)

from draftwire.encoding import DraftDistributions
from draftwire.errors import ProtocolViolationError, UnavailableError
from draftwire.keys import KEY_BYTES
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import Calibration, CommittedTokens, DraftBlock, DraftSessionSpec, Fence, Permit, SendDrafted
from draftwire.services.admission import Room
from draftwire.services.drafter.scheduler import Completed, DraftSession, Scheduler, Step, StepItem, StepResult

PERMIT = Permit(5, bytes(range(16)))


def make_scheduler(
    max_sessions: int = 4,
    context_length: int = CONTEXT_LENGTH,
    kv_cache_tokens: int = 100_000,
    budget: int = 1000,
) -> Scheduler:
    room, pacer = Room(max_sessions, kv_cache_tokens), FixedPacer(tokens=budget)
    return Scheduler(context_length, max_draft_tokens=5, room=room, pacer=pacer)


def make_spec(session_id: int = 1, **changes: Any) -> DraftSessionSpec:
    spec = DraftSessionSpec(
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
    return replace(spec, **changes)


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
        return DraftBlock(calibration.fence, tokens, DraftDistributions(Encoding.ONE_HOT, 100), calibration.attempt)

    def _sequence_of(self, item: StepItem) -> list[Any]:
        for sequence in self.sequences:
            if sequence[0] is item.session:
                return sequence
        self.sequences.append([item.session, list(item.session.spec.token_ids), self.reused])
        return self.sequences[-1]


def run_steps(scheduler: Scheduler, engine: Engine, limit: int = 99) -> Iterator[list[Completed]]:
    """Runs at most so many steps, all to their end, and yields what each of them means."""
    for _ in range(limit):
        if (step := scheduler.next_step()) is None:
            return
        yield scheduler.complete(step, engine.run(step))


def blocks(scheduler: Scheduler, engine: Engine) -> list[DraftBlock]:
    """Runs all steps and returns the blocks that are to be sent."""
    outcomes = [completed.outcome for step in run_steps(scheduler, engine) for completed in step]
    return [outcome for outcome in outcomes if isinstance(outcome, DraftBlock)]


def drafted(scheduler: Scheduler, engine: Engine) -> list[tuple[int, int]]:
    """Runs all steps and returns the rounds and attempts of the blocks that are to be sent."""
    return [(block.fence.round, block.attempt) for block in blocks(scheduler, engine)]


def opened_session(scheduler: Scheduler | None = None, **changes: Any) -> tuple[Scheduler, Engine, DraftSession]:
    """Returns a scheduler with session 1 open and its prompt read."""
    scheduler, engine = scheduler or make_scheduler(), Engine()
    session = scheduler.open(make_spec(**changes), lease_id=0)
    assert session.committed.ids == session.spec.token_ids
    assert list(run_steps(scheduler, engine)) == [[Completed(session, None, is_opened=True)]]
    return scheduler, engine, session


def ask(scheduler: Scheduler, session: DraftSession) -> None:
    """Asks a session for another round, after one more token."""
    calibration = make_calibration(session.committed.ids, [10], session.last_asked[0] + 1, session.spec.session_id)
    scheduler.calibrate(with_fence(calibration, epoch=session.spec.epoch))


DRAFTER = Side(
    make_scheduler=make_scheduler,
    make_spec=make_spec,
    engine=Engine,
    ask=ask,
    messages=(
        lambda scheduler, fence: scheduler.calibrate(Calibration(fence, fence.prefix_len, [], num_draft_tokens=2)),
        lambda scheduler, fence: scheduler.send_drafted(SendDrafted(fence.session_id, fence.epoch, fence.round, 0)),
    ),
    done=lambda told: [one.session.spec.session_id for one in told if one.is_opened or one.outcome is not None],
    timed=lambda result, seconds: replace(result, calibration_s=seconds),
    out_of_range=[{"max_draft_tokens": 0}, {"target_vocab_size": 0}],
    at_the_edge=[{"max_draft_tokens": 1}, {"target_vocab_size": 1}],
)


class TestDrafterScheduler(SchedulerContract):
    side = DRAFTER


# Permits


def test_first_block_of_a_session_shows_its_permit_and_no_other_does() -> None:
    scheduler, engine, first = opened_session()
    second = scheduler.open(make_spec(2, permit=replace(PERMIT, number=6)), lease_id=0)
    list(run_steps(scheduler, engine))
    for number in range(3):
        ask(scheduler, first)
        ask(scheduler, second)
        shown = [block.permit for block in blocks(scheduler, engine)]
        assert shown == ([None, None] if number else [PERMIT, replace(PERMIT, number=6)])
    scheduler.close(1, 0)
    again = scheduler.open(make_spec(permit=replace(PERMIT, number=7)), lease_id=0)
    list(run_steps(scheduler, engine))
    ask(scheduler, again)
    assert [block.permit for block in blocks(scheduler, engine)] == [replace(PERMIT, number=7)]


def test_block_that_fails_or_is_only_read_for_shows_nothing() -> None:
    scheduler, engine, session = opened_session()
    assert not session.has_shown_permit
    scheduler.calibrate(make_calibration(PROMPT, []))
    step = next_step(scheduler)
    scheduler.complete(step, fail(engine.run(step), 0, UnavailableError("no finite logits")))
    assert not session.has_shown_permit


# Blocks that are to be sent as they are


def test_wish_for_the_block_under_way_is_noted_while_it_waits_and_while_it_is_drawn() -> None:
    for is_drawn in (False, True):
        scheduler, engine, session = opened_session()
        scheduler.calibrate(make_calibration(PROMPT, [], round_number=3, attempt=2))
        step = next_step(scheduler) if is_drawn else None
        scheduler.send_drafted(SendDrafted(1, 0, 3, 2))
        assert session.cut_at == (3, 2)
        step = step or next_step(scheduler)
        (completed,) = scheduler.complete(step, engine.run(step))
        assert isinstance(completed.outcome, DraftBlock)
        assert not scheduler.dropped


def test_wish_for_another_block_is_dropped_and_counted() -> None:
    scheduler, _, session = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=3, attempt=1))
    for count, wish in enumerate([(2, 1), (3, 0), (3, 2), (4, 1)], 1):
        scheduler.send_drafted(SendDrafted(1, 0, *wish))
        assert session.cut_at is None
        assert scheduler.dropped == {"stale": count}


def test_wish_for_a_block_that_was_sent_or_superseded_is_dropped() -> None:
    scheduler, engine, session = opened_session()
    scheduler.send_drafted(SendDrafted(1, 0, -1, 0))  # nothing was asked for yet
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=1))
    assert drafted(scheduler, engine) == [(1, 0)]
    scheduler.send_drafted(SendDrafted(1, 0, 1, 0))
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=2))
    step = next_step(scheduler)
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=4))
    scheduler.send_drafted(SendDrafted(1, 0, 2, 0))
    scheduler.complete(step, engine.run(step))
    assert session.cut_at is None
    assert scheduler.dropped == {"stale": 3}
    scheduler.send_drafted(SendDrafted(1, 0, 4, 0))
    assert session.cut_at == (4, 0)


# Calibrations


def test_calibrations_continue_each_other_and_each_goes_into_the_next_step() -> None:
    scheduler, engine, session = opened_session()
    text, told = PROMPT, []
    for new, number in (([], 0), ([10, 11], 1), ([12], 2), ([13], 9)):  # plain rounds between
        calibration = make_calibration(text, new, number)
        scheduler.calibrate(calibration)
        step = next_step(scheduler)
        assert list(step.items) == [StepItem(session, len(text), new, calibration, max_read=None)]
        assert scheduler.next_step() is None
        told += scheduler.complete(step, engine.run(step))
        text = text + new
        assert session.committed.ids == text
    fences = [one.outcome.fence.round for one in told if isinstance(one.outcome, DraftBlock) and not one.is_opened]
    assert fences == [0, 1, 2, 9]
    assert not scheduler.dropped


def test_calibration_of_a_round_not_after_the_last_is_dropped_and_another_attempt_at_it_is_drafted() -> None:
    scheduler, engine, session = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=2))
    rounds = drafted(scheduler, engine)
    for round_number in (0, 1, 2):
        scheduler.calibrate(make_calibration(PROMPT, [10], round_number=round_number))
    assert scheduler.dropped == {"stale": 3}
    assert scheduler.next_step() is None
    again = make_calibration([*PROMPT, 10], [], round_number=2, attempt=1)
    scheduler.calibrate(again)
    scheduler.calibrate(again)
    assert rounds + drafted(scheduler, engine) == [(2, 0), (2, 1)]
    assert scheduler.dropped == {"stale": 4}
    assert session.committed.ids == [*PROMPT, 10]


def test_calibration_takes_the_place_of_an_older_one_that_waits() -> None:
    """Nobody wants the older block any more; its tokens are committed all the same."""
    scheduler, engine, _ = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10, 11], round_number=1))
    newer = make_calibration([*PROMPT, 10, 11], [12], round_number=4)
    scheduler.calibrate(newer)
    step = next_step(scheduler)
    assert [(item.calibration, item.token_ids) for item in step.items] == [(newer, [10, 11, 12])]
    scheduler.complete(step, engine.run(step))
    assert scheduler.next_step() is None


def test_calibration_that_comes_while_the_session_drafts_is_drafted_next() -> None:
    scheduler, engine, session = opened_session()
    ask(scheduler, session)
    step = next_step(scheduler)
    ask(scheduler, session)
    ask(scheduler, session)
    assert scheduler.next_step() is None  # a session takes part in one step at a time
    (completed,) = scheduler.complete(step, engine.run(step))
    assert isinstance(completed.outcome, DraftBlock)
    assert completed.outcome.fence.round == 0
    assert drafted(scheduler, engine) == [(2, 0)]


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
def test_calibration_that_does_not_continue_the_session_is_a_violation_which_ends_only_its_session(
    calibration: Calibration,
) -> None:
    """The core closes a session whose calibration raised."""
    scheduler, engine, _ = opened_session()
    other = scheduler.open(make_spec(2), lease_id=0)
    list(run_steps(scheduler, engine))
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(calibration)
    assert scheduler.next_step() is None
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    scheduler.close(1, 0)
    assert drafted(scheduler, engine) == [(1, 0)]
    assert other.committed.ids == [*PROMPT, 20]


def test_draft_may_have_any_length_up_to_the_sessions_limit_and_fill_max_len_to_the_last_token() -> None:
    for max_len, num_draft_tokens in ((8, 1), (8, 2), (8, 3), (CONTEXT_LENGTH, 2)):
        scheduler, engine, _ = opened_session(max_len=max_len)
        new = [10] * (max_len - len(PROMPT) - num_draft_tokens)
        scheduler.calibrate(make_calibration(PROMPT, new, num_draft_tokens=num_draft_tokens))
        assert drafted(scheduler, engine) == [(1, 0)]
        more = make_calibration([*PROMPT, *new], [10], round_number=2, num_draft_tokens=num_draft_tokens)
        with pytest.raises(ProtocolViolationError):
            scheduler.calibrate(more)


# Steps


def test_whatever_is_ready_goes_into_one_step() -> None:
    scheduler, engine, first = opened_session()
    second = scheduler.open(make_spec(2), lease_id=0)
    list(run_steps(scheduler, engine))
    for session in (first, second):
        ask(scheduler, session)
    scheduler.open(make_spec(3), lease_id=0)
    step = next_step(scheduler)
    assert sorted(ids_of(step)) == [1, 2, 3]
    assert scheduler.next_step() is None
    told = {each.session.spec.session_id: each for each in scheduler.complete(step, engine.run(step))}
    assert [(told[each].outcome is None, told[each].is_opened) for each in (1, 2, 3)] == [(False, False)] * 2 + [
        (True, True)
    ]


def test_calibration_that_comes_before_the_prompt_is_read_teaches_the_pacer_no_nonsense() -> None:
    """Its tokens are unread, too: the session seems to have more to read after the step than before."""
    scheduler, engine = make_scheduler(context_length=100, budget=4), Engine()
    session = scheduler.open(long_spec(1, 8), lease_id=0)
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10] * 20))
    for _ in run_steps(scheduler, engine):
        assert scheduler.pacer.alone.seconds_per_token is not None
        assert scheduler.pacer.alone.seconds_per_token > 0.0


def test_much_that_was_committed_meanwhile_is_read_in_parts_too() -> None:
    for in_step in (False, True):
        scheduler, engine, session = opened_session(make_scheduler(context_length=1000, budget=30), max_len=1000)
        if in_step:
            ask(scheduler, session)
        step = next_step(scheduler) if in_step else None
        scheduler.calibrate(make_calibration(session.committed.ids, [11] * 100, round_number=99))
        if step is not None:
            scheduler.complete(step, engine.run(step))
        parts, told = [], []
        while (step := scheduler.next_step()) is not None:
            parts += [item.max_read for item in step.items]
            told += scheduler.complete(step, engine.run(step))
        assert parts == [30, 30, 30, 10]
        assert not any(done.is_opened for done in told), "its prompt was read before"
        assert [done.outcome.fence.round for done in told if isinstance(done.outcome, DraftBlock)] == [99]
        assert session.calibration is None


def test_calibration_that_comes_while_the_prompt_is_read_is_drafted_after_it() -> None:
    for after_steps, in_step in itertools.product((0, 1, 2), (False, True)):
        scheduler, engine = make_scheduler(context_length=100, budget=10), Engine()
        session = scheduler.open(long_spec(1, 25), lease_id=0)
        told = list(itertools.chain(*run_steps(scheduler, engine, limit=after_steps)))
        step = next_step(scheduler) if in_step else None
        scheduler.calibrate(make_calibration(session.spec.token_ids, [10, 11]))
        assert session.is_reading
        told += scheduler.complete(step, engine.run(step)) if step else []
        told += itertools.chain(*run_steps(scheduler, engine))
        assert [(done.is_opened, done.outcome is None) for done in told][-2:] == [(True, True), (False, False)]
        assert len(told) == 4, "three parts and a block"
        assert engine.sequences[0][1] == session.committed.ids


# All of it in any order


class DrafterInAnyOrder(AnyOrder):
    """Messages are calibrations; steps end with blocks."""

    side = DRAFTER

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[tuple[int, int], tuple[int, int]] = {}
        """Round and attempt that each open session was last asked for."""
        self.opened: set[tuple[int, int]] = set()
        """Sessions that were reported to be open."""

    @rule(key=AnyOrder.KEYS, prompt_len=st.integers(1, 20), room=st.integers(1, 40))
    def open(self, key: tuple[int, int], prompt_len: int, room: int) -> None:
        if self.open_session(key, long_spec(key[0], prompt_len, max_len=prompt_len + room, epoch=key[1])):
            self.asked[key] = (-1, 0)

    @rule(
        key=AnyOrder.KEYS,
        later=st.sampled_from([(1, 0), (1, 0), (1, 0), (3, 0), (0, 1), (0, 0), (-1, 5)]),
        num_new=st.integers(0, 3),
        num_draft_tokens=st.integers(1, 3),
        right_prefix=st.sampled_from([True, True, True, True, False]),
    )
    def calibrate(
        self, key: tuple[int, int], later: tuple[int, int], num_new: int, num_draft_tokens: int, right_prefix: bool
    ) -> None:
        known, last = self.expected.get(key, [1]), self.asked.get(key, (0, 0))
        number, attempt = max(0, last[0] + later[0]), later[1] + (last[1] if later[0] == 0 else 0)
        new = [10 + num_new * key[0]] * num_new
        calibration = make_calibration(known, new, number, key[0], num_draft_tokens=num_draft_tokens, attempt=attempt)
        calibration = with_fence(calibration, epoch=key[1])
        if not right_prefix:
            calibration = with_fence(calibration, prefix_hash=0)
        session = self.scheduler.sessions.get(key)
        if session is None or (number, attempt) <= last:
            before = self.scheduler.dropped.total()
            self.scheduler.calibrate(calibration)
            assert self.scheduler.dropped.total() == before + 1
        elif not right_prefix or len(known) + num_new + num_draft_tokens > session.spec.max_len:
            with pytest.raises(ProtocolViolationError):
                self.scheduler.calibrate(calibration)
            self.close(key)  # as the core does
        else:
            self.scheduler.calibrate(calibration)
            self.expected[key], self.asked[key] = known + new, (number, attempt)
            assert session.calibration is calibration

    @precondition(lambda self: self.step is not None)
    @rule()
    def finish(self) -> None:
        items = {id(item.session): item for item in self.step.items}
        assert sum(item.max_read or 0 for item in items.values()) <= 3
        completed = self.scheduler.complete(self.step, self.engine.run(self.step))
        self.step = None
        still_open = [item for item in items.values() if self.scheduler.sessions.get(item.session.key) is item.session]
        assert [each.session.key for each in completed] == [item.session.key for item in still_open]
        for each in completed:
            calibration = items[id(each.session)].calibration
            if each.outcome is None:  # nothing was wanted, or many new tokens are read in parts
                assert calibration is None or items[id(each.session)].max_read is not None
            else:
                assert calibration is not None
                assert (each.outcome.fence, each.outcome.attempt) == (calibration.fence, calibration.attempt)
                assert each.session.key in self.opened, "a prompt is read before anything is drafted"
            if each.is_opened:
                assert each.session.key not in self.opened
                self.opened.add(each.session.key)

    def forget(self, key: tuple[int, int]) -> None:
        self.asked.pop(key, None)
        self.opened.discard(key)

    def is_finished(self) -> bool:
        return super().is_finished() and self.opened == set(self.scheduler.sessions)

    @invariant()
    def sessions_are_as_their_messages_made_them(self) -> None:
        for key, session in self.scheduler.sessions.items():
            assert session.queued == (session.is_reading or session.calibration is not None)
            assert session.is_reading == (key not in self.opened)


TestAnyOrder = DrafterInAnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
