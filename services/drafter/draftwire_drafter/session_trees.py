"""Token trees of a drafter's sessions: which may be asked for, and what is drafted for them. No torch here."""

from dataclasses import replace

from draftwire.drafting.growth_plan import GrowthPlan
from draftwire.drafting.strategy import DraftRequest
from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import Calibration, DraftSessionSpec, DraftTree
from draftwire.method.token_tree import TokenTree


def check_trees(spec: DraftSessionSpec, most_nodes: int) -> None:
    """Checks that a session may have token trees, if it asks for them.

    Args:
        spec: of the session.
        most_nodes: largest tree that the drafter drafts.

    Raises:
        InvalidRequestError: it may not.
    """
    if spec.max_tree_nodes > most_nodes:
        raise InvalidRequestError(f"num_draft_nodes {spec.max_tree_nodes} is above the drafter's limit {most_nodes}")
    if spec.max_tree_nodes and spec.max_branches:
        raise InvalidRequestError("a session that is drafted ahead for has no token trees")


def check_tree(calibration: Calibration, spec: DraftSessionSpec) -> None:
    """Checks the tree that a calibration asks for, if it asks for one.

    Args:
        calibration: within the session's other limits.
        spec: of the session.

    Raises:
        ProtocolViolationError: the session has no such trees.
    """
    tree, parameters = calibration.tree, spec.parameters
    if tree is None:
        return
    if tree.num_nodes > spec.max_tree_nodes:
        raise ProtocolViolationError(
            f"a tree of {tree.num_nodes} draft tokens wanted, the limit is {spec.max_tree_nodes}"
        )
    if tree.shape is not None and tree.shape.depth > calibration.num_draft_tokens:
        raise ProtocolViolationError("a tree deeper than the number of draft tokens wanted")
    if tree.shape is None and parameters.rule.needs_draft_probs and not parameters.sampling.greedy:
        raise ProtocolViolationError("a tree whose distributions are sent has no shape")


def tree_request(request: DraftRequest, tree: DraftTree, *, can_draw: bool = True) -> DraftRequest:
    """Returns the request for a tree.

    Args:
        request: for a chain as long as the tree is deep.
        tree: was checked.
        can_draw: whether the strategy can draw trees with their distributions. If not, it drafts the chain.
    """
    if tree.shape is None:
        return replace(request, growth=GrowthPlan.eagle2(tree.num_nodes, request.num_tokens), num_tokens=tree.num_nodes)
    if not request.is_walked and not can_draw:
        return replace(request, num_tokens=tree.shape.depth)
    assert isinstance(tree.shape, TokenTree), "no other shape comes"
    return replace(request, shape=tree.shape, num_tokens=tree.num_nodes)
