"""The distributions that draft tokens are drawn from, and their bytes on the wire.

The promise that makes the output exact is kept here: `draw` reads the very float32 numbers that `encode` writes, and
`decode` gives them back to the bit.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from draftwire.errors import InvalidRequestError


class Encoding(Enum):
    """How a block's distributions travel."""

    DENSE_FLOAT32 = "dense_float32"
    ONE_HOT = "one_hot"


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """The distributions of a block, as they travel.

    Attributes:
        encoding: the layout of `data`.
        vocab_size: entries per dense row.
        data: `[draft_len, vocab_size] float32` little-endian for DENSE_FLOAT32, empty for ONE_HOT.
    """

    encoding: Encoding
    vocab_size: int
    data: bytes

    @classmethod
    def from_rows(cls, rows: Tensor) -> "DraftDistributions":
        """Encodes `rows`, `[draft_len, vocab] float32`, without changing a bit."""
        return cls(Encoding.DENSE_FLOAT32, rows.shape[-1], rows.numpy().astype("<f4", copy=False).tobytes())

    @classmethod
    def one_hot(cls, vocab_size: int) -> "DraftDistributions":
        """Says that every token of the block was the only possible one."""
        return cls(Encoding.ONE_HOT, vocab_size, b"")

    def rows(self, token_ids: list[int], target_vocab_size: int) -> Tensor:
        """Decodes and validates the distributions of `token_ids`.

        Returns:
            `[draft_len, target_vocab_size]` float32, each row a distribution up to float32 rounding; tokens that the
            drafter does not have get 0.

        Raises:
            InvalidRequestError: wrong size, a row that is no distribution, or a drawn token of probability 0.
        """
        length = len(token_ids)
        if not 0 < self.vocab_size <= target_vocab_size:
            raise InvalidRequestError(f"draft vocabulary of {self.vocab_size} entries, target has {target_vocab_size}")
        if any(token >= self.vocab_size for token in token_ids):
            raise InvalidRequestError("draft token beyond the draft vocabulary")
        index = torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1)
        result = torch.zeros(length, target_vocab_size)
        if self.encoding is Encoding.ONE_HOT:
            if self.data:
                raise InvalidRequestError("one-hot draft distributions carry no data")
            return result.scatter_(1, index, 1.0)
        if len(self.data) != 4 * length * self.vocab_size:
            raise InvalidRequestError(
                f"draft distributions of {len(self.data)} bytes, expected {4 * length * self.vocab_size}"
            )
        numbers = np.frombuffer(self.data, dtype="<f4").reshape(length, self.vocab_size)
        result[:, : self.vocab_size] = torch.from_numpy(numbers.astype(np.float32))
        if not bool((result >= 0.0).all()):  # NaN fails the comparison
            raise InvalidRequestError("draft distribution has a negative entry or a NaN")
        if not bool(((result.sum(dim=-1, dtype=torch.float64) - 1.0).abs() < 1e-3).all()):
            raise InvalidRequestError("draft distribution does not sum to 1")
        if not bool((result.gather(1, index) > 0.0).all()):
            raise InvalidRequestError("draft token has probability 0 in the distribution it claims to be drawn from")
        return result


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one index from each row of unnormalised weights.

    Args:
        weights: `[batch, vocab]`, >= 0, each row with a positive sum.
        uniforms: `[batch] float64` in [0, 1).

    Returns:
        `[batch] int64`; an index of weight 0 is never drawn.
    """
    cumulated = weights.to(torch.float64).cumsum(dim=-1)
    total = cumulated[:, -1:]
    # u * total may round up to total, where no index is left; the largest number below total always has one.
    threshold = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(1)
