"""Where the tokens of a text came from. Needs no package besides Python."""

from enum import Enum


class TokenSource(Enum):
    """Where a token came from. Says nothing about its law, which is the target's whatever the source."""

    ACCEPTED = "accepted"
    """A draft token that the rule kept."""
    RECOVERED = "recovered"
    """Drawn by the target in place of a draft token that the rule did not keep."""
    BONUS = "bonus"
    """Drawn by the target after a block that was accepted as a whole."""
    PLAIN = "plain"
    """Drawn by the target where nothing was drafted."""
