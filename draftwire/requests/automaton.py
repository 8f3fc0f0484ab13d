"""Interface of automata: masks of the tokens with which a text can still match its form.

`draftwire.options.structured_output` compiles forms. A mask depends on nothing but the form, the tokenizer and the
generated tokens before its position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class BlockMasks:
    """Token masks at the positions of a draft block."""

    rows: NDArray[np.uint8]
    """`[draft_len + 1, bytes]`, as `Automaton.masks` returns: after the committed tokens, then after each draft token.
    A row that has no mask allows every token."""
    faults: Mapping[int, InvalidRequestError] = field(default_factory=dict)
    """Rows without a mask, and why; a text that ends before one fails with it."""


class Automaton(Protocol):
    """Matcher of one text against its form. Not shared; used on one thread at a time."""

    @property
    def has_slow_masks(self) -> bool:
        """Whether its masks have taken more than `MASKS_PER_TOKEN_S` each of late."""

    def take_cpu_s(self) -> float:
        """Returns the CPU time of all calls since the last call of this, drafts that were rejected included."""

    def masks(self, generated_ids: Sequence[int], draft_tokens: Sequence[int] = ()) -> NDArray[np.uint8]:
        """Returns the masks before each draft token and after the last.

        After a stop token, and after an impossible draft token, every token is allowed: the distribution there is never
        used, but has to exist.

        Args:
            generated_ids: the generated tokens, without the prompt. They need not continue those of the last call.
            draft_tokens: the draft tokens after them.

        Returns:
            `[len(draft_tokens) + 1, bytes]`, one bit per token, lowest first.

        Raises:
            InvalidRequestError: the generated text does not match the form, no token is possible, or the form exceeds
                its limits.
        """

    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int], first_place: int = 0) -> BlockMasks:
        """Returns the masks of a draft block. An error at a draft position is returned, not raised, because the block
        may be rejected before it.

        Args:
            generated_ids: as `masks`.
            draft_tokens: as `masks`.
            first_place: the first row that is wanted, of `masks`; those before it hold nothing of use.

        Raises:
            InvalidRequestError: as `masks`, for the generated tokens.
        """

    def last_mask(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> NDArray[np.uint8]:
        """Returns the last row of `masks`, `[1, bytes]`, without computing the others."""
