"""The simulated time of drafting ahead, where it is known without simulating."""

import pytest

from benchmarks.ahead_model import Pair, ahead_rate, best, strict_rate

CERTAIN = Pair(verify_s=0.01, pass_s=0.001, row_s=0.0, hop_s=0.0, acceptance=1.0)


def test_verifier_never_waits_for_guesses_that_are_certain() -> None:
    assert ahead_rate(CERTAIN, 4, 2, 16) == pytest.approx(5 / 0.01, rel=1e-3)


def test_without_branches_a_hop_is_saved_and_a_pass_may_be_given_up() -> None:
    pair = Pair(verify_s=0.01, pass_s=0.002, row_s=0.0, hop_s=0.005, acceptance=1.0)
    assert strict_rate(pair, 3) == pytest.approx(4 / (0.01 + 3 * 0.002 + 3 * 0.005))
    assert ahead_rate(pair, 3, 2, 0) == pytest.approx(4 / (0.01 + 3 * 0.002 + 2 * 0.005), rel=0.1)


def test_where_rows_cost_too_much_the_likeliest_text_alone_is_drafted_for() -> None:
    pair = Pair(verify_s=0.01, pass_s=0.002, row_s=0.1, hop_s=0.0, acceptance=0.5)
    assert ahead_rate(pair, 2, 2, 16) == ahead_rate(pair, 2, 2, 2)
    assert ahead_rate(pair, 2, 2, 2) == pytest.approx(strict_rate(pair, 2), rel=0.2)


def test_best_is_the_length_with_the_highest_rate() -> None:
    assert best({2: 1.0, 4: 3.0, 6: 2.0}) == 4
