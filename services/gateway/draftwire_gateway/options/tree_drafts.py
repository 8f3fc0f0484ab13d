"""Token trees in the place of chains, where drafter and verifier know them."""

from dataclasses import replace

from typing_extensions import override

from draftwire.method.rounds import DraftSessionSpec, TargetSessionSpec, Verdict
from draftwire.models.description import ModelDescription
from draftwire.options.trees.tree_shapes import tree_to_draft
from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class TreeDrafts(SessionOption):
    """Asks drafters for token trees in the place of chains."""

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._num_nodes = 0
        """Nodes that the drafter is asked for; 0 if it is asked for chains."""

    @override
    def target_spec(self, spec: TargetSessionSpec, target: ModelDescription) -> TargetSessionSpec:
        return replace(spec, max_tree_nodes=min(self._session.generation.num_draft_nodes, target.max_tree_nodes))

    @override
    def draft_spec(
        self, spec: DraftSessionSpec, drafter: ModelDescription, target: ModelDescription
    ) -> DraftSessionSpec:
        most = min(drafter.max_tree_nodes, target.max_tree_nodes)
        self._num_nodes = min(self._session.generation.num_draft_nodes, most)
        return replace(spec, max_tree_nodes=self._num_nodes)

    @override
    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        return wanted._replace(num_nodes=self._num_nodes) if wanted.source is DraftSource.DRAFTER else wanted

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
