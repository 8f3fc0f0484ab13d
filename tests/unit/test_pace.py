"""How long a drafter may take before it is hurried: a known rule, on times whose answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire.services.gateway.pace import LEAST_PATIENCE_S, DrafterPace

MOST = 5.0


def paced(*seconds: float) -> DrafterPace:
    pace = DrafterPace()
    for value in seconds:
        pace.learn(value)
    return pace


def test_drafter_that_nothing_is_known_of_gets_all_the_time_there_is() -> None:
    assert DrafterPace().patience_s(MOST) == MOST


def test_first_time_counts_as_the_mean_and_half_of_it_as_the_spread() -> None:
    assert paced(0.5).patience_s(MOST) == pytest.approx(2 * 0.5 + 4 * 0.25)


def test_later_times_move_mean_and_spread_by_an_eighth_and_a_quarter() -> None:
    """The spread is taken from the mean before: RFC 6298 asks for this order."""
    spread = 0.25 + (abs(1.3 - 0.5) - 0.25) / 4
    mean = 0.5 + (1.3 - 0.5) / 8
    assert paced(0.5, 1.3).patience_s(MOST) == pytest.approx(2 * mean + 4 * spread)


def test_steady_drafter_gets_twice_its_time() -> None:
    assert paced(*[0.2] * 100).patience_s(MOST) == pytest.approx(0.4)


def test_drafter_whose_times_vary_gets_more_than_a_steady_one_of_the_same_mean() -> None:
    assert paced(*[0.1, 0.5] * 50).patience_s(MOST) > 2 * paced(*[0.3] * 100).patience_s(MOST)


def test_fast_drafter_gets_the_least() -> None:
    assert paced(*[0.001] * 100).patience_s(MOST) == LEAST_PATIENCE_S
    assert paced(0.0).patience_s(MOST) == LEAST_PATIENCE_S


def test_slow_drafter_gets_no_more_than_the_most() -> None:
    assert paced(4.0).patience_s(MOST) == MOST
    assert paced(0.001).patience_s(most=0.02) == 0.02  # also where that is below the least


def test_drafter_that_became_slower_is_not_hurried_for_ever() -> None:
    pace = paced(*[0.1] * 50)
    assert pace.patience_s(MOST) < 1.0
    for _ in range(20):
        pace.learn(1.0)
    assert pace.patience_s(MOST) > 1.0


@given(times=st.lists(st.floats(0.0, 60.0), max_size=30))
def test_patience_is_between_the_least_and_the_most(times: list[float]) -> None:
    assert LEAST_PATIENCE_S <= paced(*times).patience_s(MOST) <= MOST
