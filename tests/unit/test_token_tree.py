"""Shapes of trees of draft tokens."""

from itertools import pairwise, product

import pytest
from cases import every

from draftwire.errors import BlockViolationError, Violation
from draftwire.method.block_shape import CHAIN
from draftwire.options.trees.token_tree import ROOT, TokenTree

EXAMPLE = TokenTree((-1, -1, 0, 1, 0, 2, 2, 1))


def every_shape(most: int) -> list[TokenTree]:
    """Returns every tree of up to so many nodes, in every numbering."""
    return [
        TokenTree(parents)
        for count in range(most + 1)
        for parents in product(*(range(ROOT, node) for node in range(count)))
    ]


def test_tree_is_read_off_its_parents() -> None:
    assert EXAMPLE.depths == (1, 1, 2, 2, 2, 3, 3, 2)
    assert (len(EXAMPLE), EXAMPLE.depth) == (8, 3)
    assert [EXAMPLE.children(node) for node in range(ROOT, 8)] == [(0, 1), (2, 4), (3, 7), (5, 6), *[()] * 5]
    assert EXAMPLE.inner_nodes == (ROOT, 0, 1, 2)
    assert EXAMPLE.path_to(6) == (0, 2, 6)
    assert EXAMPLE.path_to(ROOT) == ()
    assert EXAMPLE.post_order == (5, 6, 2, 4, 0, 3, 7, 1)


def test_nodes_of_every_small_tree_fit_together() -> None:
    shapes = every_shape(5)
    assert len(shapes) == 1 + 1 + 2 + 6 + 24 + 120
    for tree in shapes:
        nodes = range(len(tree))
        assert [tree.path_to(node) for node in nodes] == [
            (*tree.path_to(parent), node) for node, parent in zip(nodes, tree.parents, strict=True)
        ]
        for node in nodes:
            assert len(tree.path_to(node)) == tree.depths[node]
            assert set(tree.is_ancestor[node].nonzero()[0].tolist()) == set(tree.path_to(node))
        for node in (ROOT, *nodes):
            assert tree.children(node) == tuple(child for child in nodes if tree.parents[child] == node)
            assert bool(tree.children(node)) == (node in tree.inner_nodes)
            stated = [tree.inner_nodes[place] for place in tree.distributions_along(tree.path_to(node))]
            assert stated == [each for each in (ROOT, *tree.path_to(node)) if tree.children(each)]
        assert [tree.inner_nodes[place] for place in tree.drawn_from] == list(tree.parents)
        place = {node: index for index, node in enumerate(tree.post_order)}
        assert sorted(place) == list(nodes)
        assert all(place[node] < place[parent] for node, parent in enumerate(tree.parents) if parent != ROOT)
        siblings = [pair for node in (ROOT, *nodes) for pair in pairwise(tree.children(node))]
        assert all(place[first] < place[second] for first, second in siblings)


def test_no_parents_mean_a_chain_and_a_chain_travels_without_them() -> None:
    for count in range(5):
        chain = TokenTree.of(CHAIN, count)
        assert chain == TokenTree.chain(count) == TokenTree.of(tuple(range(-1, count - 1)), count)
        assert chain.is_chain
        assert chain.compact_parents == CHAIN
        assert (len(chain), chain.depth) == (count, count)
    assert not EXAMPLE.is_chain
    assert EXAMPLE.compact_parents == EXAMPLE.parents
    assert TokenTree.of(list(EXAMPLE.parents), 8) == EXAMPLE


@every("parents", [(0,), (-2,), (-1, 1), (-1, 2, 0), (-1, -1, 3)])
def test_parent_that_does_not_come_before_its_child_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(BlockViolationError, match="does not come before it") as raised:
        TokenTree.of(parents, len(parents))
    assert raised.value.violation is Violation.ENCODING


def test_parents_have_to_be_as_many_as_the_tokens() -> None:
    for count in (1, 3):
        with pytest.raises(BlockViolationError, match="as many parents as draft tokens"):
            TokenTree.of((-1, 0), count)


def test_larger_trees_than_the_limits_are_refused() -> None:
    EXAMPLE.check(8, 3)
    TokenTree(()).check(0, 0)
    for limits, message in (
        ((7, 3), "8 draft tokens, at most 7 are accepted"),
        ((8, 2), "3 draft tokens on a path, at most 2"),
    ):
        with pytest.raises(BlockViolationError, match=message) as raised:
            EXAMPLE.check(*limits)
        assert raised.value.violation is Violation.LENGTH


def test_cut_tree_keeps_what_its_nodes_follow() -> None:
    kept = (0, 2, 4, 6)
    cut = EXAMPLE.cut(kept)
    assert cut.parents == (-1, 0, 0, 1)
    for node, old in enumerate(kept):
        assert [kept[own] for own in cut.path_to(node)] == list(EXAMPLE.path_to(old))


def test_nothing_is_left_behind_nodes_that_end_the_tree() -> None:
    assert EXAMPLE.ended_at(()) == tuple(range(8))
    assert EXAMPLE.ended_at((0, 7)) == (0, 1, 3, 7)
    assert EXAMPLE.ended_at((2, 5)) == (0, 1, 2, 3, 4, 7)
    assert EXAMPLE.ended_at((ROOT,)) == ()
    for tree in every_shape(4):
        for end in range(len(tree)):
            kept = tree.ended_at((end,))
            assert [node for node in range(len(tree)) if end not in tree.path_to(node)[:-1]] == list(kept)
