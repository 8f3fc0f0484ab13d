"""Token trees in the place of chains, where drafter and verifier know them."""

from dataclasses import replace

from typing_extensions import override

from draftwire.method.rounds import DraftSessionSpec, TargetSessionSpec, Verdict
from draftwire.models.description import ModelDescription
from draftwire.options.trees.tree_shapes import tree_to_draft
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class TreeDrafts(SessionOption):
    """Asks drafters for token trees: in all rounds, or in those for which the policy chooses them."""

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._num_nodes = 0
        """Nodes that the drafter is asked for, at most if they are chosen; 0 if it is asked for chains."""

    @override
    def target_spec(self, spec: TargetSessionSpec, target: ModelDescription) -> TargetSessionSpec:
        return replace(spec, max_tree_nodes=min(self._session.generation.num_draft_nodes, target.max_tree_nodes))

    @override
    def draft_spec(
        self, spec: DraftSessionSpec, drafter: ModelDescription, target: ModelDescription
    ) -> DraftSessionSpec:
        self._num_nodes = max_tree_nodes(self._session.generation, drafter, target)
        return replace(spec, max_tree_nodes=self._num_nodes)

    @override
    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        is_chosen = self._session.generation.adapts_length  # then the policy says itself what is a tree
        if not self._num_nodes or wanted.source is not DraftSource.DRAFTER or is_chosen:
            return wanted
        return Arm(DraftSource.TREES, wanted.length, self._num_nodes)

    @override
    def request(self, block: BlockRequest) -> None:
        if not block.arm.num_nodes:
            return
        generation = self._session.generation
        has_shape = generation.rule.needs_draft_probs and not generation.sampling.greedy
        block.tree = tree_to_draft(block.arm.num_nodes, block.arm.length, has_shape=has_shape)
        if block.tree.shape is not None:
            block.depth = block.tree.shape.depth  # less than was asked for if its nodes ran out

    @override
    def end_round(self, verdict: Verdict, *, was_held: bool) -> None:
        self._session.statistics.num_trees += verdict.tree is not None


def max_tree_nodes(generation: Generation, drafter: ModelDescription, target: ModelDescription) -> int:
    """Returns how large the token trees of a generation may be with a drafter; 0 if it is asked for chains."""
    return min(generation.num_draft_nodes, drafter.max_tree_nodes, target.max_tree_nodes)
