"""Interface of the shapes of blocks that are no chains. `TokenTree` is the one kind of them."""

from collections.abc import Sequence
from typing import Any, Protocol

CHAIN: tuple[int, ...] = ()
"""The `parents` of a chain of any length."""


class BlockShape(Protocol):
    """The shape of a block whose draft tokens do not simply follow each other."""

    @property
    def parents(self) -> tuple[int, ...]:
        """The draft token that each one follows, which comes before it; -1 for the last committed token."""

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""

    @property
    def num_distributions(self) -> int:
        """How many distributions a block of this shape states."""

    @property
    def drawn_from(self) -> list[int]:
        """Index of the distribution that each token was drawn from."""

    @property
    def decider(self) -> Any:
        """Decider of such blocks: a `ShapeDecider` of `draftwire.verification.deciding`."""

    def texts(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Returns the draft tokens before each row of the block: none, then those up to each draft token."""

    def distributions_along(self, path: Sequence[int]) -> list[int]:
        """Returns which distributions stand before each token of a path and, if one does, after its last.

        Args:
            path: indices of draft tokens, each of which follows the one before it.
        """

    def check(self, most_tokens: int, most_depth: int) -> None:
        """Checks the size.

        Raises:
            BlockViolationError: it has more draft tokens, or more of them on a path.
        """
