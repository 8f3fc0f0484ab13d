"""What the rounds of a pair may draft by: nothing, a drafter, ahead of the verdict or not, or the verifier itself."""

from enum import Enum
from typing import NamedTuple


class DraftSource(Enum):
    """Who drafts."""

    DRAFTER = "drafter"
    """A drafter of the pair's model."""
    AHEAD = "ahead"
    """The same, which uses the time of a verdict to draft for the rounds after."""
    VERIFIER = "verifier"
    """The verifier by itself: without a model, or by its head."""


class Arm(NamedTuple):
    """One way to run rounds."""

    source: DraftSource | None
    """None for plain decoding."""
    length: int
    """Draft tokens of a round; 0 for plain decoding."""

    @property
    def uses_drafter(self) -> bool:
        """Whether a drafter drafts."""
        return self.source in (DraftSource.DRAFTER, DraftSource.AHEAD)


PLAIN = Arm(None, 0)
