"""What the rounds of a pair may draft by: nothing, a drafter, or the verifier itself, to some length each."""

from enum import Enum
from typing import NamedTuple


class DraftSource(Enum):
    """Who drafts."""

    DRAFTER = "drafter"
    """A drafter of the pair's model."""
    VERIFIER = "verifier"
    """The verifier, without a model."""


class Arm(NamedTuple):
    """One way to run rounds."""

    source: DraftSource | None
    """None for plain decoding."""
    length: int
    """Draft tokens of a round; 0 for plain decoding."""


PLAIN = Arm(None, 0)
