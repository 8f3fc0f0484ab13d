"""Laws of the tokens that rounds emit, as tensors, and the law of a text made of rounds.

A text is a number in base `vocab`: `[contexts, vocab ** k]` is indexed by a context and k tokens, the first token being
the most significant digit. The contexts are the rows of a model's table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Emissions:
    """The law of the tokens that one round emits after each context."""

    of_count: tuple[Tensor, ...]
    """`[contexts, vocab ** k] float64` for k = 1, 2, ...: the probability of emitting exactly these k tokens."""

    def expected_accepted(self) -> Tensor:
        """Returns the mean number of accepted tokens, one less than emitted, `[contexts]`."""
        return torch.stack([count * law.sum(dim=1) for count, law in enumerate(self.of_count)]).sum(dim=0)

    @classmethod
    def from_codes(cls, masses: Tensor, vocab_size: int) -> "Emissions":
        """Returns the emissions from the probability of each code of `encoded`, `[contexts, num_codes]`."""
        sizes: list[int] = []
        left = masses.shape[1]
        while left > 0:
            sizes.append(vocab_size ** (len(sizes) + 1))
            left -= sizes[-1]
        return cls(tuple(masses.split(sizes, dim=1)))

    def deviation_from(self, other: "Emissions") -> float:
        """Returns the largest absolute difference of any probability."""
        return max(largest_deviation(mine, theirs) for mine, theirs in zip(self.of_count, other.of_count, strict=True))


def num_codes(vocab_size: int, most: int) -> int:
    """Returns how many texts of 1 to `most` tokens there are."""
    return sum(vocab_size**count for count in range(1, most + 1))


def encoded(tokens: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """Returns the code of each text; codes of shorter texts come first.

    Args:
        tokens: `[batch, most] int64`; tokens beyond the count are ignored.
        counts: `[batch] int64`, 1 to `most`.
        vocab_size: size of the vocabulary.

    Returns:
        `[batch] int64`, below `num_codes(vocab_size, most)`.
    """
    codes = torch.full_like(counts, -1)
    for position in range(tokens.shape[1]):
        codes = torch.where(position < counts, (codes + 1) * vocab_size + tokens[:, position], codes)
    return codes


def sequence_law(table: Tensor, length: int) -> Tensor:
    """Returns the law of `length` tokens of a model after each context, `[vocab + 1, vocab ** length]`."""
    vocab_size = table.shape[1]
    law = table.new_ones(len(table), 1)
    for _ in range(length):
        law = (table.unsqueeze(2) * law[:vocab_size]).flatten(1)
    return law


def law_of_rounds(emissions: Sequence[Emissions], length: int) -> Tensor:
    """Returns the law of the first `length` tokens that rounds emit; what a round emits beyond them is cut off.

    The last emissions are repeated when the list ends.

    Returns:
        `[contexts, vocab ** length]`.
    """
    contexts, vocab_size = emissions[0].of_count[0].shape

    @cache
    def law(first_round: int, left: int) -> Tensor:
        total = torch.zeros(contexts, vocab_size**left, dtype=torch.float64)
        for count, emitted in enumerate(emissions[first_round].of_count, start=1):
            if count >= left:
                total += emitted.reshape(contexts, vocab_size**left, -1).sum(dim=2)
            else:
                rest = law(min(first_round + 1, len(emissions) - 1), left - count)[:vocab_size]
                total += (emitted.reshape(contexts, -1, vocab_size, 1) * rest).flatten(1)
        return total

    return law(0, length)


def completed_law(emissions: Emissions, reference: Tensor) -> Tensor:
    """Returns the law of one round's tokens, continued by the reference.

    A round is right if this is the reference itself: rounds can then be chained. The reference may depend on the text
    in any way. Source: Sun et al. 2024 (arXiv 2403.10444), Definition 1 and Lemma 2.

    Args:
        emissions: of one round.
        reference: `[contexts, vocab ** length]`, of at least as many tokens as the round may emit.

    Returns:
        `[contexts, vocab ** length]`. Texts that are impossible under the reference keep their probability at the first
        of their continuations.
    """
    contexts = len(reference)
    result = torch.zeros_like(reference)
    for emitted in emissions.of_count:
        continued = reference.reshape(contexts, emitted.shape[1], -1)
        begun = continued.sum(dim=2, keepdim=True)
        first = torch.zeros_like(continued)
        first[:, :, 0] = 1.0
        rest = torch.where(begun > 0.0, continued / torch.where(begun > 0.0, begun, 1.0), first)
        result += (emitted.unsqueeze(2) * rest).flatten(1)
    return result


def largest_deviation(law: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference in one outcome; NaN if either law has a NaN."""
    return float((law - expected).abs().max())
