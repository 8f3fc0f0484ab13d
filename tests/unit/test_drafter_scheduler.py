"""The drafter's scheduler: who gets in, which calibrations count, and whose turn it is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from draftwire.errors import InvalidRequestError, NoRoomError, ProtocolViolationError
from draftwire.randomness import KEY_BYTES
from draftwire.rounds import Calibration, CommittedTokens, DraftSessionSpec, Fence
from draftwire.sampling import SamplingParams
from draftwire.services.drafter.scheduler import Scheduler, Step

CONTEXT_LENGTH = 12
PROMPT = [1, 2, 3, 4]


def make_scheduler(max_sessions: int = 4) -> Scheduler:
    return Scheduler(CONTEXT_LENGTH, max_sessions, max_draft_tokens=5)


def make_spec(session_id: int = 1, **changes: Any) -> DraftSessionSpec:
    spec = DraftSessionSpec(
        session_id=session_id,
        epoch=0,
        choice=0,
        token_ids=PROMPT,
        prompt_len=len(PROMPT),
        sampling=SamplingParams(),
        drafting_key=bytes(KEY_BYTES),
        verifier_address="verifier:1",
        target_vocab_size=100,
        max_draft_tokens=3,
    )
    return replace(spec, **changes)


def make_calibration(
    known: list[int], new: list[int], round_number: int = 1, session_id: int = 1, **changes: Any
) -> Calibration:
    """Builds the message of an honest gateway, from the ids alone."""
    committed = known + new
    fence = Fence(session_id, 0, round_number, len(committed), CommittedTokens(committed).hash)
    return replace(Calibration(fence, len(known), new, num_draft_tokens=2), **changes)


def with_fence(calibration: Calibration, **changes: int) -> Calibration:
    return replace(calibration, fence=replace(calibration.fence, **changes))


def remaining(scheduler: Scheduler) -> Iterator[Step]:
    while (step := scheduler.next_step()) is not None:
        yield step


def scheduler_with_session(**changes: Any) -> Scheduler:
    """Returns a scheduler with session 1 open and its prompt read."""
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(**changes), lease_id=0)
    assert list(remaining(scheduler)) == [Step(session, None)]
    return scheduler


# Admission


def test_opening_schedules_the_prompt() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    assert list(remaining(scheduler)) == [Step(session, None)]
    assert session.committed.ids == PROMPT


def test_session_beyond_the_limit_is_refused_until_another_closes() -> None:
    scheduler = make_scheduler(max_sessions=2)
    scheduler.open(make_spec(1), lease_id=0)
    scheduler.open(make_spec(2), lease_id=0)
    with pytest.raises(NoRoomError):
        scheduler.open(make_spec(3), lease_id=0)
    assert set(scheduler.sessions) == {(1, 0), (2, 0)}
    assert len(list(remaining(scheduler))) == 2
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
    ("changes", "error"),
    [
        ({"token_ids": []}, InvalidRequestError),
        ({"max_draft_tokens": 0}, InvalidRequestError),
        ({"max_draft_tokens": 6}, InvalidRequestError),
        ({"token_ids": [1] * CONTEXT_LENGTH}, NoRoomError),
    ],
)
def test_spec_out_of_range_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(error):
        scheduler.open(make_spec(**changes), lease_id=0)
    assert not scheduler.sessions
    assert scheduler.next_step() is None


@pytest.mark.parametrize(
    "changes", [{"max_draft_tokens": 1}, {"max_draft_tokens": 5}, {"token_ids": [1] * (CONTEXT_LENGTH - 1)}]
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


# Calibrations


def test_calibration_commits_its_tokens_and_becomes_a_step() -> None:
    scheduler = scheduler_with_session()
    calibration = make_calibration(PROMPT, [10, 11])
    scheduler.calibrate(calibration)
    session = scheduler.sessions[1, 0]
    assert session.committed.ids == [*PROMPT, 10, 11]
    assert list(remaining(scheduler)) == [Step(session, calibration)]
    assert not scheduler.dropped


def test_calibrations_continue_each_other() -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(make_calibration(PROMPT, [10, 11], round_number=1))
    scheduler.calibrate(make_calibration([*PROMPT, 10, 11], [12], round_number=2))
    scheduler.calibrate(make_calibration([*PROMPT, 10, 11, 12], [13], round_number=9))  # plain rounds lie between
    assert scheduler.sessions[1, 0].committed.ids == [*PROMPT, 10, 11, 12, 13]
    drafted = [step.calibration.fence.round for step in remaining(scheduler) if step.calibration]
    assert drafted == [1, 2, 9]


def test_calibration_without_new_tokens_drafts_after_the_prompt() -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(make_calibration(PROMPT, [], round_number=0))
    assert len(list(remaining(scheduler))) == 1


@pytest.mark.parametrize("round_number", [0, 1, 2])
def test_calibration_of_a_round_not_after_the_last_is_dropped_and_counted(round_number: int) -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=2))
    list(remaining(scheduler))
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=round_number))
    assert scheduler.dropped == {"stale": 1}
    assert scheduler.next_step() is None
    assert scheduler.sessions[1, 0].committed.ids == [*PROMPT, 10]


def test_another_attempt_at_a_round_is_drafted_again() -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(make_calibration(PROMPT, [10], round_number=2))
    again = make_calibration([*PROMPT, 10], [], round_number=2, attempt=1)
    scheduler.calibrate(again)
    scheduler.calibrate(again)
    assert [step.calibration.attempt for step in remaining(scheduler) if step.calibration] == [0, 1]
    assert scheduler.dropped == {"stale": 1}


@pytest.mark.parametrize("wrong", [{"session_id": 2}, {"epoch": 1}])
def test_calibration_of_an_unknown_session_or_epoch_is_dropped_and_counted(wrong: dict[str, int]) -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(with_fence(make_calibration(PROMPT, [10]), **wrong))
    assert scheduler.dropped == {"unknown_session": 1}
    assert scheduler.next_step() is None
    assert scheduler.sessions[1, 0].committed.ids == PROMPT


def test_calibration_of_a_past_epoch_is_dropped_and_counted() -> None:
    scheduler = scheduler_with_session(epoch=0)
    scheduler.close(1, 0)
    scheduler.open(make_spec(epoch=1), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    assert scheduler.dropped.total() == 1
    assert [step.calibration for step in remaining(scheduler)] == [None]


@pytest.mark.parametrize(
    "calibration",
    [
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
        pytest.param(make_calibration(PROMPT, [10] * 7, num_draft_tokens=2), id="beyond_the_context"),
    ],
)
def test_calibration_that_does_not_continue_the_session_is_a_violation(calibration: Calibration) -> None:
    scheduler = scheduler_with_session()
    with pytest.raises(ProtocolViolationError):
        scheduler.calibrate(calibration)
    assert scheduler.next_step() is None


def test_draft_may_fill_the_context_to_the_last_token() -> None:
    scheduler = scheduler_with_session()
    scheduler.calibrate(make_calibration(PROMPT, [10] * 6, num_draft_tokens=2))
    assert len(list(remaining(scheduler))) == 1


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_number_of_draft_tokens_may_be_anything_up_to_the_sessions_limit(num_draft_tokens: int) -> None:
    scheduler = scheduler_with_session(max_draft_tokens=3)
    scheduler.calibrate(make_calibration(PROMPT, [10], num_draft_tokens=num_draft_tokens))
    assert len(list(remaining(scheduler))) == 1


# Several sessions, and closing


def test_work_is_handed_out_in_the_order_in_which_it_came() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    scheduler.open(make_spec(3), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [10], session_id=1))
    order = [(step.session.spec.session_id, step.calibration is None) for step in remaining(scheduler)]
    assert order == [(1, True), (2, True), (2, False), (3, True), (1, False)]


def test_prompt_is_read_before_the_first_calibration() -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(), lease_id=0)
    scheduler.calibrate(make_calibration(PROMPT, [10]))
    assert [step.calibration is None for step in remaining(scheduler)] == [True, False]


def test_sessions_do_not_see_each_others_tokens() -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.open(make_spec(session_id), lease_id=0) for session_id in (1, 2))
    scheduler.calibrate(make_calibration(PROMPT, [10], session_id=1))
    scheduler.calibrate(make_calibration(PROMPT, [20], session_id=2))
    assert (first.committed.ids, second.committed.ids) == ([*PROMPT, 10], [*PROMPT, 20])


def test_closing_takes_back_all_waiting_work_of_that_session_only() -> None:
    scheduler = make_scheduler()
    for session_id in (1, 2):
        scheduler.open(make_spec(session_id), lease_id=0)
        scheduler.calibrate(make_calibration(PROMPT, [10], session_id=session_id))
    closed = scheduler.close(1, 0)
    assert closed is not None
    assert closed.key == (1, 0)
    assert [step.session.spec.session_id for step in remaining(scheduler)] == [2, 2]


def test_closing_an_unknown_session_does_nothing() -> None:
    scheduler = scheduler_with_session()
    assert scheduler.close(1, 5) is None
    assert scheduler.close(2, 0) is None
    assert len(scheduler.sessions) == 1


def test_closed_session_is_not_open_even_when_its_name_is_used_again() -> None:
    scheduler = make_scheduler()
    session = scheduler.open(make_spec(), lease_id=0)
    assert scheduler.is_open(session)
    scheduler.close(1, 0)
    assert not scheduler.is_open(session)
    again = scheduler.open(make_spec(), lease_id=0)
    assert not scheduler.is_open(session)
    assert scheduler.is_open(again)
