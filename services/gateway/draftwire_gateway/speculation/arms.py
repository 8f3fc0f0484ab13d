"""What the rounds of a pair may draft by: nothing, a drafter, as chains or trees, ahead of the verdict or not, or the
verifier itself.
"""

from enum import Enum
from typing import NamedTuple


class DraftSource(Enum):
    """Who drafts."""

    DRAFTER = "drafter"
    """A drafter of the pair's model."""
    AHEAD = "ahead"
    """The same, which uses the time of a verdict to draft for the rounds after."""
    TREES = "trees"
    """The same, which drafts token trees."""
    VERIFIER = "verifier"
    """The verifier by itself: without a model, or by its head."""

    __hash__ = object.__hash__  # that of `Enum` is a function in Python, and arms are looked up in every round


class Arm(NamedTuple):
    """One way to run rounds."""

    source: DraftSource | None
    """None for plain decoding."""
    length: int
    """Draft tokens of a round, of a token tree on each path; 0 for plain decoding."""
    num_nodes: int = 0
    """Draft tokens of a token tree, at least as many as its length; 0 for a chain."""

    @property
    def uses_drafter(self) -> bool:
        """Whether a drafter drafts."""
        return self.source in _OF_DRAFTERS

    @property
    def num_rows(self) -> int:
        """Draft tokens that the verifier reads at most."""
        return self.num_nodes or self.length

    def distance(self, other: "Arm") -> tuple[int, int]:
        """Returns by how much another arm differs, by the verifier's rows first."""
        return abs(other.num_rows - self.num_rows), abs(other.length - self.length)


_OF_DRAFTERS = (DraftSource.DRAFTER, DraftSource.AHEAD, DraftSource.TREES)

PLAIN = Arm(None, 0)
