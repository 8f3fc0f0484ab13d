"""The token tree to ask a drafter for."""

from functools import cache

from draftwire.drafting.tree_shapes import shape_by_rank
from draftwire.method.rounds import DraftTree
from draftwire.method.token_tree import TokenTree
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.speculation.tree_acceptance import CHANCES


def tree_to_draft(generation: Generation, num_nodes: int, depth: int) -> DraftTree | None:
    """Returns the tree of a round; None for a chain.

    Where distributions are sent, the shape is given: it depends on these numbers alone, never on drafted tokens. Else
    the drafter finds the best nodes.

    Args:
        generation: of the session.
        num_nodes: draft tokens; 0 for a chain.
        depth: draft tokens on a path.
    """
    if not num_nodes:
        return None
    if not generation.rule.needs_draft_probs or generation.sampling.greedy:
        return DraftTree(num_nodes)
    shape = _drawn_shape(num_nodes, depth)
    return DraftTree(len(shape), shape)


@cache
def _drawn_shape(num_nodes: int, depth: int) -> TokenTree:
    return shape_by_rank(CHANCES, num_nodes, depth)
