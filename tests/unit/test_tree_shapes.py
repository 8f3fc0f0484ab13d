"""Shapes of trees, and how trees of draft tokens grow."""

from itertools import permutations, product

import pytest
import torch
from cases import every

from benchmarks.planned_trees import ShapedGrowth, shape_by_acceptance, shape_of_widths
from benchmarks.tree_efficiency import growth_of, opt_tree, spec_exec
from draftwire.method.distributions import QuantizedRows, race
from draftwire.options.trees.growth_plan import GrowthPlan
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_growth import log_race_chances

torch.set_num_threads(1)


def value_of(shape: TokenTree, acceptance: list[list[float]]) -> float:
    """Returns the mean number of accepted tokens."""
    chances: list[float] = []
    for node, parent in enumerate(shape.parents):
        depth = shape.depths[node] - 1
        rank = shape.children(parent).index(node)
        if depth >= len(acceptance) or rank >= len(acceptance[depth]):
            return -1.0
        chances.append((1.0 if parent == ROOT else chances[parent]) * acceptance[depth][rank])
    return sum(chances)


def test_widths_give_every_token_of_a_depth_as_many_children() -> None:
    assert shape_of_widths((2, 1, 2)).parents == (-1, -1, 0, 1, 2, 2, 3, 3)
    assert shape_of_widths((1, 1, 1)).is_chain
    assert shape_of_widths(()).parents == shape_of_widths((0, 3)).parents == ()


@every("seed", range(6))
def test_planned_shape_accepts_as_much_as_the_best_of_all_shapes(seed: int) -> None:
    """Also where a later child is accepted more often than an earlier one; all trees of six nodes are tried."""
    generator = torch.Generator().manual_seed(seed)
    acceptance = [(0.5 * torch.rand(3, generator=generator)).tolist() for _ in range(4)]
    trees = [TokenTree(parents) for parents in product(*(range(ROOT, node) for node in range(6)))]
    planned = shape_by_acceptance(acceptance, 6)
    assert value_of(planned, acceptance) == pytest.approx(max(value_of(tree, acceptance) for tree in trees))
    assert len(planned) <= 6
    assert list(planned.parents) == sorted(planned.parents), "level by level"


def test_planned_shape_stays_within_the_measured_depths_and_ranks() -> None:
    assert shape_by_acceptance([[0.9, 0.5]], 8).parents == (-1, -1)
    assert shape_by_acceptance([[0.9], [0.9], [0.9]], 8).is_chain
    assert shape_by_acceptance([[0.9]], 0).parents == ()
    assert shape_by_acceptance([[0.6, 0.3], [0.6, 0.3]], 3).parents in ((-1, -1, 0), (-1, 0, -1))


def test_shaped_tree_loses_what_would_follow_a_missing_child() -> None:
    growth = ShapedGrowth(TokenTree((-1, -1, 0, 1, 1, 3)))
    assert growth.frontier() == [ROOT]
    growth.expand([ROOT], [[7, 8]])
    assert growth.frontier() == [0, 1]
    assert [growth.width(node) for node in (0, 1)] == [1, 2]
    growth.expand([0, 1], [[], [5]])
    assert growth.frontier() == [3]
    assert (growth.token(3), growth.parent(3)) == (5, 1)
    growth.expand([3], [[6]])
    assert growth.frontier() == []
    grown = growth.grown()
    assert (grown.token_ids, grown.parents, grown.numbers) == ([7, 8, 5, 6], (-1, -1, 1, 2), (0, 1, 3, 5))


def table(seed: int, vocab_size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)).log_softmax(dim=1)


def grown_on(plan: GrowthPlan, rows: torch.Tensor) -> tuple[dict[tuple[int, ...], float], list[int]]:
    """Returns the paths of a tree that grew on an order-1 table with their chances, and the nodes that passes read."""
    growth, passes = growth_of(plan), []
    while nodes := growth.frontier():
        passes.append(len(nodes))
        growth.expand(nodes, rows[[len(rows) - 1 if node == ROOT else growth.token(node) for node in nodes]])
    grown = growth.grown()
    tree, paths = TokenTree(grown.parents), {}
    for node in range(len(tree)):
        path = tuple(grown.token_ids[step] for step in tree.path_to(node))
        paths[path] = float(sum(rows[before, token] for before, token in zip((-1, *path), path, strict=False)))
    assert len(paths) == len(tree), "no path twice"
    return paths, passes


def best_paths(rows: torch.Tensor, num_nodes: int, depth: int) -> list[float]:
    """Returns the chances of the best paths of all."""
    found = [
        float(sum(rows[before, token] for before, token in zip((-1, *path), path, strict=False)))
        for length in range(1, depth + 1)
        for path in product(range(rows.shape[1]), repeat=length)
    ]
    return sorted(found, reverse=True)[:num_nodes]


@every("seed", range(5))
def test_tree_that_reads_all_its_nodes_is_the_best_of_all(seed: int) -> None:
    rows = table(seed)
    for plan in (opt_tree(12, 4, 0.0), spec_exec(12, 4, 3, 100)):
        paths, _ = grown_on(plan, rows)
        assert sorted(paths.values(), reverse=True) == pytest.approx(best_paths(rows, 12, 4))
    paths, passes = grown_on(GrowthPlan.eagle2(12, 4, per_pass=3), rows)
    assert passes[0] == 1
    assert max(passes) <= 3
    assert len(passes) <= 4
    assert len(paths) == 12
    assert sum(torch.tensor(list(paths.values())).exp()) <= sum(torch.tensor(best_paths(rows, 12, 4)).exp()) + 1e-6


def test_passes_end_where_they_gain_too_little_or_have_no_nodes() -> None:
    sharp = torch.full((4, 3), -20.0, dtype=torch.float64)
    sharp[:, 0] = -0.01
    assert len(grown_on(opt_tree(10, 8, 0.0), sharp)[1]) == 8
    assert len(grown_on(opt_tree(10, 8, 0.965), sharp)[1]) == 4
    assert grown_on(opt_tree(0, 8, 0.0), sharp) == ({}, [])
    assert grown_on(opt_tree(8, 0, 0.0), sharp) == ({}, [])
    impossible = torch.where(sharp < -1.0, -torch.inf, sharp)
    paths, _ = grown_on(GrowthPlan.eagle2(10, 3, 4), impossible)
    assert sorted(paths) == [(0,), (0, 0), (0, 0, 0)]


def test_large_trees_go_back_to_nodes_that_were_left_out_of_a_pass() -> None:
    rows = table(3)
    once, _ = grown_on(GrowthPlan(20, 4, 20, 2, 4), rows)
    again, passes = grown_on(spec_exec(20, 4, 2, 10), rows)
    assert all(count <= 2 for count in passes)
    assert len(passes) == 10
    assert sum(torch.tensor(list(again.values())).exp()) > sum(torch.tensor(list(once.values())).exp())


def test_race_chances_rank_as_the_race_and_sharper_ones_trust_it_more() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = table(1)
    times = torch.empty(log_probs.shape, dtype=torch.float64).exponential_(generator=generator)
    log_probs[2, 3] = -torch.inf
    winners = race(log_probs.exp(), times).winners
    leads = []
    for sharpness in (0.5, 1.0, 4.0):
        chances = log_race_chances(log_probs, times, sharpness)
        assert torch.equal(chances.argmax(dim=1), winners)
        assert (chances.exp().sum(dim=1) - 1.0).abs().max() < 1e-12
        assert chances[2, 3] == -torch.inf
        leads.append(float(chances.max(dim=1).values.mean()))
    assert leads == sorted(leads)


def test_tokens_are_drawn_without_replacement_in_proportion_to_the_rest() -> None:
    """All orders, by uniforms in the middle of every cell of the weights."""
    ids, weights = torch.tensor([[4, 9, 2, 7]]), torch.tensor([[5, 2, 1, 0]])
    grid = (torch.arange(280, dtype=torch.float64) + 0.5) / 280
    counts: dict[tuple[int, ...], int] = {}
    first, second = (part.flatten() for part in torch.meshgrid(grid, grid, indexing="ij"))
    uniforms = torch.stack([first, second], dim=1)
    rows = QuantizedRows(ids.expand(len(uniforms), -1), weights.expand(len(uniforms), -1))
    for pair in rows.draw_distinct(uniforms).tolist():
        counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    own = dict(zip((4, 9, 2), (5, 2, 1), strict=True))
    expected = {(a, b): round(280 * own[a] / 8) * round(280 * own[b] / (8 - own[a])) for a, b in permutations(own, 2)}
    for pair in expected.keys() | counts.keys():
        assert abs(counts.get(pair, 0) - expected.get(pair, 0)) <= 280, "a cell of the grid, at a border"
    drawn = QuantizedRows(ids, weights).draw_distinct(torch.tensor([[0.0, 0.5, 0.999, 0.2]], dtype=torch.float64))
    assert drawn.tolist()[0] == [4, 9, 2, -1]
    last = QuantizedRows(ids, weights).draw_distinct(torch.full((1, 4), 1.0 - 2.0**-53, dtype=torch.float64))
    assert last.tolist()[0] == [2, 9, 4, -1]
    single = QuantizedRows(ids, weights).draw_distinct(uniforms[:1, :1])
    assert torch.equal(single[:, 0], QuantizedRows(ids, weights).draw(uniforms[:1, 0]))
