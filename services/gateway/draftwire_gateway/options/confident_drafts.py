"""Asks drafters for blocks that end where they are not sure."""

from typing_extensions import override

from draftwire.method.rounds import DraftSessionSpec
from draftwire.models.description import CONFIDENCE, ModelDescription
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class ConfidentDrafts(SessionOption):
    """Has the chains of a session end where its drafter is not sure, if drafter and verifier know that.

    The same in all rounds, so that a round that a drafter has begun is as it is requested.
    """

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._is_known = False

    @override
    def draft_spec(
        self, spec: DraftSessionSpec, drafter: ModelDescription, target: ModelDescription
    ) -> DraftSessionSpec:
        self._is_known = CONFIDENCE in drafter.capabilities & target.capabilities
        return spec

    @override
    def request(self, block: BlockRequest) -> None:
        if self._is_known and not block.arm.num_nodes:
            block.stop_below = self._session.generation.stop_below
