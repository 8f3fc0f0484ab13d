"""The token tree to ask a drafter for."""

from functools import cache

from draftwire.method.rounds import DraftTree
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_shapes import shape_by_rank

CHANCES = (0.71, 0.11, 0.04, 0.021, 0.016, 0.014, 0.007, 0.005)
"""How often the child of a rank is accepted, of children that are drawn without replacement: on the embedded pair at
temperature 1, by `calibrate` of benchmarks/tree_efficiency.py."""


def tree_to_draft(num_nodes: int, depth: int, *, has_shape: bool) -> DraftTree:
    """Returns the tree of a round.

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
