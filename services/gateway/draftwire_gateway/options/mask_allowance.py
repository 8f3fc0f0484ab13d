"""CPU time that the masks of a session's form may take before nothing is drafted for it. Calls nobody."""

from typing_extensions import override

from draftwire.method.rounds import Verdict
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S, MAX_PLACE_S
from draftwire_gateway.session.policy import PLAIN, Arm
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.session.session_option import SessionOption
from draftwire_gateway.session.session_state import SessionState

CREDIT_S = 0.02
"""CPU time that may be used at once beside that of the committed tokens, seconds."""


class MaskAllowance(SessionOption):
    """Allows a session `MASKS_PER_TOKEN_S` for each token, and remembers up to `CREDIT_S` of what was not used.

    A draft token costs a mask whether it is accepted or not, a plain round one mask for each token. Sees only rounds
    that are over, with all that was drafted in them: what is drafted next depends on no draft token that is still to be
    judged. See docs/exactness.md.
    """

    flush_s = MAX_PLACE_S

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._credit_s = CREDIT_S

    @property
    def is_used_up(self) -> bool:
        """Whether rounds have to be plain. They are until their masks have taken less than is allowed for a while."""
        return self._credit_s < 0.0

    @override
    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        return PLAIN if self.is_used_up else wanted

    @override
    def why_plain(self, round_number: int, *, is_ready: bool) -> WhyPlain | None:
        return WhyPlain.SLOW_MASKS if self.is_used_up else None

    @override
    def end_round(self, verdict: Verdict, *, was_held: bool) -> None:
        unused_s = MASKS_PER_TOKEN_S * len(verdict.token_ids) - verdict.mask_us / 1e6
        # Not far below zero, or one slow mask would be the end of speculation.
        self._credit_s = max(-CREDIT_S, min(CREDIT_S, self._credit_s + unused_s))


def mask_s(times: RoundTimes) -> float:
    """Returns the CPU time of a round's masks, of the verifier and of a drafter, no more than both can have used."""
    return min(times.verdict.mask_s, 2.0 * (times.ended_at - times.started_at - times.lost_s))
