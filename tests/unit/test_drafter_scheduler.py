"""The drafter's scheduler: who gets in, which calibrations count, what goes into a step, and what a step means."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwire.encoding import DraftDistributions
from draftwire.errors import InvalidRequestError, NoRoomError, ProtocolViolationError, UnavailableError
from draftwire.keys import KEY_BYTES
from draftwire.models.kv_cache import blocks_for
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import Calibration, CommittedTokens, DraftBlock, DraftSessionSpec, Fence, Permit, SendDrafted
from draftwire.services.admission import ClosedEarly, Room
from draftwire.services.drafter.scheduler import Completed, DraftSession, Scheduler, Step, StepItem, StepResult
from draftwire.services.prefill import ChunkCost, PrefillPacer

CONTEXT_LENGTH = 12
PROMPT = [1, 2, 3, 4]
PERMIT = Permit(5, bytes(range(16)))


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


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def ids_of(step: Step) -> list[int]:
    return [item.session.spec.session_id for item in step.items]


def run_steps(scheduler: Scheduler, engine: Engine, limit: int = 99) -> Iterator[list[Completed]]:
    """Runs at most so many steps, all to their end, and yields what each of them means."""
    for _ in range(limit):
        step = scheduler.next_step()
        if step is None:
            return
        yield scheduler.complete(step, engine.run(step))


def drafted(scheduler: Scheduler, engine: Engine) -> list[tuple[int, int]]:
    """Runs all steps and returns the rounds and attempts of the blocks that are to be sent."""
    blocks = [completed.outcome for step in run_steps(scheduler, engine) for completed in step]
    return [(block.fence.round, block.attempt) for block in blocks if block is not None]


def opened_session(scheduler: Scheduler | None = None, **changes: Any) -> tuple[Scheduler, Engine, DraftSession]:
    """Returns a scheduler with session 1 open and its prompt read."""
    scheduler, engine = scheduler or make_scheduler(), Engine()
    session = scheduler.open(make_spec(**changes), lease_id=0)
    assert list(run_steps(scheduler, engine)) == [[Completed(session, None, is_opened=True)]]
    return scheduler, engine, session


# Admission


def test_opening_schedules_the_prompt() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    (item,) = next_step(scheduler).items
    assert item.session is session
    assert item.calibration is None
    assert scheduler.next_step() is None
    assert session.committed.ids == PROMPT


def test_session_beyond_the_limit_is_refused_until_another_closes() -> None:
    scheduler = make_scheduler(max_sessions=2)
    scheduler.open(make_spec(1), lease_id=0)
    scheduler.open(make_spec(2), lease_id=0)
    with pytest.raises(NoRoomError):
        scheduler.open(make_spec(3), lease_id=0)
    assert set(scheduler.sessions) == {(1, 0), (2, 0)}
    assert ids_of(next_step(scheduler)) == [1, 2]
    scheduler.close(1, 0)
    scheduler.open(make_spec(3), lease_id=0)
    assert set(scheduler.sessions) == {(2, 0), (3, 0)}


def test_session_reserves_room_for_its_max_len_until_it_closes() -> None:
    scheduler = make_scheduler(context_length=1000, kv_cache_tokens=160)
    scheduler.open(make_spec(1, max_len=100), lease_id=0)
    with pytest.raises(NoRoomError):
        scheduler.open(make_spec(2, max_len=49), lease_id=0)
    assert set(scheduler.sessions) == {(1, 0)}
    assert ids_of(next_step(scheduler)) == [1]
    scheduler.open(make_spec(3, max_len=48), lease_id=0)
    assert scheduler.room.num_free_blocks == 0
    scheduler.close(1, 0)
    scheduler.open(make_spec(2, max_len=49), lease_id=0)
    assert scheduler.room.num_free_blocks == 3


def test_session_that_is_open_cannot_be_opened_again() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    with pytest.raises(InvalidRequestError):
        scheduler.open(make_spec(), lease_id=1)
    assert scheduler.sessions[1, 0] is session
    scheduler.close(1, 0)
    assert scheduler.room.usage == 0.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt_len": 0}, InvalidRequestError),
        ({"prompt_len": len(PROMPT) + 1}, InvalidRequestError),
        ({"rule": "tipical"}, InvalidRequestError),
        ({"token_ids": []}, InvalidRequestError),
        ({"max_draft_tokens": 0}, InvalidRequestError),
        ({"max_draft_tokens": 6}, InvalidRequestError),
        ({"token_ids": [1] * CONTEXT_LENGTH}, InvalidRequestError),
        ({"target_vocab_size": 0}, InvalidRequestError),
        ({"max_len": CONTEXT_LENGTH + 1}, InvalidRequestError),
        ({"max_len": len(PROMPT)}, InvalidRequestError),
        ({"max_len": 0}, InvalidRequestError),
    ],
)
def test_spec_out_of_range_is_refused_and_reserves_nothing(changes: dict[str, Any], error: type[Exception]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(error):
        scheduler.open(make_spec(**changes), lease_id=0)
    assert not scheduler.sessions
    assert scheduler.next_step() is None
    assert scheduler.room.usage == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_draft_tokens": 1},
        {"max_draft_tokens": 5},
        {"token_ids": [1] * (CONTEXT_LENGTH - 1)},
        {"max_len": len(PROMPT) + 1},
        {"max_len": CONTEXT_LENGTH},
    ],
)
def test_spec_at_the_edge_of_its_range_is_admitted(changes: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(**changes), lease_id=0)
    assert len(scheduler.sessions) == 1


def test_sessions_are_found_by_their_lease() -> None:
    scheduler = make_scheduler()
    opened = [scheduler.open(make_spec(session_id), lease_id=session_id % 2) for session_id in (1, 2, 3)]
    assert scheduler.of_lease(1) == [opened[0], opened[2]]
    assert scheduler.of_lease(5) == []


# Permits


def test_first_block_of_a_session_shows_its_permit_and_no_other_does() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.open(make_spec(2, permit=replace(PERMIT, number=6)), lease_id=0)
    list(run_steps(scheduler, engine))
    for number in range(3):
        for session_id in (1, 2):
            committed = [*PROMPT, *range(number)]
            scheduler.calibrate(
                make_calibration(committed[: max(4, 3 + number)], committed[4:][-1:], number, session_id)
            )
        ((first, second),) = run_steps(scheduler, engine)
        assert isinstance(first.outcome, DraftBlock)
        assert isinstance(second.outcome, DraftBlock)
        shown = [first.outcome.permit, second.outcome.permit]
        assert shown == ([None, None] if number else [PERMIT, replace(PERMIT, number=6)])


def test_session_that_is_opened_anew_shows_its_new_permit() -> None:
    scheduler, engine, _ = opened_session()
    for number, permit in ((5, PERMIT), (7, replace(PERMIT, number=7))):
        if number > 5:
            scheduler.close(1, 0)
            scheduler.open(make_spec(permit=permit), lease_id=0)
            list(run_steps(scheduler, engine))
        scheduler.calibrate(make_calibration(PROMPT, [], round_number=number))
        ((completed,),) = run_steps(scheduler, engine)
        assert isinstance(completed.outcome, DraftBlock)
        assert completed.outcome.permit == permit


def test_block_that_fails_or_is_only_read_for_shows_nothing() -> None:
    scheduler, engine, session = opened_session()
    assert not session.has_shown_permit
    scheduler.calibrate(make_calibration(PROMPT, []))
    step = next_step(scheduler)
    failed = replace(engine.run(step), outcomes=[UnavailableError("no finite logits")])
    scheduler.complete(step, failed)
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


@pytest.mark.parametrize(
    "wish",
    [
        SendDrafted(1, 0, 2, 1),
        SendDrafted(1, 0, 3, 0),
        SendDrafted(1, 0, 3, 2),
        SendDrafted(1, 0, 4, 1),
        SendDrafted(1, 1, 3, 1),
        SendDrafted(2, 0, 3, 1),
    ],
)
def test_wish_for_another_block_is_dropped_and_counted(wish: SendDrafted) -> None:
    scheduler, _, session = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=3, attempt=1))
    scheduler.send_drafted(wish)
    assert session.cut_at is None
    is_known = (wish.session_id, wish.epoch) == (1, 0)
    assert scheduler.dropped == {"stale" if is_known else "unknown_session": 1}


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


def test_calibration_commits_its_tokens_and_goes_into_the_next_step() -> None:
    scheduler, engine, session = opened_session()
    calibration = make_calibration(PROMPT, [10, 11])
    scheduler.calibrate(calibration)
    assert session.committed.ids == [*PROMPT, 10, 11]
    step = next_step(scheduler)
    assert list(step.items) == [StepItem(session, len(PROMPT), [10, 11], calibration, max_read=None)]
    assert scheduler.next_step() is None
    (completed,) = scheduler.complete(step, engine.run(step))
    assert completed.outcome is not None
    assert (completed.outcome.fence, completed.is_opened) == (calibration.fence, False)
    assert scheduler.next_step() is None
    assert not scheduler.dropped


def test_calibrations_continue_each_other() -> None:
    scheduler, engine, session = opened_session()
    rounds = []
    for known, new, number in (([], [10, 11], 1), ([10, 11], [12], 2), ([10, 11, 12], [13], 9)):  # plain rounds between
        scheduler.calibrate(make_calibration([*PROMPT, *known], new, round_number=number))
        rounds += drafted(scheduler, engine)
    assert rounds == [(1, 0), (2, 0), (9, 0)]
    assert session.committed.ids == [*PROMPT, 10, 11, 12, 13]


def test_calibration_without_new_tokens_drafts_after_the_prompt() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=0))
    assert drafted(scheduler, engine) == [(0, 0)]


@pytest.mark.parametrize("round_number", [0, 1, 2])
def test_calibration_of_a_round_not_after_the_last_is_dropped_and_counted(round_number: int) -> None:
    scheduler, engine, session = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=2))
    drafted(scheduler, engine)
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=round_number))
    assert scheduler.dropped == {"stale": 1}
    assert scheduler.next_step() is None
    assert session.committed.ids == [*PROMPT, 10]


def test_another_attempt_at_a_round_is_drafted_again() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=2))
    rounds = drafted(scheduler, engine)
    again = make_calibration([*PROMPT, 10], [], round_number=2, attempt=1)
    scheduler.calibrate(again)
    scheduler.calibrate(again)
    assert rounds + drafted(scheduler, engine) == [(2, 0), (2, 1)]
    assert scheduler.dropped == {"stale": 1}


def test_calibration_takes_the_place_of_an_older_one_that_waits() -> None:
    """Nobody wants the older block any more; its tokens are committed all the same."""
    scheduler, engine, _ = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10, 11], round_number=1))
    newer = make_calibration([*PROMPT, 10, 11], [12], round_number=4)
    scheduler.calibrate(newer)
    step = next_step(scheduler)
    (item,) = step.items
    assert item.calibration is newer
    assert item.token_ids == [10, 11, 12]
    scheduler.complete(step, engine.run(step))
    assert scheduler.next_step() is None


def test_calibration_that_comes_while_the_session_drafts_is_drafted_next() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=1))
    step = next_step(scheduler)
    scheduler.calibrate(make_calibration([*PROMPT, 10], [11], round_number=2))
    scheduler.calibrate(make_calibration([*PROMPT, 10, 11], [12], round_number=3))
    assert scheduler.next_step() is None  # a session takes part in one step at a time
    (completed,) = scheduler.complete(step, engine.run(step))
    assert completed.outcome is not None
    assert completed.outcome.fence.round == 1
    assert drafted(scheduler, engine) == [(3, 0)]


@pytest.mark.parametrize("wrong", [{"session_id": 2}, {"epoch": 1}])
def test_calibration_of_an_unknown_session_or_epoch_is_dropped_and_counted(wrong: dict[str, int]) -> None:
    scheduler, _, session = opened_session()
    scheduler.calibrate(with_fence(make_calibration(PROMPT, [10]), **wrong))
    assert scheduler.dropped == {"unknown_session": 1}
    assert scheduler.next_step() is None
    assert session.committed.ids == PROMPT


def test_calibration_of_a_past_epoch_is_dropped_and_counted() -> None:
    scheduler, engine, _ = opened_session(epoch=0)
    scheduler.close(1, 0)
    scheduler.open(make_spec(epoch=1), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    assert scheduler.dropped.total() == 1
    assert drafted(scheduler, engine) == []


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
def test_calibration_that_does_not_continue_the_session_is_a_violation(calibration: Calibration) -> None:
    scheduler, *_ = opened_session()
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(calibration)
    assert scheduler.next_step() is None


@pytest.mark.parametrize("calibration", VIOLATIONS)
def test_violation_ends_only_its_session(calibration: Calibration) -> None:
    """The core closes a session whose calibration raised."""
    scheduler, engine, _ = opened_session()
    other = scheduler.open(make_spec(2), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(calibration)
    scheduler.close(1, 0)
    assert drafted(scheduler, engine) == [(1, 0)]
    assert other.committed.ids == [*PROMPT, 20]


@pytest.mark.parametrize("max_len", [8, CONTEXT_LENGTH])
def test_draft_may_fill_max_len_to_the_last_token(max_len: int) -> None:
    scheduler, engine, _ = opened_session(max_len=max_len)
    new = [10] * (max_len - len(PROMPT) - 2)
    scheduler.calibrate(make_calibration(PROMPT, new, num_draft_tokens=2))
    assert drafted(scheduler, engine) == [(1, 0)]
    more = make_calibration([*PROMPT, *new], [10], round_number=2, num_draft_tokens=2)
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(more)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_number_of_draft_tokens_may_be_anything_up_to_the_sessions_limit(num_draft_tokens: int) -> None:
    scheduler, engine, _ = opened_session(max_draft_tokens=3)
    scheduler.calibrate(make_calibration(PROMPT, [10], num_draft_tokens=num_draft_tokens))
    assert drafted(scheduler, engine) == [(1, 0)]


# Steps of several sessions


def test_whatever_is_ready_goes_into_one_step() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.open(make_spec(2), lease_id=0)
    list(run_steps(scheduler, engine))
    for session_id in (1, 2):
        scheduler.calibrate(make_calibration(PROMPT, [10], session_id=session_id))
    scheduler.open(make_spec(3), lease_id=0)
    step = next_step(scheduler)
    assert sorted(ids_of(step)) == [1, 2, 3]
    assert scheduler.next_step() is None
    done = {each.session.spec.session_id: each for each in scheduler.complete(step, engine.run(step))}
    assert [done[session_id].outcome is None for session_id in (1, 2, 3)] == [False, False, True]
    assert [done[session_id].is_opened for session_id in (1, 2, 3)] == [False, False, True]


def test_work_that_comes_during_a_step_goes_into_the_next_one() -> None:
    scheduler, engine, _ = opened_session()
    scheduler.open(make_spec(2), lease_id=0)
    step = next_step(scheduler)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    scheduler.open(make_spec(3), lease_id=0)
    scheduler.complete(step, engine.run(step))
    assert sorted(ids_of(next_step(scheduler))) == [1, 3]


def test_sessions_do_not_see_each_others_tokens() -> None:
    scheduler, engine = make_scheduler(), Engine()
    first, second = (scheduler.open(make_spec(session_id), lease_id=0) for session_id in (1, 2))
    scheduler.calibrate(make_calibration(PROMPT, [10], session_id=1))
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    list(run_steps(scheduler, engine))
    assert (first.committed.ids, second.committed.ids) == ([*PROMPT, 10], [*PROMPT, 20])
    assert [sequence[1] for sequence in engine.sequences] == [[*PROMPT, 10], [*PROMPT, 20]]


def test_duration_of_steps_with_and_without_prompt_tokens_teaches_the_pacer() -> None:
    """A step costs a second and 10 ms for each prompt token that was really read."""
    scheduler, engine = make_scheduler(context_length=1000, budget=400), Engine(reused=16)
    first = scheduler.open(long_spec(1, 17), lease_id=0)
    list(run_steps(scheduler, engine))

    def run_step(seconds: float, number: int) -> None:
        scheduler.calibrate(make_calibration(first.committed.ids, [10], number))
        step = next_step(scheduler)
        scheduler.complete(step, replace(engine.run(step), calibration_s=seconds))

    run_step(1.0, 1)
    scheduler.pacer.beside = ChunkCost()
    run_step(1.0, 2)
    for session_id, (prompt_len, num_steps) in enumerate([(216, 1), (816, 2)], start=2):
        scheduler.open(long_spec(session_id, prompt_len), lease_id=0)
        for number in range(num_steps):
            run_step(1.0 + 0.01 * (prompt_len - 16) / num_steps, 10 * session_id + number)
            assert scheduler.pacer.beside.seconds_per_token == pytest.approx(0.01)


def test_calibration_that_comes_before_the_prompt_is_read_teaches_the_pacer_no_nonsense() -> None:
    """Its tokens are unread, too: the session seems to have more to read after the step than before."""
    scheduler, engine = make_scheduler(context_length=100, budget=4), Engine()
    session = scheduler.open(long_spec(1, 8), lease_id=0)
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10] * 20))
    for _ in run_steps(scheduler, engine):
        assert scheduler.pacer.alone.seconds_per_token is not None
        assert scheduler.pacer.alone.seconds_per_token > 0.0


def test_much_that_was_committed_while_the_prompt_was_read_is_read_in_parts_too() -> None:
    scheduler, engine, session = opened_session(make_scheduler(context_length=1000, budget=30), max_len=1000)
    scheduler.calibrate(make_calibration(PROMPT, [10] * 100, round_number=100))
    parts = []
    while (step := scheduler.next_step()) is not None:
        (item,) = step.items
        parts.append(item.max_read)
        (done,) = scheduler.complete(step, engine.run(step))
        assert not done.is_opened, "its prompt was read before"
    assert parts == [30, 30, 30, 10]
    assert isinstance(done.outcome, DraftBlock)
    assert done.outcome.fence.round == 100
    assert session.calibration is None


def test_much_that_is_committed_during_a_step_is_read_in_parts_too() -> None:
    scheduler, engine, _ = opened_session(make_scheduler(context_length=1000, budget=30), max_len=1000)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    step = next_step(scheduler)
    scheduler.calibrate(make_calibration([*PROMPT, 10], [11] * 100, round_number=99))
    scheduler.complete(step, engine.run(step))
    (item,) = next_step(scheduler).items
    assert item.max_read == 30


def test_session_that_was_closed_before_it_was_opened_is_refused() -> None:
    """The two messages travel on different connections; nobody would close it again."""
    scheduler = make_scheduler()
    scheduler.close(1, 0)
    with pytest.raises(ProtocolViolationError):
        scheduler.open(make_spec(1), lease_id=0)
    assert scheduler.room.num_free_blocks == make_scheduler().room.num_free_blocks
    scheduler.open(make_spec(1, epoch=1), lease_id=0)


def test_sequence_that_cannot_go_on_ends_its_session_and_no_other() -> None:
    """The scheduler reports the error once and does not try again; whoever closes the session is told."""
    scheduler, engine = make_scheduler(), Engine()
    sessions = [scheduler.open(make_spec(session_id), lease_id=0) for session_id in (1, 2)]
    list(run_steps(scheduler, engine))
    for session in sessions:
        scheduler.calibrate(make_calibration(session.committed.ids, [10], session_id=session.spec.session_id))
    step = next_step(scheduler)
    result = engine.run(step)
    error = UnavailableError("no finite logits")
    ill, well = scheduler.complete(step, replace(result, outcomes=[error, result.outcomes[1]]))
    assert ill.outcome is error
    assert isinstance(well.outcome, DraftBlock)
    assert scheduler.next_step() is None


# Prompts


def test_prompt_is_read_before_the_first_calibration() -> None:
    scheduler, engine = make_scheduler(), Engine()
    scheduler.open(make_spec(), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    done = [(each.is_opened, each.outcome is None) for (each,) in run_steps(scheduler, engine)]
    assert [is_opened for is_opened, _ in done].index(True) < [has_none for _, has_none in done].index(False)
    assert [has_none for _, has_none in done].count(False) == 1


@pytest.mark.parametrize("prompt_len", [1, 9, 10, 11, 20, 25])
def test_session_is_opened_once_its_prompt_is_read_to_the_end(prompt_len: int) -> None:
    scheduler, engine = make_scheduler(context_length=100, budget=10), Engine()
    session = scheduler.open(long_spec(1, prompt_len), lease_id=0)
    opened = [completed.is_opened for step in run_steps(scheduler, engine) for completed in step]
    num_steps = -(-prompt_len // 10)
    assert opened == [False] * (num_steps - 1) + [True]
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10]))
    assert [completed.is_opened for step in run_steps(scheduler, engine) for completed in step] == [False]


@pytest.mark.parametrize("after_steps", [0, 1, 2])
@pytest.mark.parametrize("in_step", [False, True])
def test_calibration_that_comes_while_the_prompt_is_read_is_drafted_after_it(after_steps: int, in_step: bool) -> None:
    scheduler, engine = make_scheduler(context_length=100, budget=10), Engine()
    session = scheduler.open(long_spec(1, 25), lease_id=0)
    done = list(run_steps(scheduler, engine, limit=after_steps))
    step = next_step(scheduler) if in_step else None
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10, 11]))
    assert session.is_reading
    if step is not None:
        done.append(scheduler.complete(step, engine.run(step)))
    done += run_steps(scheduler, engine)
    everything = list(itertools.chain(*done))
    assert sum(completed.is_opened for completed in everything) == 1
    blocks = [completed.outcome for completed in everything if completed.outcome is not None]
    assert [block.fence.round for block in blocks] == [1]
    assert engine.sequences[0][1] == session.committed.ids


def test_pacer_knows_whether_a_session_is_past_its_prompt() -> None:
    scheduler, engine = make_scheduler(context_length=100, budget=10), Engine()
    scheduler.open(long_spec(1, 15), lease_id=0)
    list(run_steps(scheduler, engine, limit=2))
    scheduler.open(long_spec(2, 5), lease_id=0)
    list(run_steps(scheduler, engine, limit=1))
    scheduler.close(1, 0)
    scheduler.close(2, 0)
    scheduler.open(long_spec(3, 5), lease_id=0)
    list(run_steps(scheduler, engine, limit=1))
    assert scheduler.pacer.asked == [False, False, True, False]  # type: ignore[attr-defined]


def test_reading_prompts_divide_the_budget_while_running_sessions_always_get_in() -> None:
    scheduler, _, _ = opened_session(make_scheduler(max_sessions=9, context_length=1000, budget=30))
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    for session_id, length in ((4, 100), (5, 50), (6, 100)):
        scheduler.open(long_spec(session_id, length), lease_id=0)
    step = next_step(scheduler)
    limits = {item.session.spec.session_id: item.max_read for item in step.items}
    assert limits == {1: None, 4: 15, 5: 15}


def test_long_prompt_does_not_block_a_short_one() -> None:
    scheduler, engine = make_scheduler(context_length=1000, budget=20), Engine()
    scheduler.open(long_spec(1, 500), lease_id=0)
    list(run_steps(scheduler, engine, limit=1))
    scheduler.open(long_spec(2, 10), lease_id=0)
    (done,) = run_steps(scheduler, engine, limit=1)
    assert [each.session.spec.session_id for each in done if each.is_opened] == [2]


def test_session_whose_share_is_nothing_stays_queued_and_gets_on_later() -> None:
    scheduler, engine = make_scheduler(max_sessions=9, context_length=100, budget=2), Engine()
    sessions = [scheduler.open(long_spec(session_id, 6), lease_id=0) for session_id in range(1, 6)]
    step = next_step(scheduler)
    assert len(step.items) == 1
    assert all(session.queued for session in sessions)
    done = scheduler.complete(step, engine.run(step))
    done += itertools.chain(*run_steps(scheduler, engine))
    assert sorted(each.session.spec.session_id for each in done if each.is_opened) == [1, 2, 3, 4, 5]
    assert not any(session.queued for session in sessions)


def test_short_prompt_gets_on_even_where_more_prompts_wait_than_tokens_may_be_read() -> None:
    """21 prompts and 16 tokens a step, of which 8 are for the shortest: three steps for its 20 tokens."""
    scheduler, engine = make_scheduler(max_sessions=64, context_length=1000, budget=16), Engine()
    for session_id in range(1, 21):
        scheduler.open(long_spec(session_id, 500), lease_id=0)
    scheduler.open(long_spec(99, 20), lease_id=0)
    done = itertools.chain(*run_steps(scheduler, engine, limit=3))
    assert [each.session.spec.session_id for each in done if each.is_opened] == [99]


def test_tokens_that_others_had_read_are_counted_once() -> None:
    scheduler, engine = make_scheduler(context_length=100, budget=2), Engine(reused=16)
    session = scheduler.open(long_spec(1, 20), lease_id=0)
    scheduler.calibrate(make_calibration(session.spec.token_ids, [10, 11]))
    list(run_steps(scheduler, engine))
    assert scheduler.prefix_tokens == {"queried": 20, "reused": 16}


# Closing


def test_closing_takes_back_all_waiting_work_of_that_session_only() -> None:
    scheduler, engine = make_scheduler(), Engine()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id), lease_id=0)
        scheduler.calibrate(make_calibration(PROMPT, [10], session_id=session_id))
    closed = scheduler.close(1, 0)
    assert closed is not None
    assert closed.key == (1, 0)
    done = list(itertools.chain(*run_steps(scheduler, engine)))
    assert {each.session.spec.session_id for each in done} == {2}
    assert sum(each.outcome is not None for each in done) == 1


def test_closing_an_unknown_session_does_nothing() -> None:
    scheduler, *_ = opened_session()
    assert scheduler.close(1, 5) is None
    assert scheduler.close(2, 0) is None
    assert len(scheduler.sessions) == 1


@pytest.mark.parametrize("drafts", [False, True])
def test_closing_during_a_step_drops_the_result_and_frees_the_room_once(drafts: bool) -> None:
    scheduler, engine = make_scheduler(), Engine()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id), lease_id=0)
    if drafts:
        list(run_steps(scheduler, engine))
        for session_id in (1, 2):
            scheduler.calibrate(make_calibration(PROMPT, [10], session_id=session_id))
    step = next_step(scheduler)
    assert scheduler.close(1, 0) is not None
    assert scheduler.close(1, 0) is None
    done = scheduler.complete(step, engine.run(step))
    assert [each.session.spec.session_id for each in done] == [2]
    assert scheduler.next_step() is None
    scheduler.close(2, 0)
    assert scheduler.room.usage == 0.0


def test_result_is_dropped_when_the_session_was_opened_anew_meanwhile() -> None:
    scheduler, engine = make_scheduler(), Engine()
    scheduler.open(make_spec(), lease_id=0)
    step = next_step(scheduler)
    scheduler.close(1, 0)
    reopened = scheduler.open(make_spec(), lease_id=0)
    assert scheduler.complete(step, engine.run(step)) == []
    assert reopened.num_reused is None
    assert reopened.is_reading
    ((completed,),) = run_steps(scheduler, engine)
    assert completed.session is reopened
    assert completed.is_opened


# All of it in any order


class AnyOrder(RuleBasedStateMachine):
    """Sessions of few names that open, get calibrations, take part in steps and close in any order."""

    KEYS = st.tuples(st.integers(1, 5), st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(max_sessions=4, context_length=64, kv_cache_tokens=160, budget=3)
        self.scheduler.closed_early = ClosedEarly(bound=0)  # so that every session can be opened sooner or later
        self.engine = Engine()
        self.step: Step | None = None
        self.expected: dict[tuple[int, int], list[int]] = {}
        """Committed tokens of each open session."""
        self.asked: dict[tuple[int, int], tuple[int, int]] = {}
        """Round and attempt that each open session was last asked for."""
        self.opened: set[tuple[int, int]] = set()
        """Sessions that were reported to be open."""

    @rule(key=KEYS, prompt_len=st.integers(1, 20), room=st.integers(1, 40))
    def open(self, key: tuple[int, int], prompt_len: int, room: int) -> None:
        spec = long_spec(key[0], prompt_len, max_len=prompt_len + room, epoch=key[1])
        fits = len(self.expected) < 4 and blocks_for(spec.max_len) <= self.scheduler.room.num_free_blocks
        if key in self.expected:
            with pytest.raises(InvalidRequestError):
                self.scheduler.open(spec, lease_id=0)
        elif not fits:
            with pytest.raises(NoRoomError):
                self.scheduler.open(spec, lease_id=0)
        else:
            self.scheduler.open(spec, lease_id=0)
            self.expected[key], self.asked[key] = list(spec.token_ids), (-1, 0)

    @rule(
        key=KEYS,
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
        new = [10 + num_new] * num_new
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

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_step(self) -> None:
        queued = [session for session in self.scheduler.sessions.values() if session.queued]
        self.step = self.scheduler.next_step()
        assert (self.step is not None) == bool(queued)
        if self.step is not None:
            members = [item.session for item in self.step.items]
            assert len({session.key for session in members}) == len(members)
            running = [session for session in queued if not session.is_reading]
            assert all(any(session is member for member in members) for session in running)
            assert sum(item.max_read or 0 for item in self.step.items) <= 3

    @precondition(lambda self: self.step is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.step is not None
        items = {id(item.session): item for item in self.step.items}
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

    @rule(key=KEYS)
    def close(self, key: tuple[int, int]) -> None:
        closed = self.scheduler.close(*key)
        assert (closed is not None) == (self.expected.pop(key, None) is not None)
        self.asked.pop(key, None)
        self.opened.discard(key)

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
            assert session.queued == (session.is_reading or session.calibration is not None)
            assert session.is_reading == (key not in self.opened)
            assert session.committed.ids == self.expected[key]
            assert len(session.committed) <= session.spec.max_len
        reserved = sum(blocks_for(session.spec.max_len) for session in scheduler.sessions.values())
        assert scheduler.room.num_free_blocks == blocks_for(160) - reserved

    def teardown(self) -> None:
        """Whoever has work is served, sooner or later."""
        if self.step is not None:
            self.finish_step()
        for _ in range(100):  # sessions hold at most 4 * 60 tokens
            self.begin_step()
            if self.step is None:
                break
            self.finish_step()
        assert self.step is None
        assert not any(session.queued for session in self.scheduler.sessions.values())
        assert self.opened == set(self.scheduler.sessions)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
