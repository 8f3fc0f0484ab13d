"""Blocks of a drafter's sessions that end where its strategy is not sure. No torch here."""

from dataclasses import replace

from typing_extensions import override

from draftwire.drafting.strategy import DraftRequest
from draftwire.engine.draft_session import DraftOption, DraftSession
from draftwire.errors import ProtocolViolationError
from draftwire.method.confidence import stop_in
from draftwire.method.rounds import Calibration, DraftSessionSpec


class SessionConfidence(DraftOption):
    """How sure a drafter has to be of each place of its sessions' blocks."""

    def __init__(self, *, is_known: bool) -> None:
        """`is_known` if the strategy reports how sure it is, and ends chains by that."""
        self._is_known = is_known

    @override
    def check_calibration(self, calibration: Calibration, spec: DraftSessionSpec) -> None:
        if calibration.stop_below is None:
            return
        if not self._is_known:
            raise ProtocolViolationError("stop_below: the drafter's strategy does not know how sure it is")
        if calibration.tree is not None:
            raise ProtocolViolationError("stop_below: a token tree does not end where the drafter is not sure")

    @override
    def request(self, session: DraftSession, calibration: Calibration, request: DraftRequest) -> DraftRequest:
        return replace(request, stop_below=stop_in(calibration.fence.round, calibration.stop_below))
