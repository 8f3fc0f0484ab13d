"""Shapes of token trees that are chosen before anything is drafted.

Where siblings are drawn and the rule reads their distributions, a shape must not depend on drawn tokens that are not
kept; one that is fixed in advance never does.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush

from draftwire.method.rounds import DraftTree
from draftwire.options.trees.token_tree import ROOT, TokenTree

CHANCES = (0.71, 0.11, 0.04, 0.021, 0.016, 0.014, 0.007, 0.005)
"""How often the child of a rank is accepted, of children that are drawn without replacement: on the embedded pair at
temperature 1, by `calibrate` of benchmarks/tree_efficiency.py."""


def tree_to_draft(num_nodes: int, depth: int, *, has_shape: bool) -> DraftTree:
    """Returns the tree to ask a drafter for in a round.

    Args:
        num_nodes: draft tokens.
        depth: draft tokens on a path.
        has_shape: whether the shape is given, as it must be where distributions are sent: it depends on these numbers
            alone, never on drafted tokens. Else the drafter finds the best nodes.
    """
    if not has_shape:
        return DraftTree(num_nodes)
    shape = _drawn_shape(num_nodes, depth)
    return DraftTree(len(shape), shape)


@cache
def _drawn_shape(num_nodes: int, depth: int) -> TokenTree:
    return shape_by_rank(CHANCES, num_nodes, depth)


def shape_by_rank(chances: Sequence[float], num_nodes: int, depth: int) -> TokenTree:
    """Returns the tree of so many nodes with the most accepted tokens on average, where the chance of a node depends on
    its rank among its siblings alone, and falls with it: those whose paths have the largest products.

    Args:
        chances: of the children of each rank, given that their parent is accepted; falling, all below 1.
        num_nodes: draft tokens; fewer if there are not so many nodes.
        depth: draft tokens on a path at most.
    """
    return shape_by_chances([chances] * depth, num_nodes)


def shape_by_chances(chances: Sequence[Sequence[float]], num_nodes: int) -> TokenTree:
    """Returns the same where the chance of a node depends on its depth too.

    Args:
        chances: for each depth, of the children of each rank, given that their parent is accepted; falling with the
            rank. Children without a chance are left out, but for first ones.
        num_nodes: draft tokens; fewer if there are not so many nodes.
    """
    paths: list[tuple[int, ...]] = []  # each node by the ranks on its path
    found: list[tuple[float, tuple[int, ...], float]] = [(-chances[0][0], (0,), 1.0)] if chances else []
    while found and len(paths) < num_nodes:
        chance, path, of_parent = heappop(found)
        paths.append(path)
        depth, following = len(path), path[-1] + 1
        if depth < len(chances):
            heappush(found, (chance * chances[depth][0], (*path, 0), -chance))
        own = chances[depth - 1]
        if following < len(own) and own[following] > 0.0:
            heappush(found, (-of_parent * own[following], (*path[:-1], following), of_parent))
    paths.sort(key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate(paths)} | {(): ROOT}
    return TokenTree(tuple(place[path[:-1]] for path in paths))


def survival_of(shape: TokenTree, chances: Sequence[Sequence[float]]) -> list[float]:
    """Returns the probability that at least 1, 2, ... tokens of a tree are accepted, up to its depth.

    Args:
        shape: of the tree.
        chances: as in `shape_by_chances`, for all its depths and ranks.
    """
    survival, reached = [0.0] * shape.depth, [1.0] * (len(shape) + 1)  # that of the root is last
    for node in (ROOT, *shape.inner_nodes[1:]):
        depth = 0 if node == ROOT else shape.depths[node]
        for child, chance in zip(shape.children(node), chances[depth], strict=False):
            reached[child] = reached[node] * chance
            survival[depth] += reached[child]
    return survival
