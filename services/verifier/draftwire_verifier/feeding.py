"""Messages to drafters on their streams: how rounds ended, and the features that their heads read.

Features are taken out of the target's cache when a stream has room for them, a message at a time: nothing is kept for a
drafter that reads slowly, and one that is new gets what an earlier one got, without another pass of the target.
"""

from dataclasses import dataclass

from draftwire.engine.leases import SessionKey
from draftwire.method.feature_format import FeatureEncoding
from draftwire.method.rounds import RoundOutcome
from draftwire.runtime.call_limits import StreamUse
from draftwire.runtime.outbox import Outbox
from draftwire.runtime.settings import LEAST_MESSAGE_BYTES
from draftwire_verifier.drafters import Drafter

MAX_TOLD = 4096
"""Outcomes, and sessions with features to send, that wait for a drafter's stream at most; further outcomes are left
out, and features wait for the next round."""
MOST_BYTES = LEAST_MESSAGE_BYTES // 2
"""Size of the features that are read at once, and so of those in one message, unless a single token has more."""


@dataclass(slots=True)
class Feed:
    """The features that a session's drafter has asked for."""

    drafter_id: int
    next_position: int
    """The first one that was not sent."""
    limit: int
    """Behind the last one that was asked for."""
    is_due: bool = False
    """Whether the drafter's stream is to send some."""


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """Features that are taken at once: of one session's consecutive tokens."""

    key: SessionKey
    start: int
    """Position of the first token."""
    stop: int
    """Position behind the last one."""


class DrafterStream:
    """Messages that wait for a drafter's stream."""

    def __init__(self, drafter: Drafter, takes_outcomes: bool = False, encoding: FeatureEncoding | None = None) -> None:
        """Starts with nothing to tell.

        Args:
            drafter: whose stream it is.
            takes_outcomes: whether it is told how rounds ended.
            encoding: of features; None if it needs none.
        """
        self.drafter = drafter
        self.takes_outcomes = takes_outcomes
        self.encoding = encoding
        self.use = StreamUse.NONE
        """None before a block of it is judged."""
        self.outbox = Outbox[RoundOutcome | SessionKey](MAX_TOLD)
        """Outcomes, and sessions that have features for it; see `VerifierCore.take_features`."""

    def most_positions(self, size: int) -> int:
        """Returns of how many tokens features are taken at once, where those of a token are `size` numbers."""
        assert self.encoding is not None, "asked of streams that want features"
        return max(1, MOST_BYTES // (self.encoding.row_bytes(size) + self.encoding.scale_bytes))
