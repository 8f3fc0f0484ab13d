"""Features of the target's tokens, as they travel to a drafter with a head. See docs/heads.md.

A drafter asks for those of a session from a position on, up to a limit that it raises as the text goes on; the verifier
sends them as its target reads. They may be lossy: the drafter declares what it draws from.
"""

from dataclasses import dataclass

from draftwire.method.rounds import Permit
from draftwire.options.heads.feature_format import FeatureEncoding


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """The features that a drafter's head reads."""

    fingerprint: bytes
    """Fingerprint of the head's first layer, which the verifier computes."""
    encoding: FeatureEncoding
    size: int
    """Numbers of a row."""
    window: int
    """Tokens before the end of a text, at most, whose features a new sequence is fed with; at least 1. As many are
    asked for ahead of the text."""

    def fits(self, features: "SessionFeatures") -> bool:
        """Whether rows and scales have the sizes that they should."""
        count = features.num_positions
        has_rows = count >= 1 and len(features.rows) == count * self.encoding.row_bytes(self.size)
        return has_rows and len(features.scales) == count * self.encoding.scale_bytes


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Asks a verifier for features of a session, on the stream of its drafter."""

    session_id: int
    epoch: int
    permit: Permit
    """Permit of the drafter: nobody else gets them."""
    limit: int
    """Positions before this one are asked for, and no others until the limit is raised."""
    first_position: int | None = None
    """Position to begin at; None goes on behind those that were sent."""


@dataclass(frozen=True, slots=True)
class SessionFeatures:
    """Encoded features of consecutive tokens of a session."""

    session_id: int
    epoch: int
    first_position: int
    num_positions: int
    """Number of tokens, at least 1."""
    rows: bytes
    """`[num_positions, size]` numbers of the encoding, little-endian."""
    scales: bytes = b""
    """`[num_positions] float32`, of the encodings that have them."""

    @property
    def stop(self) -> int:
        """The position behind the last one."""
        return self.first_position + self.num_positions
