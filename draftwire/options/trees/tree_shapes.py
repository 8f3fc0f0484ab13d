"""Shapes of token trees that are chosen before anything is drafted.

Where siblings are drawn and the rule reads their distributions, a shape must not depend on drawn tokens that are not
kept; one that is fixed in advance never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from draftwire.options.trees.token_tree import ROOT, TokenTree


def shape_of_widths(widths: Sequence[int]) -> TokenTree:
    """Returns the tree in which all tokens of a depth have equally many children.

    Args:
        widths: of the last committed token, of those that follow it, and so on.
    """
    parents: list[int] = []
    level = [ROOT]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return TokenTree(tuple(parents))


def shape_by_acceptance(acceptance: Sequence[Sequence[float]], num_nodes: int) -> TokenTree:
    """Returns the tree of at most so many nodes with the most accepted tokens on average, by dynamic programming.

    If the chance of a node depends on its depth and its rank among its siblings alone, as measured, the mean number of
    accepted tokens is the sum over nodes of the product of the chances on their paths.

    Args:
        acceptance: for each depth, from the children of the last committed token on, the chance that the child of a
            rank is accepted, given that its parent is: how often it was, over all rounds that came so far. As many
            depths and ranks as the tree may have.
        num_nodes: draft tokens.

    Source: Chen et al. 2024, Sequoia (arXiv 2402.12374), section 3.1.
    """
    planned = _below(acceptance, num_nodes, 0)
    parents: list[int] = []
    level = [(ROOT, planned[num_nodes])]
    while level:
        following: list[tuple[int, _Subtree]] = []
        for parent, subtree in level:
            for child in subtree.children:
                following.append((len(parents), child))
                parents.append(parent)
        level = following
    return TokenTree(tuple(parents))


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


@dataclass(frozen=True, slots=True)
class _Subtree:
    """The best way to spend nodes below one."""

    value: float
    """Accepted tokens below it, on average, if it is accepted."""
    children: "tuple[_Subtree, ...]"


def _below(acceptance: Sequence[Sequence[float]], num_nodes: int, depth: int) -> list[_Subtree]:
    """Returns the best subtrees below a node of a depth, of up to 0, 1, ... `num_nodes` nodes."""
    nothing = _Subtree(0.0, ())
    if depth == len(acceptance) or num_nodes == 0:
        return [nothing] * (num_nodes + 1)
    deeper = _below(acceptance, num_nodes - 1, depth + 1)
    best = [nothing] * (num_nodes + 1)  # with the children from a rank on
    for chance in reversed(acceptance[depth]):
        best = [
            max(
                (
                    _Subtree(
                        chance * (1.0 + deeper[size - 1].value) + best[left - size].value,
                        (deeper[size - 1], *best[left - size].children),
                    )
                    for size in range(1, left + 1)
                ),
                key=lambda subtree: subtree.value,
                default=nothing,
            )
            for left in range(num_nodes + 1)
        ]
    return best
