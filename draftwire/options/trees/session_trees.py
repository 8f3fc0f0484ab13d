"""Token trees of a drafter's sessions: which may be asked for, and what is drafted for them. No torch here."""

from dataclasses import replace
from typing import Protocol, runtime_checkable

from draftwire.drafting.strategy import DraftingStrategy, DraftRequest
from draftwire.engine.draft_session import DraftOption, DraftSession
from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import Calibration, DraftSessionSpec, DraftTree
from draftwire.method.tree_limits import num_read_nodes
from draftwire.options.trees.growth_plan import GrowthPlan, WantedTree, is_walked
from draftwire.options.trees.token_tree import TokenTree


@runtime_checkable
class TreeStrategy(DraftingStrategy, Protocol):
    """A strategy that can draft token trees."""

    @property
    def draws_trees(self) -> bool:
        """Whether it also can where the rule reads distributions. If not, it drafts chains there."""


class SessionTrees(DraftOption):
    """The token trees of a drafter's sessions."""

    def __init__(self, most_nodes: int, *, can_draw: bool = True) -> None:
        """Takes the limits of a drafter.

        Args:
            most_nodes: draft tokens of its largest tree; 0 if it drafts none.
            can_draw: whether it can draw trees with their distributions. If not, it drafts chains there.
        """
        self._most_nodes, self._can_draw = most_nodes, can_draw

    def check_session(self, spec: DraftSessionSpec) -> None:
        """Checks that a session may have token trees, if it asks for them."""
        wanted, most = spec.max_tree_nodes, self._most_nodes
        if wanted > most:
            raise InvalidRequestError(f"num_draft_nodes {wanted} is above the drafter's limit {most}")
        if wanted and spec.ahead is not None:
            raise InvalidRequestError("a session that is drafted ahead for has no token trees")

    def check_calibration(self, calibration: Calibration, spec: DraftSessionSpec) -> None:
        """Checks the tree that a calibration asks for, if it asks for one."""
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

    def num_spare(self, spec: DraftSessionSpec) -> int:
        """Returns how many nodes of a tree there may be in the KV cache."""
        return num_read_nodes(spec.max_tree_nodes, spec.parameters.max_draft_tokens)

    def request(self, session: DraftSession, calibration: Calibration, request: DraftRequest) -> DraftRequest:
        """Returns the request for the tree that a calibration asks for, if it asks for one."""
        return request if calibration.tree is None else self._tree_request(request, calibration.tree)

    def largest(self, request: DraftRequest) -> DraftRequest:
        """Returns the request for a tree that grows as large as any."""
        if not self._most_nodes:
            return request
        walked = replace(request, is_coupled=True, needs_probs=False)
        return self._tree_request(walked, DraftTree(self._most_nodes))

    def _tree_request(self, request: DraftRequest, tree: DraftTree) -> DraftRequest:
        """Returns the request for a tree, from one for a chain as long as the tree is deep."""
        if tree.shape is None:
            growth = GrowthPlan.eagle2(tree.num_nodes, request.num_tokens)
            return replace(request, tree=WantedTree(growth=growth), num_tokens=tree.num_nodes)
        if not is_walked(request) and not self._can_draw:
            return replace(request, num_tokens=tree.shape.depth)
        assert isinstance(tree.shape, TokenTree), "no other shape comes"
        return replace(request, tree=WantedTree(tree.shape), num_tokens=tree.num_nodes)
