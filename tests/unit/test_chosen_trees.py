"""Token trees among what is chosen from: where they pay, and what is expected of sizes that were not tried."""

import random
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.pair_simulation import Simulation, round_times
from benchmarks.simulated_pair import FIXED
from draftwire.method.round_parts import TreePart
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate
from draftwire_gateway.speculation.pair_chooser import TREES, PairChooser
from draftwire_gateway.speculation.pairs import PairName, Pairs
from draftwire_gateway.speculation.round_costs import RoundCosts, WindowSums
from draftwire_gateway.speculation.session_length import SessionLength
from draftwire_gateway.speculation.tree_acceptance import CHANCES, TreePrior, sibling_chances
from draftwire_gateway.speculation.tree_acceptance import SIBLINGS as SIBLING_SHARES
from tests.unit.simulated_sessions import MS, pair_of

SIBLINGS = ((0.46, 0.13, 0.12, 0.04, 0.04, 0.03, 0.03), (0.1, 0.03))
"""Where the first child is not right, how often the others are: first racers of a 1.5B/0.5B pair under `coupled`, 512
places; and of a drafter that knows only one token."""
FIXED_TREES = (*FIXED, *(Arm(DraftSource.TREES, *shape) for shape in TREES))

TREES_OF = {
    "rows of a GPU": (20, 2, 0.5, 0.8, SIBLINGS[0], Arm(DraftSource.TREES, 8, 32)),
    "passes of the drafter are dear": (20, 2, 2, 0.5, SIBLINGS[0], Arm(DraftSource.TREES, 4, 16)),
    "the drafter knows one token": (20, 200, 0.5, 0.9, SIBLINGS[1], Arm(DraftSource.DRAFTER, 8)),
    "nothing pays": (20, 1000, 4, 0.1, SIBLINGS[1], PLAIN),
}


@pytest.mark.parametrize("case", TREES_OF)
def test_trees_are_chosen_where_they_pay_and_cost_nothing_elsewhere(case: str) -> None:
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
        session.observe(round_times(number, now, now + 1e-3, 8, 2, tree=TreePart(2)))
        now += 1e-3
    assert chooser.acceptance.chains[DraftSource.DRAFTER].num_drafts == 0
    assert {known: one.num_drafts for known, one in chooser.acceptance.trees.items() if one.num_drafts} == {arm: 40}
    assert chooser.acceptance.trees[arm].survival(4)[1:3] == pytest.approx([1.0, 0.0], abs=0.15)
    other = PairChooser(8, 4, (DraftSource.DRAFTER, DraftSource.TREES))
    session = SessionLength(other)
    assert not session.next_draft(0, 100, 0.0).num_nodes
    session.observe(round_times(0, 0.0, 0.1, 8, 2, tree=TreePart(3)))  # of a drafter that was given up
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


def test_trees_of_an_untried_size_are_expected_to_fare_as_tried_ones() -> None:
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
        costs.add(arm, WindowSums(10, 10 * round_ms * MS, 10 * verify_ms * MS, 10 * draft_ms * MS, 10, 10.0), 1.0, 1.0)

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
        times = round_times(
            number, now, now + took_s, arm.num_rows, accepted, 0.001, 0.018, tree=TreePart(depth) if depth else None
        )
        session.observe(times)
        now, number, with_trees_s = now + took_s, number + 1, with_trees_s + took_s * bool(arm.num_nodes)
    assert 0.0 < with_trees_s < 10.0


def test_sizes_with_as_many_nodes_are_told_apart_by_their_depth() -> None:
    costs = RoundCosts()
    for arm, num_tokens in ((Arm(DraftSource.TREES, 4, 16), 900), (Arm(DraftSource.TREES, 8, 16), 1100)):
        costs.add(arm, WindowSums(400, 10.0, 8.0, 1.0, num_tokens, 1000.0), 1.0, 1.0)
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
