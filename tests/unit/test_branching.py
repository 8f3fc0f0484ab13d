"""For how many texts a drafter drafts ahead: pass times that are learnt, and the choice that they lead to."""

import random
from itertools import accumulate

import pytest

from draftwire.options.ahead.branching import PassTime, PassTimes, num_worthwhile

CHANCES = [0.4, 0.2, 0.1, 0.05, 0.05, 0.02, 0.01, 0.01]
LENGTH, OUTCOME_S = 4, 0.02


def test_texts_are_all_drafted_for_where_a_row_costs_nothing() -> None:
    assert num_worthwhile(CHANCES, LENGTH, PassTime(0.002, 0.0), OUTCOME_S) == len(CHANCES)


def test_likeliest_text_alone_is_drafted_for_where_a_row_costs_a_pass() -> None:
    assert num_worthwhile([0.8, *CHANCES[3:]], LENGTH, PassTime(0.002, 0.002), OUTCOME_S) == 1


def test_fewer_texts_the_more_a_row_costs_and_more_the_longer_a_miss_waits() -> None:
    by_price = [num_worthwhile(CHANCES, LENGTH, PassTime(0.002, 0.002 * share / 20), OUTCOME_S) for share in range(20)]
    assert by_price == sorted(by_price, reverse=True)
    assert len(set(by_price)) >= 4
    by_wait = [num_worthwhile(CHANCES, LENGTH, PassTime(0.002, 0.0004), 0.01 * number) for number in range(20)]
    assert by_wait == sorted(by_wait)
    assert by_wait[0] < by_wait[-1]


def test_choice_is_the_one_after_which_the_next_block_comes_soonest() -> None:
    """Against a simulation of many rounds."""
    chance = random.Random(1)
    times = PassTime(0.002, 0.0002)

    def mean_s(count: int) -> float:
        total_s, together = 0.0, list(accumulate(CHANCES))[count - 1]
        for _ in range(20_000):
            if chance.random() < together:
                total_s += LENGTH * times.seconds(count) + times.seconds(1)
            else:  # the pass that runs when the outcome comes is in its middle on average
                total_s += OUTCOME_S + chance.random() * times.seconds(count) + LENGTH * times.seconds(1)
        return total_s

    by_count = {count: mean_s(count) for count in range(1, len(CHANCES) + 1)}
    chosen = num_worthwhile(CHANCES, LENGTH, times, OUTCOME_S)
    assert by_count[chosen] <= 1.005 * min(by_count.values())


def test_rows_of_others_make_passes_longer() -> None:
    steep = PassTime(0.001, 0.001)
    assert num_worthwhile(CHANCES, LENGTH, steep, OUTCOME_S) > num_worthwhile(CHANCES, LENGTH, steep, OUTCOME_S, 0) - 1
    assert steep.seconds(3) == pytest.approx(0.003)


def test_times_are_learnt_in_spite_of_noise_and_pauses() -> None:
    times, chance = PassTimes(), random.Random(2)
    for number in range(400):
        rows = 1 if number % 2 else chance.randint(2, 8)
        seconds = (0.002 + 0.0004 * (rows - 1)) * chance.uniform(0.9, 1.1)
        times.learn(rows, 0.5 if number % 100 == 50 else seconds)
    assert times.known is not None
    assert times.known.first_s == pytest.approx(0.002, rel=0.1)
    assert times.known.row_s == pytest.approx(0.0004, rel=0.25)


def test_price_of_a_row_is_a_share_of_a_pass_and_is_learnt_anew() -> None:
    times = PassTimes()
    times.learn(4, 0.003)
    assert times.known is None
    for number in range(100):
        times.learn(1 + 3 * (number % 2), 0.002 + 0.0012 * (number % 2))
    assert times.known == PassTime(pytest.approx(0.002), pytest.approx(0.0004))
    for _ in range(100):
        times.learn(1, 0.004)
    assert times.known == PassTime(pytest.approx(0.004, rel=0.01), pytest.approx(0.0008, rel=0.01))
    for number in range(200):
        times.learn(1 + number % 2, 0.004)
    assert times.known == PassTime(pytest.approx(0.004, rel=0.01), pytest.approx(0.0, abs=2e-5))
