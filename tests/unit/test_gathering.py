"""Steps wait for sessions that have fallen out of step, where that makes all of them faster."""

import time

import pytest

from draftwire_verifier.gathering import (
    LEAST_LEFT,
    PATIENCE,
    TRIAL_EVERY,
    UNKNOWN_SHARE,
    Gathering,
    Ready,
    StepTimes,
    UsualWait,
    worthwhile_wait_s,
)


def times_of(fixed_s: float, row_s: float) -> StepTimes:
    times = StepTimes()
    for num_rows in (1, 2, 4, 8, 16, 32):
        times.learn(num_rows, fixed_s + row_s * num_rows)
    return times


READING = times_of(0.1, 0.0)
"""Of a model whose weights take all the time to be read."""
COMPUTING = times_of(0.0, 0.01)
"""Of one that takes as long for each row."""


def test_step_waits_for_others_while_that_takes_less_than_a_second_step() -> None:
    half = Ready(4, 12, 0.03)
    assert worthwhile_wait_s(half, [0.03] * 4, READING, 0.0) == 0.03
    assert worthwhile_wait_s(half, [0.11] * 4, READING, 0.0) == 0.0, "a second step is over before"
    assert worthwhile_wait_s(half, [0.03] * 4, COMPUTING, 0.0) == 0.0, (
        "together they take as long as one after the other"
    )
    beside = worthwhile_wait_s(half, [0.01] * 4, READING, 0.12)
    assert beside == 0.0, "drafting takes longer than a step: each half is drafted for beside the other one's"
    assert worthwhile_wait_s(half, [], READING, 0.0) == 0.0
    assert worthwhile_wait_s(half, [0.03] * 4, StepTimes(), 0.0) == 0.0, "nothing is known yet"


def test_few_that_are_late_wait_for_the_many() -> None:
    assert worthwhile_wait_s(Ready(7, 21, 0.04), [0.04], READING, 0.0) == 0.0
    assert worthwhile_wait_s(Ready(1, 3, 0.04), [0.04] * 7, READING, 0.0) == 0.04
    assert worthwhile_wait_s(Ready(7, 21, 0.04), [0.005], READING, 0.0) == 0.005, "so little is worth it"


def test_those_that_come_soon_are_waited_for_and_the_others_left() -> None:
    assert worthwhile_wait_s(Ready(4, 4, 0.02), [0.01, 0.015, 0.5], READING, 0.0) == 0.01
    assert worthwhile_wait_s(Ready(5, 5, 0.02), [0.005, 0.49], READING, 0.0) == 0.005
    assert worthwhile_wait_s(Ready(6, 6, 0.02), [0.485], READING, 0.0) == 0.0


def test_halves_get_in_step_and_stay() -> None:
    """Two halves of eight sessions, each drafting for 40 ms while the other is judged."""
    gathering, period = Gathering(READING), 0.04
    due = dict.fromkeys(range(8), 0.0)
    due.update(dict.fromkeys(range(4), 0.05))
    now, sizes = 0.0, []
    while len(sizes) < 6:
        ready = [index for index, at in due.items() if at <= now]
        left = [at - now for at in due.values() if at > now]
        if ready and not gathering.holds(Ready(len(ready), 3 * len(ready), period), left, now):
            now += 0.1
            due.update(dict.fromkeys(ready, now + period))
            sizes.append(len(ready))
        else:
            now = min(at for at in due.values() if at > now)
    assert sizes[1:] == [8] * 5
    assert gathering.held_s > 0.0


def test_now_and_then_a_step_waits_as_if_blocks_came_at_once() -> None:
    """Else nobody would know how long they take while no step runs."""
    gathering = Gathering(READING)
    gathering.undisturbed.learn(0.5)
    held = []
    for step in range(2 * TRIAL_EVERY):
        held.append(gathering.holds(Ready(4, 4, 0.01), [0.01] * 4, float(step)))
        gathering.begin(step + 0.01)
    assert held.count(True) == 2


def test_one_step_of_many_waits_for_nobody() -> None:
    gathering = Gathering(READING)
    held = []
    for step in range(2 * TRIAL_EVERY):
        held.append(gathering.holds(Ready(4, 4, 0.01), [0.01] * 4, float(step)))
        gathering.begin(step + 0.01)
    assert held.count(False) == 2
    assert gathering.held_s == pytest.approx(0.01 * (len(held) - 2))


def test_wait_is_over_when_it_is_reached_or_all_have_come() -> None:
    gathering = Gathering(READING)
    assert gathering.holds(Ready(4, 4, 0.01), [0.01] * 4, 1.0)
    assert gathering.until == pytest.approx(1.01)
    gathering.begin(1.004)
    assert gathering.until is None, "nobody is to wake up for it"


def test_late_block_is_expected_for_a_while_and_then_not() -> None:
    usual = UsualWait()
    assert usual.left_s(0.0, 0.1) is None, "nothing is known"
    usual.learn(0.1)
    assert usual.left_s(1.0, 1.02) == pytest.approx(0.08)
    assert usual.left_s(1.0, 1.02, 0.5) == pytest.approx(0.03)
    assert usual.left_s(1.0, 1.12) == pytest.approx(LEAST_LEFT * 0.1)
    assert usual.left_s(1.0, 1.0 + 1.01 * PATIENCE * 0.1) is None
    usual.learn(0.3)
    assert usual.seconds == pytest.approx(0.2)


def test_decision_for_many_sessions_takes_a_fraction_of_a_millisecond() -> None:
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        worthwhile_wait_s(Ready(64, 64, 0.02), [0.01] * 1000, READING, 0.0)
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.001


def test_blocks_are_expected_sooner_without_a_step_as_far_as_they_came_so() -> None:
    gathering = Gathering(READING)
    assert gathering.undisturbed_share == UNKNOWN_SHARE
    gathering.usual.learn(0.2)
    gathering.undisturbed.learn(0.05)
    assert gathering.undisturbed_share == pytest.approx(0.25)
    gathering.undisturbed.learn(9.0)
    assert gathering.undisturbed_share == 1.0


def test_times_of_steps_lie_on_lines_between_those_that_were_measured() -> None:
    times = StepTimes()
    assert times.is_empty
    times.learn(2, 0.02)
    assert times.seconds(1) == times.seconds(50) == 0.02
    times.learn(10, 0.06)
    assert times.seconds(6) == pytest.approx(0.04)
    assert (times.seconds(1), times.seconds(50)) == (0.02, 0.06)
