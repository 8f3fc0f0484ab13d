"""Small model pairs to check rules on: random ones, and adversarial ones that make typical mistakes visible.

A model is an order-1 table `[vocab + 1, vocab] float64`: row t is the law after token t, the last row the law at the
start. Order 1 is the lowest that exposes a rule which reads the row before or after the right one, and a vocabulary of
three the smallest that exposes a residual with a wrong weight.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SHARPNESSES = (0.5, 1.0, 2.0, 5.0)
"""Standard deviations of random logits: from nearly uniform rows to rows with entries near 0 and 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A target and a drafter of one vocabulary. Compared by identity."""

    name: str
    target: Tensor
    """`[vocab + 1, vocab] float64`, each row summing to 1."""
    drafter: Tensor
    """Same layout as `target`."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.target.shape[1]

    @property
    def is_greedy(self) -> bool:
        """Whether every row of the target is one-hot, as at temperature 0."""
        return bool((self.target.amax(dim=1) == 1.0).all())


def random_table(vocab_size: int, sharpness: float, generator: torch.Generator) -> Tensor:
    """Returns a random model, `[vocab_size + 1, vocab_size]`."""
    logits = torch.randn(vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(dim=1)


@cache
def random_pairs(vocab_size: int) -> tuple[Pair, ...]:
    """Returns a pair of random models for each of `SHARPNESSES`."""
    generator = torch.Generator().manual_seed(1000 * vocab_size)
    return tuple(
        Pair(f"random, sharpness {sharpness:g}", *(random_table(vocab_size, sharpness, generator) for _ in range(2)))
        for sharpness in SHARPNESSES
    )


@cache
def adversarial_pairs(vocab_size: int) -> tuple[Pair, ...]:
    """Returns pairs of extreme models."""
    generator = torch.Generator().manual_seed(1000 * vocab_size + 500)
    target, drafter = (random_table(vocab_size, 1.5, generator) for _ in range(2))
    is_even = (torch.arange(vocab_size) % 2 == 0).expand_as(target)
    hidden = torch.zeros_like(is_even)
    hidden[:, 0] = True
    hidden[0, vocab_size - 1] = True  # and one more after one of the tokens
    tails = torch.where(hidden, 1e-30, target), torch.where(hidden.flip(1), 1e-30, drafter)
    noise = 1.0 + 1e-9 * torch.randn(target.shape, generator=generator, dtype=torch.float64)
    sharp = [random_table(vocab_size, 30.0, generator) for _ in range(2)]
    return (
        Pair("target of smaller support", _normalised(target.masked_fill(hidden, 0.0)), drafter),
        Pair("drafter of smaller support", target, _normalised(drafter.masked_fill(hidden, 0.0))),
        Pair(
            "overlapping supports",
            _normalised(target.masked_fill(hidden, 0.0)),
            _normalised(drafter.masked_fill(hidden.flip(1), 0.0)),
        ),
        Pair(
            "disjoint supports",
            _normalised(target.masked_fill(is_even, 0.0)),
            _normalised(drafter.masked_fill(~is_even, 0.0)),
        ),
        Pair("one-hot drafter", target, _one_hot(drafter)),
        Pair("one-hot drafter, mostly right", target, _one_hot(target)),
        Pair("greedy target", _one_hot(target), drafter),
        Pair("greedy target and drafter", _one_hot(target), _one_hot(target + 0.3 * drafter.flip(0))),
        Pair("equal", target, target.clone()),
        Pair("nearly equal", target, _normalised(target * noise)),
        Pair("tails of 1e-30", _normalised(tails[0]), _normalised(tails[1])),
        Pair("nearly certain", sharp[0], sharp[1]),
        Pair("nearly certain drafter", target, sharp[1]),
    )


@cache
def toy_pair() -> Pair:
    """Returns the example of Sun et al. 2024, section 2: two tokens, independent of the context."""
    target, drafter = (torch.tensor([row] * 3, dtype=torch.float64) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    return Pair("toy", target, drafter)


def _normalised(table: Tensor) -> Tensor:
    return table / table.sum(dim=1, keepdim=True)


def _one_hot(table: Tensor) -> Tensor:
    return torch.zeros_like(table).scatter_(1, table.argmax(dim=1, keepdim=True), 1.0)
