"""Sources of the tokens of a text. Needs no package besides Python."""

from enum import Enum


class TokenSource(Enum):
    """Source of a token. Does not affect its distribution, which is the target's for every source."""

    ACCEPTED = "accepted"
    """A draft token that the rule accepted."""
    RECOVERED = "recovered"
    """Drawn by the target in place of a rejected draft token."""
    BONUS = "bonus"
    """Drawn by the target after a fully accepted block."""
    PLAIN = "plain"
    """Drawn by the target without a draft."""
