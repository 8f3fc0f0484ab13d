"""Shapes of token trees that are measured and not served, and trees that fill a given shape with tokens on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_growth import GrownTree


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


class ShapedGrowth:
    """Fills a shape with tokens, depth by depth."""

    def __init__(self, shape: TokenTree) -> None:
        """Starts at the root."""
        self._shape = shape
        self._tokens: dict[int, int] = {}
        self._level = [ROOT]

    def frontier(self) -> list[int]:
        """Returns the nodes that get children next."""
        return [node for node in self._level if self._shape.children(node)]

    def width(self, node: int) -> int:
        """Returns how many children a node gets at most."""
        return len(self._shape.children(node))

    def token(self, node: int) -> int:
        """Returns the token of a node."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """Returns the parent of a node."""
        return self._shape.parents[node]

    def expand(self, nodes: Sequence[int], children: Sequence[Sequence[int]]) -> None:
        """Gives the nodes of the frontier their children.

        Args:
            nodes: the frontier.
            children: tokens in draft order, at most `width` for each. Where there are fewer, the last children are
                missing, and all behind them.
        """
        self._level = []
        for node, tokens in zip(nodes, children, strict=True):
            own = self._shape.children(node)[: len(tokens)]
            assert len(own) == len(tokens), "more children than the shape has"
            self._tokens.update(zip(own, tokens, strict=True))
            self._level += own

    def grown(self) -> GrownTree:
        """Returns the tree."""
        numbers = tuple(sorted(self._tokens))
        return GrownTree([self._tokens[node] for node in numbers], self._shape.cut(numbers).parents, numbers)


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
