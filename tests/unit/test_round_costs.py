"""What rounds of arms are expected to cost that were measured, and that were not."""

import math

import pytest

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.round_costs import MOST_SLOWNESS, RoundCosts, WindowSums
from draftwire_gateway.speculation.windows import Yields
from tests.unit.simulated_sessions import costs_of, of


def test_price_of_rows_grows_with_the_sessions_and_that_of_passes_does_not() -> None:
    costs, length = RoundCosts(), 4
    costs.add(PLAIN, WindowSums(10, 10 * 0.030, 10 * 0.030, 0.0, 10, 10.0), 1.0, 1.0)
    arm = Arm(DraftSource.DRAFTER, length)
    assert not costs.tells_price_of(DraftSource.DRAFTER)
    drafting_s, rows_s, hops_s = 0.008, 0.016, 0.005
    round_s = 0.030 + drafting_s + rows_s + hops_s
    costs.add(arm, WindowSums(10, 10 * round_s, 10 * (0.030 + rows_s), 10 * drafting_s, 10, 10.0), 1.0, 1.0)
    for growth in (0.25, 1.0, 4.0):
        assert costs.price_s(arm, growth) == pytest.approx(drafting_s + growth * rows_s + hops_s)


def test_source_of_which_nothing_is_known_is_tried_at_once_at_a_new_load() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    assert costs.round_s(Arm(DraftSource.VERIFIER, 4)) == pytest.approx(0.004), "as if guesses were free"
    costs.add(Arm(DraftSource.VERIFIER, 4), WindowSums(20, 0.2, 0.1, 0.0, 20, 20.0), 1.0, 1.0)
    assert costs.round_s(Arm(DraftSource.VERIFIER, 4)) == pytest.approx(0.01)
    assert costs.bias(of(4)) == pytest.approx(1.0)


def test_lengths_that_were_not_measured_are_on_the_line_of_the_others() -> None:
    costs = costs_of(of0=0.003, of1=0.004, of2=0.005, of4=0.007)
    assert costs.round_s(of(3)) == pytest.approx(0.006)
    assert costs.round_s(of(8)) == pytest.approx(0.011)
    assert costs.round_s(of(0)) == pytest.approx(0.003)
    alone = costs_of(of4=0.012)
    assert alone.round_s(of(8)) == pytest.approx(0.012 + 4 * alone.draft_token_s(DraftSource.DRAFTER))
    assert alone.round_s(of(0)) == pytest.approx(0.002), "at best, a step of the verifier"


def test_lengths_next_to_each_other_say_little_of_those_far_from_them() -> None:
    price_s = 0.001
    costs = costs_of(of6=0.0565, of8=0.050)  # a window of the shorter one happened to be slow
    assert 0.050 - 4 * price_s < costs.round_s(of(4)) < 0.0565
    costs = costs_of(of1=0.010, of8=0.080)
    assert costs.round_s(of(4)) == pytest.approx(0.040, rel=0.05), "those far apart say all"


def test_shorter_rounds_are_never_expected_to_take_next_to_nothing() -> None:
    costs = RoundCosts()
    for length, seconds in ((4, 0.4), (8, 1.5)):  # a line through them says that 3 tokens take 0.12 s, and 2 none
        costs.add(of(length), WindowSums(10, 10 * seconds, 10 * seconds, 0.0, 20, 20.0), 1.0, 1.0)
    assert [costs.round_s(of(length)) for length in (0, 1, 2)] == [pytest.approx(0.08)] * 3


def of_rounds(round_s: float, draft_s: float = 0.0) -> WindowSums:
    return WindowSums(20, 20 * round_s, 10 * round_s, 20 * draft_s, 20, 20.0)


def test_probe_in_a_slow_time_is_compared_with_the_chosen_arm_around_it() -> None:
    costs = RoundCosts()
    for _ in range(10):
        costs.add(PLAIN, of_rounds(0.004), 1.0, 1.0)
        costs.add(of(4), of_rounds(0.012, 0.004), 1.0, 1.0, is_probe=True)
    for slowness in (1.0, 1.5):
        for _ in range(20):
            costs.add(PLAIN, of_rounds(0.004 * slowness), 1.0, 1.0)
        costs.add(of(4), of_rounds(0.012 * slowness, 0.004 * slowness), 1.0, 1.0, is_probe=True)
    for _ in range(20):
        costs.add(PLAIN, of_rounds(0.004), 1.0, 1.0)
    assert costs.round_s(PLAIN) == pytest.approx(0.004, rel=0.01)
    measured = costs.measured(of(4))
    assert measured is not None
    assert measured.rest_s == pytest.approx(0.012 - 0.004, rel=0.1)


def test_single_window_counts_as_twice_as_slow_at_most() -> None:
    one, two = (costs_of(of0=0.004) for _ in range(2))
    one.add(PLAIN, of_rounds(4.0), 1.0, 1.0)
    two.add(PLAIN, of_rounds(0.004 * MOST_SLOWNESS), 1.0, 1.0)
    assert one.round_s(PLAIN) == pytest.approx(two.round_s(PLAIN))


def test_probe_changes_what_is_known_of_its_arm_alone() -> None:
    """Else the ratio of two arms would stay what their first windows made of it."""
    costs = costs_of(of0=0.004, of4=0.012)
    for _ in range(30):
        costs.add(of(4), of_rounds(0.012, 0.004), 1.0, 1.0)
        costs.add(PLAIN, of_rounds(0.003), 1.0, 1.0, is_probe=True)
    assert costs.round_s(PLAIN) == pytest.approx(0.003, rel=0.01)
    assert costs.round_s(of(4)) == pytest.approx(0.012, rel=0.01)


def test_probe_says_nothing_of_drafting_other_lengths() -> None:
    costs = costs_of(of0=0.004, of2=0.008, of4=0.012)
    costs.add(of(2), of_rounds(0.008, 0.004), 1.0, 1.0, is_probe=True)
    measured = costs.measured(of(4))
    assert measured is not None
    assert measured.draft_s == pytest.approx(0.004)
    costs.add(of(2), of_rounds(0.008, 0.004), 1.0, 1.0)
    assert measured.draft_s > 0.0042, "it is the drafter that has become slower"


def test_lucky_window_of_drafts_makes_plain_decoding_look_no_slower() -> None:
    """By as much as all windows after it are slower."""
    costs = costs_of(of0=0.010)
    costs.add(of(4), of_rounds(0.016, 0.004), 1.0, 1.0, is_probe=True)
    for _ in range(20):
        costs.add(of(4), of_rounds(0.020, 0.004), 1.0, 1.0)
    assert measured_s(costs, of(4)) == pytest.approx(0.020, rel=0.02)
    assert 0.010 <= measured_s(costs, PLAIN) < 0.0112, "half of it, since the machine may be the cause"


def test_machine_that_becomes_slower_does_so_for_all_lengths() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    for _ in range(60):
        costs.add(of(4), of_rounds(0.024, 0.008), 1.0, 1.0)
    assert 0.0064 < costs.round_s(of(0)) < 0.008, "most of what changes in all windows of a minute is the machine"


def test_what_is_doubtful_is_a_guess_that_the_next_window_replaces() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    costs.doubt()
    assert costs.measured(PLAIN) is None
    assert not costs.is_empty
    assert costs.is_doubtful(DraftSource.DRAFTER)
    assert not costs.is_doubtful(DraftSource.VERIFIER), "of which nothing was measured"
    assert costs.round_s(of(4)) == pytest.approx(0.012), "better than nothing"
    costs.add(of(4), of_rounds(0.024, 0.008), 1.0, 1.0)
    measured = costs.measured(of(4))
    assert measured is not None
    assert not costs.is_doubtful(DraftSource.DRAFTER)
    assert (measured.round_s, measured.num_windows) == (pytest.approx(0.024), 1)
    assert costs.measured(PLAIN) is None
    assert costs.round_s(PLAIN) == pytest.approx(0.008, rel=1e-4), "it is the machine that is slower than it was"


SHORT, LONG = Arm(DraftSource.VERIFIER, 4), Arm(DraftSource.VERIFIER, 8)


def window_of(slowness: float, draft_tokens: float) -> WindowSums:
    return WindowSums(20, 0.2 * slowness, 0.1 * slowness, 0.0, 20, 20.0, round(20 * draft_tokens))


def measured_s(costs: RoundCosts, arm: Arm) -> float:
    measured = costs.measured(arm)
    assert measured is not None
    return measured.round_s


@pytest.mark.parametrize(
    ("slowness", "draft_tokens", "of_plain"),
    [
        (1.5, 0.5, 1.5),
        (1.5, 2.0, 1.0),  # where rows are all of a step, twice as many make it twice as long
        (2.5, 2.0, 1.25),
        (0.8, 0.5, 0.8),
        (0.8, 0.0, 1.0),
        (1.0, 2.0, 1.0),
    ],
)
def test_frequent_drafts_do_not_make_plain_decoding_look_slower(
    slowness: float, draft_tokens: float, of_plain: float
) -> None:
    """A verifier that drafts by itself has a guess in some rounds only, and in more of them of some texts."""
    costs = costs_of(of0=0.010)
    for arm in 20 * (SHORT, LONG):
        costs.add(arm, window_of(1.0, 0.5), 1.0, 1.0, is_probe=True)
    window = window_of(slowness, draft_tokens)
    for _ in range(60):
        costs.add(SHORT, window, 1.0, 1.0)
    assert measured_s(costs, SHORT) == pytest.approx(0.010 * slowness, rel=1e-3)
    for arm, factor in ((PLAIN, of_plain), (LONG, slowness)):  # which would have had as many guesses
        least, most = sorted((factor**0.6, factor))  # some of what rows do not explain may be the arm
        assert 0.0099 * least <= measured_s(costs, arm) <= 0.0101 * most


def test_each_way_to_draft_has_its_own_yield() -> None:
    yields, arms = Yields(), (PLAIN, SHORT, of(4))
    for expected, arm in enumerate(arms, 2):
        yields.of(arm).add(1000, 1000.0 * expected)
    assert [yields.share(arm, 1e-6) for arm in arms] == [pytest.approx(1 / expected) for expected in (2, 3, 4)]
    assert yields.of(LONG) is yields.of(SHORT)
    yields.fade(30.0)
    assert all(yields.of(arm).num_tokens == pytest.approx(1000 * math.exp(-1.0)) for arm in arms)
