"""What a gateway knows of the rounds that a drafter may have begun, and that it is what the drafter does."""

import pytest
from gateway_fakes import PROMPT, STORY
from test_drafter_seat import seating
from virtual_time import in_virtual_time

from draftwire.engine.draft_session import DraftSession
from draftwire.method.rounds import Calibration, Fence
from draftwire_gateway.options.drafts_ahead import BegunRounds
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource

AHEAD, DRAFTER, VERIFIER = DraftSource.AHEAD, DraftSource.DRAFTER, DraftSource.VERIFIER


def begun(*requests: tuple[int, int, int]) -> BegunRounds:
    """Returns what is known after requests of drafter 0, each of a round, rounds ahead and a length."""
    rounds = BegunRounds()
    for number, rounds_ahead, length in requests:
        rounds.request(number, rounds_ahead, length, 0)
    return rounds


@pytest.mark.parametrize(
    ("requests", "wanted", "number", "most", "asked"),
    [
        ([(3, 0, 4)], PLAIN, 4, 9, PLAIN),
        ([(3, 1, 4)], Arm(AHEAD, 4), 4, 9, Arm(AHEAD, 4)),
        ([(3, 1, 4)], PLAIN, 4, 9, Arm(DRAFTER, 4)),
        ([(3, 1, 4)], Arm(VERIFIER, 2), 4, 9, Arm(DRAFTER, 4)),
        ([(3, 1, 4)], Arm(AHEAD, 2), 4, 9, Arm(DRAFTER, 4)),
        ([(3, 1, 4)], Arm(DRAFTER, 4), 4, 9, Arm(DRAFTER, 4)),
        ([(3, 1, 4)], Arm(DRAFTER, 4, 8), 4, 9, Arm(DRAFTER, 4)),
        ([(3, 1, 4)], PLAIN, 5, 9, PLAIN),
        ([(3, 2, 4)], PLAIN, 5, 9, Arm(DRAFTER, 4)),
        ([(3, 2, 4), (4, 0, 4)], PLAIN, 5, 9, Arm(DRAFTER, 4)),
        ([(3, 2, 4), (4, 0, 4), (5, 0, 4)], PLAIN, 6, 9, PLAIN),
        ([(3, 1, 4)], Arm(AHEAD, 3), 4, 3, Arm(AHEAD, 3)),
        ([(3, 1, 4)], PLAIN, 4, 3, Arm(DRAFTER, 3)),
        ([(3, 1, 4)], PLAIN, 4, 0, PLAIN),
    ],
)
def test_round_that_may_have_begun_is_asked_for_as_it_was_begun(
    requests: list[tuple[int, int, int]], wanted: Arm, number: int, most: int, asked: Arm
) -> None:
    assert begun(*requests).arm(wanted, number, most, 0) == asked


def test_what_another_drafter_may_have_begun_is_plain_and_counted_in_runs() -> None:
    rounds = begun((3, 2, 4))
    assert rounds.is_of_another(5, 1)
    assert rounds.arm(Arm(AHEAD, 4), 5, 9, 1) == PLAIN
    assert [rounds.num_from(number) for number in (3, 4, 5, 6, 9)] == [3, 2, 1, 0, 0]
    assert not rounds.is_of_another(6, 1)
    assert rounds.arm(Arm(AHEAD, 2), 6, 9, 1) == Arm(AHEAD, 2)


@pytest.mark.parametrize("context", [len(PROMPT) + 9, 10_000])
@in_virtual_time
async def test_gateway_and_drafter_count_alike_what_there_is_room_for(context: int) -> None:
    """So a gateway knows of a round that it was not begun, where it asks for none."""
    one = seating(context_lengths=(context,), max_tokens=12)
    await one.seek_until_ready()
    spec = one.drafters[0].spec
    session = DraftSession(spec=spec, lease_id=1, num_known=len(PROMPT), num_sent=len(PROMPT))
    session.latest = Calibration(Fence(1, 0, 0, len(PROMPT), 0), len(PROMPT), [], 4)
    rooms = []
    for token in STORY[:12]:
        committed = len(one.session.committed)
        rooms.append(min(4, one.seat.room))
        assert max(0, rooms[-1]) == max(0, session.length_at(committed)), committed
        one.end_round([token])
    assert {4, 1, 0} <= set(rooms)
