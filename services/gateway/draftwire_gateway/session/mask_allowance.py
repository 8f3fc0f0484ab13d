"""CPU time that the masks of a session's form may take before nothing is drafted for it. Calls nobody."""

from draftwire.method.rounds import Verdict
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S

CREDIT_S = 0.02
"""CPU time that may be used at once beside that of the committed tokens, seconds."""


class MaskAllowance:
    """Allows a session `MASKS_PER_TOKEN_S` for each token, and remembers up to `CREDIT_S` of what was not used.

    A draft token costs a mask whether it is accepted or not, a plain round one mask for each token. Sees only rounds
    that are over, with all that was drafted in them: what is drafted next depends on no draft token that is still to be
    judged. See docs/exactness.md.
    """

    def __init__(self) -> None:
        """Nothing was used."""
        self._credit_s = CREDIT_S

    @property
    def is_used_up(self) -> bool:
        """Whether rounds have to be plain. They are until their masks have taken less than is allowed for a while."""
        return self._credit_s < 0.0

    def count(self, verdict: Verdict) -> None:
        """Counts a round that is over."""
        unused_s = MASKS_PER_TOKEN_S * len(verdict.token_ids) - verdict.mask_us / 1e6
        # Not far below zero, or one slow mask would be the end of speculation.
        self._credit_s = max(-CREDIT_S, min(CREDIT_S, self._credit_s + unused_s))
