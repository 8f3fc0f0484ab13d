"""What of the time of rounds is an arm's own, and what the machine's."""

import math

import numpy as np
import pytest

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.arm_paces import (
    ARM_DRIFT,
    GROWTH_DRIFT,
    GROWTH_SPREAD,
    MACHINE_DRIFT,
    WINDOW_NOISE,
    ArmPaces,
)

SHORT, LONG = Arm(DraftSource.DRAFTER, 2), Arm(DraftSource.DRAFTER, 4)


def paces_of(**log_s: float) -> ArmPaces:
    paces = ArmPaces()
    for name, value in log_s.items():
        paces.begin({"plain": PLAIN, "short": SHORT, "long": LONG}[name], value, 1.0)
    return paces


def surprise(paces: ArmPaces, arm: Arm, log_s: float) -> None:
    paces.measure(arm, log_s - paces.log_s()[arm], 1.0)


def test_means_are_those_of_the_joint_normal_law_given_all_windows() -> None:
    """The law of machine, growth, three arms and six windows, as one covariance matrix, and conditioned at once."""
    windows = [
        (PLAIN, -3.0, 1.0, 0.0),
        (LONG, -2.0, 0.5, 100.0),
        (LONG, -1.8, 1.0, 300.0),
        (PLAIN, -2.7, 1.0, 900.0),
        (SHORT, -2.2, 0.25, 50.0),
        (LONG, -1.9, 1.0, 200.0),
    ]
    pause_s, arms = 4.0, (PLAIN, SHORT, LONG)
    paces = ArmPaces()
    for number, (arm, log_s, share, text_tokens) in enumerate(windows):
        paces.pass_time(pause_s if number else 0.0, text_tokens)
        if arm in paces.log_s():
            paces.measure(arm, log_s - paces.log_s()[arm], share)
        else:
            paces.begin(arm, log_s, share)
    diffuse = 1e5

    def covariance(one: tuple[Arm, float, float], other: tuple[Arm, float, float]) -> float:
        """Of what is expected of two arms at two times, each with texts of a length."""
        earlier = min(one[1], other[1])
        of_arm = diffuse + ARM_DRIFT**2 * earlier if one[0] == other[0] else 0.0
        of_growth = one[2] * other[2] * (GROWTH_SPREAD**2 + GROWTH_DRIFT**2 * earlier)
        return MACHINE_DRIFT**2 * earlier + of_growth + of_arm

    seen = [(arm, pause_s * number, math.log1p(each / 100.0)) for number, (arm, *_, each) in enumerate(windows)]
    noise = np.diag([WINDOW_NOISE**2 / share for _, _, share, _ in windows])
    of_seen = np.array([[covariance(one, other) for other in seen] for one in seen]) + noise
    to_seen = np.array([[covariance((arm, *seen[-1][1:]), other) for other in seen] for arm in arms])
    expected = to_seen @ np.linalg.solve(of_seen, np.array([log_s for _, log_s, *_ in windows]))
    found = paces.log_s()
    assert [found[arm] for arm in arms] == [pytest.approx(value, abs=1e-5) for value in expected]


def test_longer_texts_make_no_arm_look_slower_than_another() -> None:
    """Two arms have turns, while texts grow and begin anew; the one probed with short texts is not the better one."""
    paces = ArmPaces()
    for text in range(6):
        for number in range(10):
            arm = LONG if number == text else PLAIN
            log_s = 0.5 * math.log1p(0.2 * number) + (1.0 if arm == LONG else 0.0)
            paces.pass_time(1.0, 20.0 * number)
            if arm in paces.log_s():
                surprise(paces, arm, log_s)
            else:
                paces.begin(arm, log_s, 1.0)
    paces.pass_time(1.0, 0.0)
    assert paces.log_s()[LONG] == pytest.approx(1.0, abs=0.05)
    paces.pass_time(1.0, 200.0)
    assert paces.log_s()[LONG] == pytest.approx(1.0 + 0.5 * math.log(3.0), abs=0.05)
    assert paces.log_s()[LONG] - paces.log_s()[PLAIN] == pytest.approx(1.0, abs=0.05)


def test_lucky_first_window_of_an_arm_makes_no_other_look_slower_later() -> None:
    paces = paces_of(plain=0.0)
    for _ in range(10):
        paces.pass_time(1.0, 0.0)
        surprise(paces, PLAIN, 0.0)
    paces.begin(LONG, 0.8, 1.0)
    for _ in range(20):
        paces.pass_time(1.0, 0.0)
        surprise(paces, LONG, 1.0)
    assert paces.log_s()[LONG] == pytest.approx(1.0, abs=0.02)
    assert 0.0 <= paces.log_s()[PLAIN] < 0.1, "half of it, since the machine may be the cause"


def test_machine_that_becomes_slower_is_slower_for_arms_that_do_not_run() -> None:
    paces = paces_of(plain=0.0, long=1.0)
    for arm in (PLAIN, LONG):
        for _ in range(20):
            surprise(paces, arm, {PLAIN: 0.0, LONG: 1.0}[arm])
    for second in range(40):
        paces.pass_time(1.0, 0.0)
        surprise(paces, LONG, 1.0 + 0.01 * second)
    assert 0.25 < paces.log_s()[PLAIN] < 0.4, "mostly the machine's"
    for _ in range(10):
        paces.pass_time(1.0, 0.0)
        surprise(paces, PLAIN, 0.4)
        surprise(paces, LONG, 1.4)
    assert paces.log_s()[PLAIN] == pytest.approx(0.4, abs=0.05)
    assert paces.log_s()[LONG] == pytest.approx(1.4, abs=0.05)


def test_arm_that_was_probed_is_known_relative_to_the_chosen_one() -> None:
    """Its window was as slow as the machine was then, of which the next window of the chosen arm tells more."""
    paces = paces_of(plain=0.0, long=1.0)
    for _ in range(20):
        paces.pass_time(1.0, 0.0)
        surprise(paces, LONG, 1.0)
    paces.pass_time(100.0, 0.0)
    surprise(paces, PLAIN, 0.3)
    before = paces.log_s()
    surprise(paces, LONG, 1.3)
    after = paces.log_s()
    assert after[PLAIN] > before[PLAIN], "so the machine had been slow, and not plain decoding lucky or unlucky alone"
    assert math.isclose(after[LONG] - after[PLAIN], 1.0, abs_tol=0.05)


def test_what_is_doubtful_is_replaced_by_the_next_window() -> None:
    paces = paces_of(plain=0.0, long=1.0)
    paces.doubt()
    surprise(paces, LONG, 2.0)
    assert paces.log_s()[LONG] == pytest.approx(2.0, abs=1e-6)
    assert paces.log_s()[PLAIN] == pytest.approx(1.0, abs=1e-3), "it is the machine"
    surprise(paces, PLAIN, 0.5)
    assert paces.log_s()[PLAIN] == pytest.approx(0.5, abs=0.02)
