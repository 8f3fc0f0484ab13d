"""Chosen lengths of drafts: near the best fixed one in simulated pairs, and what is learnt from which rounds."""

import random
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest

from benchmarks.simulated_pair import FIXED_TREES, SIBLINGS, SimulatedPair, Simulation, round_times, waves
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.speculation.acceptance import MEMORY, NUM_RECENT, AcceptanceEstimate
from draftwire_gateway.speculation.arms import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.pair_chooser import LENGTHS, LONGEST_PAUSE_S, TREES, PairChooser, load_of
from draftwire_gateway.speculation.pairs import MAX_PAIRS, PairName, Pairs
from draftwire_gateway.speculation.round_costs import MOST_SLOWNESS, RoundCosts, WindowSums
from draftwire_gateway.speculation.session_length import SessionLength
from draftwire_gateway.speculation.tree_acceptance import CHANCES, TreePrior, sibling_chances
from draftwire_gateway.speculation.tree_acceptance import SIBLINGS as SIBLING_SHARES
from draftwire_gateway.speculation.windows import Window

MS = 1e-3


def pair_of(verify_ms: float, row_us: float, draft_ms: float, acceptance: float, num_sessions: int) -> SimulatedPair:
    return SimulatedPair(verify_ms * MS, row_us * 1e-6, draft_ms * MS, lambda now: acceptance, num_sessions)


CASES = {
    "nothing is accepted": (pair_of(5, 200, 2, 0.1, 1), 0),
    "nothing is accepted of many": (pair_of(20, 0, 2, 0.1, 16), 0),
    "everything is accepted": (pair_of(20, 0, 0.5, 0.95, 1), 8),
    "rows are dear": (pair_of(5, 1000, 2, 0.5, 1), 0),
    "rows are dear for many": (pair_of(20, 1000, 2, 0.5, 16), 0),
    "short drafts pay": (pair_of(20, 200, 2, 0.5, 1), 2),
    "a slow target with four sessions": (pair_of(20, 200, 0.5, 0.8, 4), 8),
}


@pytest.mark.parametrize("case", CASES)
def test_chosen_lengths_are_nearly_as_fast_as_the_best_fixed_one(case: str) -> None:
    pair, best = CASES[case]
    fixed = {length: Simulation(pair, length).tokens_per_s(15.0, 1.0) for length in {0, 2, 4, 8, best}}
    assert max(fixed, key=lambda length: fixed[length]) == best or fixed[best] > 0.97 * max(fixed.values())
    chosen = Simulation(pair, None).tokens_per_s(40.0, 25.0)
    assert chosen > 0.93 * max(fixed.values()), "the rest are probes, the rarer the longer it runs"


def test_drop_of_acceptance_is_noticed_within_a_second_and_its_rise_after_some() -> None:
    falls = SimulatedPair(0.005, 2e-4, 5e-4, lambda now: 0.9 if now < 10 else 0.1, 1)
    plain = Simulation(falls, 0).tokens_per_s(10.0)
    assert Simulation(falls, None).tokens_per_s(21.0, 11.0) > 0.9 * plain
    rises = SimulatedPair(0.005, 2e-4, 5e-4, lambda now: 0.1 if now < 10 else 0.9, 1)
    best = Simulation(rises, 8).tokens_per_s(40.0, 30.0)
    assert Simulation(rises, None).tokens_per_s(40.0, 30.0) > 0.9 * best


def test_drop_of_acceptance_ends_the_window_in_which_it_is_noticed() -> None:
    """The session's own drafts are short by then, so that no round of the window's length fills it."""
    falls = SimulatedPair(0.010, 0.0, 5e-4, lambda now: 0.9 if now < 8 else 0.1, 1)
    chooser = PairChooser(8, 4)
    Simulation(falls, None, chooser=chooser).tokens_per_s(9.0)
    (load,) = chooser.explain(DraftSource.DRAFTER).loads
    assert load.length <= 1, "as good as plain decoding"


def test_length_that_is_expected_to_gain_is_tried_at_once() -> None:
    slow = pair_of(40, 200, 2, 0.95, 1)  # windows of a second: shares of the time allow a probe every half a minute
    best = Simulation(slow, 8).tokens_per_s(12.0, 1.0)
    assert Simulation(slow, 4).tokens_per_s(12.0, 1.0) < 0.8 * best, "where it begins is much worse"
    assert Simulation(slow, None).tokens_per_s(12.0, 6.0) > 0.95 * best


TREES_OF = {
    "rows of a GPU": (20, 2, 0.5, 0.8, SIBLINGS[0], Arm(DraftSource.TREES, 8, 32)),
    "passes of the drafter are dear": (20, 2, 2, 0.5, SIBLINGS[0], Arm(DraftSource.TREES, 4, 16)),
    "the drafter knows one token": (20, 200, 0.5, 0.9, SIBLINGS[1], Arm(DraftSource.DRAFTER, 8)),
    "nothing pays": (20, 1000, 4, 0.1, SIBLINGS[1], PLAIN),
}


@pytest.mark.parametrize("case", TREES_OF)
def test_trees_are_chosen_where_they_pay_and_cost_nothing_where_they_do_not(case: str) -> None:
    verify_ms, row_us, draft_ms, acceptance, siblings, best = TREES_OF[case]
    pair = replace(pair_of(verify_ms, row_us, draft_ms, acceptance, 1), siblings=siblings)
    fixed = {arm: Simulation(pair, arm).tokens_per_s(13.0, 1.0) for arm in FIXED_TREES if arm.length in (0, 4, 8)}
    assert fixed[best] > 0.98 * max(fixed.values())
    chooser = PairChooser(8, 4, pair.sources)
    chosen = Simulation(pair, None, chooser=chooser).tokens_per_s(30.0, 15.0)
    assert chosen > 0.92 * fixed[best], "the rest are probes, and chance"
    load = chooser.explain(DraftSource.TREES).loads[-1]
    assert load.chosen is best.source
    assert load.estimates[0].num_nodes == 0
    for estimate in load.estimates[1:]:
        assert estimate.num_windows > 0, "nothing is said of others"
        made = fixed[Arm(DraftSource.TREES, estimate.length, estimate.num_nodes)]
        assert estimate.tokens_per_second == pytest.approx(made, rel=0.25)


def test_trees_teach_their_size_alone() -> None:
    """Tokens of a tree have a depth and no place in a chain; a path may end before the tree does."""
    chooser = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    session, now, arm = SessionLength(chooser), 0.0, Arm(DraftSource.TREES, 4, 8)
    chooser._first_arm = arm
    for number in range(40):
        assert session.next_draft(number, 100 if number < 30 else 2, now) == arm._replace(
            length=4 if number < 30 else 2
        )
        session.observe(round_times(number, now, now + 1e-3, 8, 2, draft_depth=2))
        now += 1e-3
    assert chooser.acceptance.chains[DraftSource.DRAFTER].num_drafts == 0
    assert {known: one.num_drafts for known, one in chooser.acceptance.trees.items() if one.num_drafts} == {arm: 40}
    assert chooser.acceptance.trees[arm].survival(4)[1:3] == pytest.approx([1.0, 0.0], abs=0.15)
    other = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    session = SessionLength(other)
    assert not session.next_draft(0, 100, 0.0).num_nodes
    session.observe(round_times(0, 0.0, 0.1, 8, 2, draft_depth=3))  # of a drafter that was given up
    assert other.acceptance.chains[DraftSource.DRAFTER].num_drafts == 0


def test_prior_of_a_tree_is_what_chains_and_siblings_say() -> None:
    chains = AcceptanceEstimate()
    for number in range(400):
        chains.add(2, 0 if number % 2 else 1 if number % 4 else 2)
    first, second = chains.rates(2)
    (wide,) = TreePrior(chains, 3).rates(1)
    assert wide == pytest.approx(first + (1.0 - first) * sum(SIBLING_SHARES[:2]) * first / CHANCES[0])
    assert wide < 1.0
    deep = AcceptanceEstimate(TreePrior(chains, 2)).survival(2)
    assert deep == pytest.approx([first, first * second]), (
        "a second token of this chain is likelier than a second child"
    )
    assert first * second > sibling_chances(first)[0]
    for rate in (0.02, 0.3, 0.6, 0.9, 0.99):
        chances = [rate, *sibling_chances(rate)]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) < 1.0
    assert AcceptanceEstimate(TreePrior(chains, 1)).survival(2) == pytest.approx([first, 0.0])


def test_trees_of_a_size_that_was_not_tried_are_expected_to_fare_as_those_that_were() -> None:
    """Beside what chains say of them: siblings that are better than those of other pairs are so in all trees."""
    chooser = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    tried, untried = Arm(DraftSource.TREES, 4, 8), Arm(DraftSource.TREES, 8, 32)
    before = {arm: chooser.acceptance.mean_tokens(arm) - 1.0 for arm in (tried, untried)}
    for number in range(64):
        chooser.acceptance.count_tree(tried, 4, 1 + number % 2)
    expected = {arm: chooser.acceptance.mean_tokens(arm) - 1.0 for arm in (tried, untried)}
    assert expected[tried] < 0.8 * before[tried]
    assert expected[untried] < 0.8 * before[untried]
    assert expected[untried] > expected[tried]
    chains = chooser.acceptance.chains[DraftSource.DRAFTER]
    near, far = TreePrior(chains, tried.num_nodes), TreePrior(chains, untried.num_nodes)
    far.follow(near, tried.length, expected[tried])
    near.exponent = far.exponent
    assert AcceptanceEstimate(near).mean_tokens(tried.length) - 1.0 == pytest.approx(expected[tried], rel=0.02)
    assert AcceptanceEstimate(far).mean_tokens(untried.length) - 1.0 == pytest.approx(expected[untried], rel=0.02)
    for _ in range(200):
        chooser.acceptance.chains[DraftSource.DRAFTER].add(8, 1)
        chooser.acceptance.count_tree(tried, 4, 4)
    assert chooser.acceptance.mean_tokens(untried) <= 9.0, "no more than there are"


@pytest.mark.parametrize(("acceptance", "siblings"), [(0.6, (0.8,)), (0.4, (0.8,)), (0.8, (0.1,)), (0.9, ())])
def test_what_is_expected_of_larger_trees_is_near_what_they_accept(
    acceptance: float, siblings: tuple[float, ...]
) -> None:
    """However good the siblings of a pair are: also at depths that the smaller trees do not have."""
    pair, draws = pair_of(20, 0, 2, acceptance, 1), random.Random(1)
    pair = replace(pair, siblings=siblings)
    chooser = PairChooser(8, 4, pair.sources)
    chain, tried = Arm(DraftSource.DRAFTER, 4), Arm(DraftSource.TREES, 4, 16)
    for _ in range(60):
        chooser.acceptance.chains[DraftSource.DRAFTER].add(4, pair.num_accepted(chain, 0.0, draws.random))
        chooser.acceptance.count_tree(tried, 4, pair.num_accepted(tried, 0.0, draws.random))
    larger = Arm(DraftSource.TREES, 8, 32)
    accepted = [pair.num_accepted(larger, 0.0, draws.random) for _ in range(2000)]
    assert chooser.acceptance.mean_tokens(larger) == pytest.approx(1.0 + mean(accepted), rel=0.2)


def test_what_trees_cost_beyond_their_rows_is_no_price_of_rows() -> None:
    """Else larger ones are expected to cost so much more that they are never tried."""
    costs = RoundCosts()

    def add(arm: Arm, round_ms: float, verify_ms: float, draft_ms: float) -> None:
        costs.add(arm, WindowSums(10, 10 * round_ms * MS, 10 * verify_ms * MS, 10 * draft_ms * MS, 10, 10.0), 1.0)

    add(PLAIN, 60, 60, 0)
    add(Arm(DraftSource.DRAFTER, 1), 62.1, 60.1, 2)
    add(Arm(DraftSource.TREES, 4, 8), 60 + 15 + 8 * 0.1 + 8, 60 + 15 + 8 * 0.1, 8)
    large = Arm(DraftSource.TREES, 8, 32)
    assert costs.round_s(large) == pytest.approx((60 + 15 + 32 * 0.1 + 16) * MS)
    add(Arm(DraftSource.TREES, 4, 16), 60 + 15 + 16 * 0.3 + 8, 60 + 15 + 16 * 0.3, 8)
    assert costs.row_s(DraftSource.TREES) == pytest.approx((16 * 0.3 - 8 * 0.1) / 8 * MS), "as trees show it"


def test_first_tree_of_a_size_that_fails_is_no_reason_to_expect_more() -> None:
    chooser = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    tried, other = Arm(DraftSource.TREES, 4, 8), Arm(DraftSource.TREES, 8, 32)
    for number in range(200):
        chooser.acceptance.chains[DraftSource.DRAFTER].add(4, number % 4 // 3)
        chooser.acceptance.count_tree(tried, 4, number % 8 // 7)
    expected = [chooser.acceptance.mean_tokens(other)]
    for _ in range(4):
        chooser.acceptance.count_tree(other, 8, 0)
        expected.append(chooser.acceptance.mean_tokens(other))
    assert expected == sorted(expected, reverse=True)


def test_surprise_of_a_size_or_of_chains_forgets_what_other_sizes_accepted() -> None:
    """After a change of the texts each would else be believed in, and tried, one by one."""
    chooser = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    first, second = Arm(DraftSource.TREES, 4, 8), Arm(DraftSource.TREES, 8, 32)

    def drafts() -> list[int]:
        return [chooser.acceptance.trees[arm].num_drafts for arm in (first, second)]

    for _ in range(100):
        chooser.acceptance.count_tree(first, 4, 4)
        chooser.acceptance.count_tree(second, 8, 8)
    before = chooser.acceptance.mean_tokens(second)
    while not chooser.acceptance.trees[first].num_surprises:
        chooser.acceptance.count_tree(first, 4, 0)
    assert drafts() == [chooser.acceptance.trees[first].num_drafts, 0]
    assert chooser.acceptance.mean_tokens(second) < 0.6 * before, "it is expected to fare as the other does now"
    session, now = SessionLength(chooser), 0.0
    for number in range(400):
        arm = session.next_draft(number, 2, now)
        accepted = arm.length if number < 200 else 0
        session.observe(round_times(number, now, now + 0.01, arm.length, accepted, draft_s=0.001))
        now += 0.01
        if chooser.acceptance.chains[DraftSource.DRAFTER].num_surprises:
            break
    assert drafts() == [0, 0]


def test_trees_for_which_texts_end_too_soon_are_not_probed_again_and_again() -> None:
    """Cut for room they tell nothing of the time of whole ones, however well they fare."""
    chooser = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    session, now, number, with_trees_s = SessionLength(chooser), 0.0, 0, 0.0
    while now < 60.0:
        arm = session.next_draft(number, 3, now)
        took_s = 0.020 + 0.001 * arm.num_rows
        accepted = arm.length if arm.num_nodes else min(arm.length, number % 3 == 0)
        depth = arm.length if arm.num_nodes else 0
        times = round_times(number, now, now + took_s, arm.num_rows, accepted, 0.001, 0.018, draft_depth=depth)
        session.observe(times)
        now, number, with_trees_s = now + took_s, number + 1, with_trees_s + took_s * bool(arm.num_nodes)
    assert 0.0 < with_trees_s < 10.0


def test_sizes_with_as_many_nodes_are_told_apart_by_their_depth() -> None:
    costs = RoundCosts()
    for arm, num_tokens in ((Arm(DraftSource.TREES, 4, 16), 900), (Arm(DraftSource.TREES, 8, 16), 1100)):
        costs.add(arm, WindowSums(400, 10.0, 8.0, 1.0, num_tokens, 1000.0), 1.0)
    assert costs.bias(Arm(DraftSource.TREES, 4, 16)) < 1.0 < costs.bias(Arm(DraftSource.TREES, 8, 16))
    assert costs.bias(Arm(DraftSource.TREES, 8, 32)) > 1.0


def test_trees_are_as_large_as_peers_and_lengths_allow() -> None:
    def trees(*limits: int) -> list[tuple[int, int]]:
        arms = PairChooser(limits[0], 4, (DraftSource.DRAFTER, DraftSource.TREES), limits[1]).arms
        return [arm[1:] for arm in arms if arm.num_nodes]

    assert trees(8, 64) == [*TREES]
    assert trees(8, 20) == [(4, 8), (4, 16), (8, 16)]
    assert trees(4, 64) == [(4, 8), (4, 16)]
    assert trees(3, 64) == trees(8, 7) == []
    assert PairName("a:1", "small", max_tree_nodes=8).drafters[DraftSource.TREES] == "small, trees"
    assert DraftSource.TREES not in PairName("a:1", "small", max_tree_nodes=7).drafters
    session = Pairs(8, 4).session_length(PairName("a:1", "small", max_tree_nodes=8))
    assert [arm for arm in session._pair.arms if arm.num_nodes] == [Arm(DraftSource.TREES, 4, 8)]


def test_probes_become_rare() -> None:
    chooser = PairChooser(8, 4)
    Simulation(pair_of(5, 200, 2, 0.1, 1), None, chooser=chooser).tokens_per_s(60.0)
    (load,) = chooser.explain(DraftSource.DRAFTER).loads
    drafted = sum(estimate.num_windows for estimate in load.estimates if estimate.length)
    assert (load.length, load.min_sessions, load.max_sessions) == (0, 1, 1)
    assert 2 <= drafted < 0.05 * load.estimates[0].num_windows


def test_prediction_for_a_length_that_is_not_chosen_is_near_what_it_makes() -> None:
    pair = pair_of(20, 200, 0.5, 0.8, 1)
    chooser = PairChooser(8, 4)
    Simulation(pair, None, chooser=chooser).tokens_per_s(60.0)
    (load,) = chooser.explain(DraftSource.DRAFTER).loads
    for length in (0, 1, 2, 4, 5, 6):
        measured = Simulation(pair, length).tokens_per_s(60.0, 1.0)
        assert load.estimates[length].tokens_per_second == pytest.approx(measured, rel=0.15), length


GUESSING = {
    "certain guesses beside a good drafter": (1.0, 0.9, 200, Arm(DraftSource.VERIFIER, 8)),
    "guesses that come to nothing": (0.0, 0.9, 200, Arm(DraftSource.DRAFTER, 8)),
    "nothing is worth its rows": (0.0, 0.02, 2000, PLAIN),
}


@pytest.mark.parametrize("num_sessions", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GUESSING)
def test_whoever_drafts_best_is_chosen(case: str, num_sessions: int) -> None:
    own, acceptance, row_us, best = GUESSING[case]
    pair = SimulatedPair(0.020, row_us * 1e-6, 5e-4, lambda now: acceptance, num_sessions, own_acceptance=own)
    arms = (
        PLAIN,
        Arm(DraftSource.DRAFTER, 4),
        Arm(DraftSource.DRAFTER, 8),
        Arm(DraftSource.VERIFIER, 4),
        Arm(DraftSource.VERIFIER, 8),
    )
    fixed = {arm: Simulation(pair, arm).tokens_per_s(10.0, 1.0) for arm in arms}
    assert max(fixed, key=lambda arm: fixed[arm]) == best
    chooser = PairChooser(8, 4, pair.sources)
    chosen = Simulation(pair, None, chooser=chooser).tokens_per_s(30.0, 15.0)
    assert chosen > 0.95 * fixed[best], "the rest are probes"
    explained = {source: chooser.explain(source).loads[-1] for source in pair.sources}
    assert {load.chosen for load in explained.values()} == {best.source}
    for source, load in explained.items():
        for length in (4, 8):
            arm = Arm(source, length)
            assert load.estimates[length].tokens_per_second * num_sessions == pytest.approx(fixed[arm], rel=0.25), arm
    if best.source is not None:
        assert explained[best.source].length == best.length


FIRST_SECONDS = {
    "drafts cost three times what they are worth": (SimulatedPair(0.012, 0.0022, 0.010, lambda now: 0.5, 16), 0.93),
    "four sessions to which drafts are worth little": (SimulatedPair(0.005, 0.001, 0.0015, lambda now: 0.5, 4), 0.95),
    "one session to which they are worth nothing": (SimulatedPair(0.012, 0.0022, 0.010, lambda now: 0.5, 1), 0.9),
    "four sessions that gain a third": (SimulatedPair(0.020, 2e-4, 0.002, lambda now: 0.7, 4), 1.15),
}


@pytest.mark.parametrize("case", FIRST_SECONDS)
def test_first_seconds_of_a_load_cost_little(case: str) -> None:
    """Also where the verifier drafts too, whose guesses are bad: what is worth nothing has little of the time."""
    pair, least = FIRST_SECONDS[case]
    pair = replace(pair, own_acceptance=0.05)
    plain = Simulation(pair, 0).tokens_per_s(10.0)
    runs = [Simulation(pair, None, seed, PairChooser(8, 4, pair.sources)).tokens_per_s(10.0) for seed in range(3)]
    assert median(runs) > least * plain


def test_sessions_that_join_one_after_the_other_begin_as_those_that_begin_together() -> None:
    chooser = PairChooser(8, 4)
    for number in range(16):
        chooser.join()
        assert chooser.window(0.001 * number).arm == (PLAIN if number else Arm(DraftSource.DRAFTER, 4))


def test_source_of_which_nothing_is_known_is_tried_soon_however_fast_another_one_is() -> None:
    """Certain guesses beside a drafter that is right nine times of ten: what is expected of the unknown is less."""
    pair = SimulatedPair(0.020, 0.0, 1e-4, lambda now: 0.9, 1, own_acceptance=1.0)
    chooser = PairChooser(8, 4, pair.sources)
    Simulation(pair, None, chooser=chooser).tokens_per_s(10.0)
    assert chooser.explain(DraftSource.VERIFIER).loads[-1].chosen is DraftSource.VERIFIER


def test_texts_that_grow_together_do_not_mislead() -> None:
    """A window at the end of sixteen texts is a slow one, whatever its arm."""
    pair = SimulatedPair(
        *(0.012, 2e-4, 2e-3, lambda now: 0.1, 16),
        own_acceptance=0.1,
        slowness=lambda now: 1.0 + 0.35 * (now % 3.1) / 3.1,
    )
    plain = Simulation(pair, 0).tokens_per_s(31.0)
    runs = [Simulation(pair, None, seed, PairChooser(8, 4, pair.sources)) for seed in range(3)]
    assert median(run.tokens_per_s(40.2, 24.8) for run in runs) > 0.95 * plain


def test_loads_that_come_and_go_cost_no_probes_of_their_own() -> None:
    seeds, pair = range(2), waves(0.75)
    plain = [Simulation(pair, 0, seed).tokens_per_s(70.0, 30.0) for seed in seeds]
    chosen = [Simulation(pair, None, seed).tokens_per_s(70.0, 30.0) for seed in seeds]
    assert sum(chosen) > 0.965 * sum(plain)


class InStep:
    """Sessions whose rounds all begin and end together, and of which no draft token is accepted."""

    def __init__(self, plain_s: float, draft_s: float) -> None:
        self.chooser = PairChooser(8, 4)
        self.now = 0.0
        self._plain_s, self._draft_s = plain_s, draft_s
        self._round = 0

    def resize(self, num_sessions: int) -> None:
        """Lets sessions come, whose prompts are read, or go."""
        while self.chooser.num_sessions < num_sessions:
            self.chooser.join()
            self.chooser.end_reading(self.now)
        while self.chooser.num_sessions > num_sessions:
            self.chooser.leave()

    def step(self) -> Arm:
        """Runs a round of each, and returns its arm."""
        window = self.chooser.window(self.now)
        took_s = self._plain_s + window.arm.length * self._draft_s
        times = (self.now, self.now + took_s, window.arm.length, 0, window.arm.length * self._draft_s, self._plain_s)
        for _ in range(self.chooser.num_sessions):
            own = round_times(self._round, *times)
            self.chooser.count(own, window, took_s)
            if window.arm.length:
                self.chooser.acceptance.chains[DraftSource.DRAFTER].add(window.arm.length, 0)
            self.chooser.observe(own, window, is_whole=True)
        self.now += took_s
        self._round += 1
        return window.arm

    def steps(self, seconds: float) -> list[Arm]:
        """Runs rounds for some time, and returns their arms."""
        until, arms = self.now + seconds, []
        while self.now < until:
            arms.append(self.step())
        return arms


def first_probe(sessions: InStep) -> Window:
    """Returns the window of the first probe of drafts, in which a round has ended."""
    sessions.resize(16)
    while not sessions.step().length:
        pass
    window = sessions.chooser.window(sessions.now)
    assert window.is_probe
    return window


def test_probe_that_a_change_of_load_cuts_short_is_over() -> None:
    sessions = InStep(0.05, 0.05)
    sessions.resize(16)
    while not sessions.step().length:
        pass
    sessions.resize(8)
    assert sessions.steps(0.2) == 4 * [PLAIN]
    sessions.resize(16)
    arms = sessions.steps(1.0)
    assert set(arms) == {PLAIN}, "it has shown enough by one round of sixteen sessions"


def test_single_step_of_a_probe_that_is_cut_short_says_nothing_of_its_arm() -> None:
    """It may be a slow one, by which all lengths of its source would be judged."""
    sessions = InStep(0.05, 0.05)
    sessions.resize(4)
    while not (arm := sessions.step()).length:
        pass
    assert sessions.step() == arm, "the first that counts: sessions may have had the arm before until then"
    sessions.resize(1)
    sessions.step()
    sessions.resize(4)
    assert set(sessions.steps(1.0)) == {PLAIN}
    assert sessions.chooser.estimate(arm, load_of(4)).num_windows == 0


def test_drafts_that_do_not_pay_at_one_load_are_tried_with_care_at_others() -> None:
    sessions = InStep(0.05, 0.05)
    sessions.resize(16)
    assert Arm(DraftSource.DRAFTER, 1) in sessions.steps(5.0)
    sessions.resize(8)
    arms = sessions.steps(3.0)
    assert set(arms) == {PLAIN}
    assert Arm(DraftSource.DRAFTER, 1) in sessions.steps(80.0), "they may pay there all the same"


def test_load_that_is_rare_has_no_more_probes_than_its_share_of_the_time() -> None:
    sessions, arms = InStep(0.05, 0.05), []
    for _ in range(20):
        sessions.resize(16)
        sessions.steps(5.0)
        sessions.resize(8)
        arms += sessions.steps(0.3)
    assert set(arms) == {PLAIN}, "a hundred seconds, but six of this load"


@pytest.mark.parametrize(
    ("num_sessions", "end_s", "since_s"),
    [(4, 60.0, 20.0), pytest.param(64, 30.0, 15.0, marks=pytest.mark.slow)],
)
def test_drafts_are_measured_when_all_sessions_have_a_drafter(num_sessions: int, end_s: float, since_s: float) -> None:
    """However long their drafters read the texts first: one after the other, and beside rounds of those that are ready,
    whose steps are shorter for that.
    """
    pair = pair_of(250, 10_000, 20, 0.8, 4) if num_sessions == 4 else pair_of(5, 200, 0.5, 0.95, 64)
    pair = replace(pair, prompt_s=1.2 if num_sessions == 4 else 0.04)
    plain, drafted = (Simulation(pair, length).tokens_per_s(end_s, since_s) for length in (0, 4))
    assert drafted > 1.05 * plain
    chooser = PairChooser(8, 4)
    chosen = Simulation(pair, None, chooser=chooser).tokens_per_s(end_s, since_s)
    assert chosen > 0.9 * drafted
    estimates = chooser.explain(DraftSource.DRAFTER).loads[-1].estimates
    assert num_sessions * estimates[4].tokens_per_second == pytest.approx(drafted, rel=0.2)


def test_window_goes_on_until_more_than_a_few_sessions_have_had_a_round_of_it() -> None:
    """The others are in runs of another arm: two rounds that share the drafter with nobody are no measure of it."""
    sessions = InStep(0.1, 0.01)
    window = first_probe(sessions)
    chooser, began = sessions.chooser, sessions.now

    def rounds(count: int, now: float) -> None:
        for number in range(count):
            times = (number, now - 0.02, now, window.arm.length, window.arm.length, 0.001, 0.019)
            chooser.observe(round_times(*times), window, is_whole=True)

    window.restart(began)
    rounds(2, began + 3.1)
    assert chooser.window(began + 3.1) is window
    rounds(14, began + 3.3)
    assert chooser.window(began + 3.3) is not window
    assert chooser.estimate(window.arm, window.load).num_windows == 1


@pytest.mark.parametrize("is_calm", [True, False])
def test_burst_that_ends_while_drafters_read_measures_drafts_by_those_that_had_read(is_calm: bool) -> None:
    """And forgets nothing, though no window beside which prompts were read all the time was calm."""
    sessions = InStep(0.1, 0.01)
    if not is_calm:
        sessions.chooser.join()  # its prompt is being read
    window = first_probe(sessions)
    chooser, now = sessions.chooser, sessions.now
    for number in range(30):
        drafted, plain = ((number, now, now + 0.05, length, length, 0.001, 0.04) for length in (window.arm.length, 0))
        chooser.observe(round_times(*drafted), window, is_whole=True)
        chooser.observe(round_times(*plain, why_plain=WhyPlain.WARMING_UP), window, is_whole=False)
        now += 0.05
    assert chooser.window(now) is window
    assert window.sums.num_rounds < 10, "it began anew"
    sessions.resize(1)
    chooser.window(now)
    assert [chooser.estimate(arm, window.load).num_windows > 0 for arm in (window.arm, PLAIN)] == [True, True]


def test_first_window_requests_no_longer_runs_than_it_takes() -> None:
    """Nothing is due then, but what comes next would wait for the runs to end."""
    sessions = InStep(0.3, 0.05)
    sessions.resize(4)
    sessions.step()
    assert sessions.chooser.num_plain_rounds(32, sessions.now) == 9, "of three seconds one round is over"


def test_price_of_rows_grows_with_the_sessions_and_that_of_passes_does_not() -> None:
    costs, length = RoundCosts(), 4
    costs.add(PLAIN, WindowSums(10, 10 * 0.030, 10 * 0.030, 0.0, 10, 10.0), 1.0)
    arm = Arm(DraftSource.DRAFTER, length)
    assert not costs.tells_price_of(DraftSource.DRAFTER)
    drafting_s, rows_s, hops_s = 0.008, 0.016, 0.005
    round_s = 0.030 + drafting_s + rows_s + hops_s
    costs.add(arm, WindowSums(10, 10 * round_s, 10 * (0.030 + rows_s), 10 * drafting_s, 10, 10.0), 1.0)
    for growth in (0.25, 1.0, 4.0):
        assert costs.price_s(arm, growth) == pytest.approx(drafting_s + growth * rows_s + hops_s)


GOING_AHEAD = {
    "a long way between the services": (0.005, 0.0, Arm(DraftSource.AHEAD, 8)),
    "cores that drafter and verifier share": (0.0001, 0.02, Arm(DraftSource.DRAFTER, 8)),
}


@pytest.mark.parametrize("num_sessions", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GOING_AHEAD)
def test_drafter_goes_ahead_of_the_verdict_where_that_pays(case: str, num_sessions: int) -> None:
    hop_s, ahead_s, best = GOING_AHEAD[case]
    pair = SimulatedPair(0.010, 1e-5, 1e-3, lambda now: 0.9, num_sessions, hop_s, ahead=0.7, ahead_s=ahead_s)
    arms = [Arm(source, length) for source in pair.sources for length in (2, 8)]
    fixed = {arm: Simulation(pair, arm).tokens_per_s(10.0, 1.0) for arm in (PLAIN, *arms)}
    assert max(fixed, key=lambda arm: fixed[arm]) == best
    chooser = PairChooser(8, 4, pair.sources)
    assert Simulation(pair, None, chooser=chooser).tokens_per_s(30.0, 15.0) > 0.95 * fixed[best]
    assert chooser.explain(best.source or DraftSource.DRAFTER).loads[-1].chosen is best.source
    known = chooser.acceptance.chains[DraftSource.DRAFTER]
    assert chooser.acceptance.chains[DraftSource.AHEAD] is known, "drafts are the same"
    assert known.survival(1)[0] == pytest.approx(0.9, abs=0.05), "none counts twice"


def test_source_of_which_nothing_is_known_is_tried_at_once_at_a_new_load() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    assert costs.round_s(Arm(DraftSource.VERIFIER, 4)) == pytest.approx(0.004), "as if guesses were free"
    costs.add(Arm(DraftSource.VERIFIER, 4), WindowSums(20, 0.2, 0.1, 0.0, 20, 20.0), 1.0)
    assert costs.round_s(Arm(DraftSource.VERIFIER, 4)) == pytest.approx(0.01)
    assert costs.bias(of(4)) == pytest.approx(1.0)


# What is learnt


def test_acceptance_is_by_position_and_a_token_after_a_refused_one_says_nothing() -> None:
    known = AcceptanceEstimate()
    for accepted in (4, 4, 2, 2) * 100:
        known.add(4, accepted)
    assert known.survival(4) == pytest.approx([1.0, 1.0, 0.5, 0.5], abs=0.03)
    assert known.mean_tokens(4) == pytest.approx(4.0, abs=0.1)
    assert known.survival(6)[5] == pytest.approx(0.5, abs=0.05), "a token fares as the one before it"


def test_texts_that_fare_differently_are_noticed_at_once() -> None:
    known = AcceptanceEstimate()
    for _ in range(1000):
        known.add(4, 4)
    for _ in range(NUM_RECENT):
        known.add(4, 0)
    assert known.survival(1)[0] < 0.35
    shared = AcceptanceEstimate()
    for number in range(2000):
        shared.add(4, 4 * (number % 2))
    before = shared.survival(1)[0]
    assert before == pytest.approx(0.5, abs=0.1), "texts of two kinds are no surprise"


def test_texts_with_easy_and_difficult_parts_are_no_surprise_for_long() -> None:
    known = AcceptanceEstimate()
    surprises = []
    for part in range(200):
        for _ in range(12):
            known.add(8, 8 if part % 2 else 2)
        surprises.append(known.num_surprises)
    assert surprises[20] >= 1
    assert surprises[-1] - surprises[50] <= 5, "once it is known that they have such parts"
    for _ in range(MEMORY):
        known.add(8, 0)
    assert known.survival(1)[0] < 0.5, "but what changes for good is forgotten with time"


def test_prior_counts_until_a_session_knows_better() -> None:
    pair = AcceptanceEstimate()
    for _ in range(500):
        pair.add(2, 2)
    own = AcceptanceEstimate(prior=pair)
    assert own.survival(2) == pair.survival(2)
    for _ in range(60):
        own.add(2, 0)
    assert own.survival(1)[0] < 0.1 < 0.9 < pair.survival(1)[0]


def of(length: int) -> Arm:
    return Arm(DraftSource.DRAFTER, length) if length else PLAIN


def costs_of(**seconds: float) -> RoundCosts:
    costs = RoundCosts()
    for name, round_s in seconds.items():
        length = int(name.removeprefix("of"))
        for _ in range(20):
            costs.add(of(length), WindowSums(20, 20 * round_s, 20 * 0.002, 20 * 0.001 * length, 20, 20.0), 1.0)
    return costs


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
        costs.add(of(length), WindowSums(10, 10 * seconds, 10 * seconds, 0.0, 20, 20.0), 1.0)
    assert [costs.round_s(of(length)) for length in (0, 1, 2)] == [pytest.approx(0.08)] * 3


def test_probe_in_a_slow_time_is_compared_with_the_chosen_arm_around_it() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    slow = WindowSums(20, 20 * 0.006, 20 * 0.003, 0.0, 20, 20.0)
    assert costs.slowness(PLAIN, slow) == pytest.approx(1.5)
    costs.add(of(4), WindowSums(20, 20 * 0.018, 20 * 0.003, 20 * 0.006, 20, 20.0), 1.0, slowness=1.5)
    assert costs.round_s(of(4)) == pytest.approx(0.012)
    assert costs.round_s(PLAIN) == pytest.approx(0.004)
    costs.correct(of(4), 1.1)
    measured = costs.measured(of(4))
    assert measured is not None
    assert measured.round_s == pytest.approx(0.0132)
    assert costs.slowness(PLAIN, WindowSums(1, 1.0)) == MOST_SLOWNESS, "no time of day is that slow"


def test_probe_changes_what_is_known_of_its_arm_alone() -> None:
    """Else the ratio of two arms would stay what their first windows made of it."""
    costs = costs_of(of0=0.004, of4=0.012)
    for _ in range(30):
        costs.add(PLAIN, WindowSums(20, 20 * 0.003, 20 * 0.002, 0.0, 20, 20.0), 1.0, slowness=1.0)
    assert costs.round_s(PLAIN) == pytest.approx(0.003, rel=0.01)
    assert costs.round_s(of(4)) == pytest.approx(0.012)


def test_probes_of_a_busy_beginning_are_forgotten_with_its_costs() -> None:
    """The first calm window forgets all before it; a probe of then has no arm left to be corrected."""
    chooser, now = PairChooser(4, 4), 0.0
    chooser.join()
    for reading in (1, 1, 1, 0, 0, 0):
        chooser._num_reading = reading
        window = chooser.window(now)
        while chooser.window(now) is window:
            now += 0.04
            times = round_times(0, now - 0.04, now, window.arm.length, 0, verify_s=0.02)
            chooser.count(times, window, 0.04)
            chooser.observe(times, window, is_whole=True)
    assert chooser.estimate(window.arm, 0).num_windows


def test_request_that_ends_before_the_next_one_begins_changes_no_load() -> None:
    assert [load_of(sessions) for sessions in (0, 1, 2, 3, 5, 6, 11, 12, 15, 16, 17, 22, 23)] == [
        *(0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 5)
    ]


def test_machine_that_becomes_slower_does_so_for_all_lengths() -> None:
    costs = costs_of(of0=0.004, of4=0.012)
    for _ in range(60):
        costs.add(of(4), WindowSums(20, 20 * 0.024, 20 * 0.004, 20 * 0.008, 20, 20.0), 1.0)
    assert costs.round_s(of(0)) == pytest.approx(0.008, rel=0.01)


def test_rounds_of_a_window_count_and_no_others() -> None:
    chooser = PairChooser(8, 4)
    session = SessionLength(chooser)
    now = 0.0
    assert session.next_draft(0, 100, now).length == 4
    window = chooser.window(now)
    chooser.num_sessions = 1

    def end(number: int, **changes: Any) -> None:
        session.observe(round_times(number, now, now + 0.001, 4, 2, **changes))

    end(0)
    now = 0.01
    assert window.all.num_rounds == 0, "the drafter had the prompt to read"
    for left_out in ({"is_first": True}, {"lost_s": 0.1}, {"gateway_s": 0.1}):
        session.next_draft(1, 100, now)
        end(1, **left_out)
    assert window.all.num_rounds == 0
    session.next_draft(2, 2, now)
    end(2)
    assert window.all.num_rounds == 0, "there was no room for the whole length"
    session.next_draft(3, 100, now)
    end(3)
    assert window.all.num_rounds == 1
    session.next_draft(4, 100, now)
    session.observe(round_times(4, now, now + 0.001, 0, 0, why_plain=WhyPlain.LATE))
    assert window.all.num_rounds == 2, "a late block is what drafting costs"
    assert window.quiet.num_rounds == 2
    session.next_draft(5, 100, now)
    end(5)
    assert window.all.num_rounds == 2, "the drafter had a plain round's token to read"
    other = SessionLength(chooser)
    chooser.num_sessions = 1
    session.next_draft(6, 100, now)
    end(6)
    assert (window.all.num_rounds, window.quiet.num_rounds) == (3, 2), "a prompt is read beside it"
    other.observe(round_times(0, now, now + 1.0, 0, 0, is_first=True))
    session.next_draft(7, 100, now)
    end(7)
    assert window.quiet.num_rounds == 2, "as was beside a part of this one"


def run_rounds(
    chooser: PairChooser, session: SessionLength, first: int, now: float, seconds: float, round_s: float
) -> float:
    """Runs rounds that take so long each, and returns the time after them."""
    for number in range(first, first + round(seconds / round_s)):
        length = session.next_draft(number, 100, now).length
        session.observe(round_times(number, now, now + round_s, length, 0, 0.0, round_s))
        now += round_s
    return now


def beside(chooser: PairChooser) -> SessionLength:
    """Returns a session that has its prompt read, and counts as no load otherwise."""
    reader = SessionLength(chooser)
    chooser.num_sessions = 1
    return reader


def measured_plain_s(chooser: PairChooser) -> float:
    (load,) = chooser.explain(DraftSource.DRAFTER).loads
    return load.estimates[0].round_s


def test_windows_beside_which_prompts_are_read_count_only_where_there_are_no_others() -> None:
    chooser = PairChooser(8, 0)
    session = SessionLength(chooser)
    now = run_rounds(chooser, session, 0, 0.0, 0.05, 0.01)
    reader = beside(chooser)
    now = run_rounds(chooser, session, 100, now, 5.0, 0.05)
    assert measured_plain_s(chooser) > 0.04, "nothing else is known"
    reader.end_reading(now)
    now = run_rounds(chooser, session, 300, now, 3.0, 0.01)
    assert measured_plain_s(chooser) == pytest.approx(0.01), "forgets what was measured beside the reader"
    reader = beside(chooser)
    now = run_rounds(chooser, session, 900, now, 10.0, 0.05)
    assert measured_plain_s(chooser) == pytest.approx(0.01)
    now = run_rounds(chooser, session, 1200, now, 120.0, 0.05)
    assert measured_plain_s(chooser) > 0.03, "prompts are read all the time by now"
    reader.end_reading(now)
    now = run_rounds(chooser, session, 9000, now, 30.0, 0.01)
    assert measured_plain_s(chooser) < 0.015


def test_rounds_that_wait_for_their_reader_count_where_most_do() -> None:
    """A gateway with many sessions has no time for any of them; a reader that is slow among others is left out."""
    for slow_of_ten, expected_s in ((9, 0.02), (1, 0.01)):
        chooser = PairChooser(8, 0)
        session, now = SessionLength(chooser), 0.0
        for number in range(400):
            length = session.next_draft(number, 100, now).length
            seconds, gateway_s = (0.007, 0.013) if number % 10 < slow_of_ten else (0.01, 0.0)
            times = round_times(number, now, now + seconds, length, 0, 0.0, 0.005, gateway_s=gateway_s)
            session.observe(times)
            now += times.duration_s
        assert measured_plain_s(chooser) == pytest.approx(expected_s, rel=0.02)


def test_new_load_begins_with_the_length_of_the_nearest_one_and_plain_runs_are_bounded() -> None:
    chooser = PairChooser(8, 4)
    Simulation(pair_of(5, 200, 2, 0.1, 1), None, chooser=chooser).tokens_per_s(20.0)
    assert chooser.explain(DraftSource.DRAFTER).loads[0].length == 0
    others, now = [SessionLength(chooser) for _ in range(4)], 20.0
    for number in range(12):
        for session in others:
            assert session.next_draft(number, 100, now).length == 0, "as alone, before anything is known"
            assert 1 <= session.num_plain_rounds(32, now) <= 32
            session.observe(round_times(number, now, now + 0.005, 0, 0, 0.0, 0.005, is_first=number == 0))
        now += 0.005
    assert chooser.window(now).load == 2


def test_a_session_drafts_less_by_its_own_acceptance() -> None:
    pair = pair_of(5, 1000, 1, 0.9, 1)
    chooser = PairChooser(8, 8)
    Simulation(pair, None, chooser=chooser).tokens_per_s(40.0)
    assert chooser.explain(DraftSource.DRAFTER).loads[0].length >= 4
    chooser.num_sessions = 0
    poor, now = SessionLength(chooser), 40.0
    lengths = []
    for number in range(200):
        length = poor.next_draft(number, 100, now).length
        poor.observe(round_times(number, now, now + 0.01, length, 0, 0.001 * length, 0.006))
        lengths.append(length)
        now += 0.0001
    assert median(lengths[-100:]) <= 2, "but for windows that try others"


def test_lengths_are_bounded_by_what_the_services_take() -> None:
    assert [arm.length for arm in PairChooser(3, 4).arms] == [0, 1, 2, 3]
    assert [arm.length for arm in PairChooser(16, 4).arms] == list(LENGTHS)
    chooser = PairChooser(8, 5)
    assert chooser.window(0.0).arm.length in (4, 6)


def test_pairs_are_remembered_by_verifier_and_model_up_to_a_bound() -> None:
    pairs = Pairs(16, 4)
    first = pairs.session_length(PairName("a:1", "small"))
    pairs.session_length(PairName("a:1", "small"))
    ((explained,),) = pairs.explain().values()
    assert explained.num_sessions == 2
    first.close()
    for number in range(2 * MAX_PAIRS):
        pairs.session_length(PairName(f"b:{number}", "small")).close()
    assert len(pairs.explain()) <= MAX_PAIRS + 1
    assert pairs.explain()[PairName("a:1", "small")][0].num_sessions == 1, "a pair in use is kept"


def test_pause_between_probes_is_bounded() -> None:
    chooser = PairChooser(1, 1)
    Simulation(pair_of(5, 200, 2, 0.95, 1), None, chooser=chooser).tokens_per_s(400.0)
    windows = [estimate.num_windows for estimate in chooser.explain(DraftSource.DRAFTER).loads[0].estimates]
    assert min(windows) >= 400.0 / (3 * LONGEST_PAUSE_S), "the worse length is tried again and again"
