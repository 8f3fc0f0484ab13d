"""How long a drafter may take before it is hurried: a known rule, on times whose answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire_gateway.session.round_trip_estimate import (
    FIRST_TIMEOUT_S,
    FLUSH_PASSES,
    LEAST_FLUSH_S,
    LEAST_SENT_S,
    LEAST_TIMEOUT_S,
    RoundTripEstimate,
)

MOST = 5.0


def timeout_s(times: list[float], most: float = MOST) -> float:
    pace = RoundTripEstimate()
    for seconds in times:
        pace.add(seconds, 4)
    return pace.timeout_s(4, most)


SPREAD = 0.25 + (abs(1.3 - 0.5) - 0.25) / 4
MEAN = 0.5 + (1.3 - 0.5) / 8
"""After 0.5 and 1.3 s. The spread is taken from the mean before: RFC 6298 asks for this order."""
KNOWN = [
    ([], FIRST_TIMEOUT_S),
    ([0.5], 2 * 0.5 + 4 * 0.25),  # the first counts as the mean, and half of it as the spread
    ([0.5, 1.3], 2 * MEAN + 4 * SPREAD),
    ([0.2] * 100, 0.4),
    ([0.001] * 100, LEAST_TIMEOUT_S),
    ([0.0], LEAST_TIMEOUT_S),
    ([4.0], MOST),
]


@pytest.mark.parametrize(("times", "expected"), KNOWN)
def test_patience_is_two_means_and_four_spreads_within_its_bounds(times: list[float], expected: float) -> None:
    assert timeout_s(times) == pytest.approx(expected)
    assert timeout_s(times, most=0.02) == 0.02, "also where that is below the least"


def test_patience_grows_where_times_vary_or_grow() -> None:
    assert timeout_s([0.1, 0.5] * 50) > 2 * timeout_s([0.3] * 100)
    assert timeout_s([0.1] * 50) < 1.0 < timeout_s([0.1] * 50 + [1.0] * 20), "it is not hurried for ever"


@given(times=st.lists(st.floats(0.0, 60.0), max_size=30))
def test_patience_is_between_the_least_and_the_most(times: list[float]) -> None:
    assert LEAST_TIMEOUT_S <= timeout_s(times) <= MOST


KNOWN_FLUSHES: list[tuple[list[tuple[float, float | None]], float]] = [
    ([], FIRST_TIMEOUT_S),
    ([(0.001, None)] * 100, LEAST_FLUSH_S),
    ([(0.001, 0.0002)] * 100, LEAST_FLUSH_S),
    ([(0.2, 0.05)] * 100, FLUSH_PASSES * 0.05 + 0.2),
    ([(0.2, 0.05), (0.2, 0.13), (0.2, None)], FLUSH_PASSES * (0.05 + 0.08 / 8) + 0.2),
    ([(4.0, 1.0)], MOST),
]


@pytest.mark.parametrize(("times", "expected"), KNOWN_FLUSHES)
def test_flush_is_waited_for_eight_passes_and_a_trip_within_its_bounds(
    times: list[tuple[float, float | None]], expected: float
) -> None:
    pace = RoundTripEstimate()
    for seconds, pass_s in times:
        pace.add(seconds, 0, pass_s)
    assert pace.flush_timeout_s(0, MOST) == pytest.approx(expected)
    assert pace.flush_timeout_s(0, 0.02) == 0.02
    assert pace.sent_timeout_s(0, MOST) == max(LEAST_SENT_S, pace.flush_timeout_s(0, MOST))
    assert pace.sent_timeout_s(0, 0.02) == 0.02
    assert pace.flush_timeout_s(0, MOST, 0.4) == pytest.approx(min(MOST, expected + 0.4)), "a mask comes on top"
    assert pace.flush_timeout_s(0, 0.02, 0.4) == 0.02


def test_patience_for_a_block_grows_with_its_length() -> None:
    """Lengths change from round to round: what a short block took says how long a long one may take."""
    pace = RoundTripEstimate()
    for _ in range(200):
        pace.add(0.010 + 2 * 0.1, 2, 0.1)
    assert pace.timeout_s(2, MOST) == pytest.approx(2 * (0.010 + 0.2), rel=0.01)
    assert pace.timeout_s(16, MOST) == pytest.approx(2 * (0.010 + 1.6), rel=0.01), "none of its tokens came early"
    for _ in range(200):
        pace.add(0.010 + 16 * 0.1, 16, 0.1)
    assert pace.timeout_s(2, MOST) == pytest.approx(2 * (0.010 + 0.2), rel=0.01), "nor is a short one waited for longer"
    assert pace.flush_timeout_s(16, MOST) == pytest.approx(FLUSH_PASSES * 0.1 + 0.010 + 1.6, rel=0.01)
