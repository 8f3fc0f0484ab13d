"""A short run of `make chaos`."""

from collections import Counter

import pytest

from tests.chaos import Chaos, Reference, Tally, run
from tests.unwritable_logs import Unwritable

pytestmark = pytest.mark.alone


@pytest.mark.timeout(300)
def test_nothing_is_lost_repeated_or_invented_whatever_breaks() -> None:
    outcome = run(lambda chaos: chaos.run(10.0), concurrency=8, seed=3, num_prompts=8, max_tokens=48)
    print(outcome.shown())
    assert outcome.is_clean, outcome.shown()
    assert sum(outcome.faults.values()) >= 5
    assert outcome.tally.completed > 0
    assert set(outcome.tally.errors) <= {"UnavailableError", "NoRoomError"}


@pytest.mark.timeout(300)
def test_services_that_cannot_log_fail_no_completion_either() -> None:
    outcome = run(lambda chaos: chaos.run(4.0), 4, seed=5, num_prompts=8, max_tokens=48, log=Unwritable.CLOSED)
    print(outcome.shown())
    assert outcome.is_clean, outcome.shown()
    assert sum(outcome.faults.values()) >= 2
    assert outcome.tally.completed > 0


@pytest.mark.timeout(300)
def test_rolling_restart_of_all_services_fails_no_completion() -> None:
    outcome = run(Chaos.restart_one_after_the_other, concurrency=4, seed=4, num_prompts=8, max_tokens=48)
    print(outcome.shown())
    assert outcome.is_clean, outcome.shown()
    assert not outcome.tally.errors
    assert outcome.tally.completed > 0


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        ([1, 2, 3, 4, 5, 6], None),
        ([1, 2, 3, 4, 5], "lost"),
        ([1, 2, 4, 5, 6], "lost"),
        ([1, 2, 2, 3, 4, 5, 6], "repeated"),
        ([1, 2, 3, 4, 5, 6, 6], "repeated"),
        ([1, 2, 3, 9, 5, 6], "invented"),
        ([1, 8, 3, 4, 5, 6], "near_ties"),
    ],
)
def test_what_is_wrong_with_a_text_is_told(token_ids: list[int], fault: str | None) -> None:
    tally = Tally()
    tally.compare(token_ids, Reference([1, 2, 3, 4, 5, 6], [False, True, False, False, False, False]))
    found = Counter({name: getattr(tally, name) for name in ("lost", "repeated", "invented", "near_ties")})
    assert +found == Counter([fault] if fault else [])
    assert tally.is_clean == (fault in (None, "near_ties"))
