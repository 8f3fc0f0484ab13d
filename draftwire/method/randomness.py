"""Random numbers from a counter-based generator, so that no draw depends on batches, threads or earlier draws.

A draw is identified by a key and a counter. The gateway derives one key per role from the request's seed. Drafters
never hold the verifying key, because a drafter that could compute the verifier's uniforms could bias the output.

There are two kinds of numbers. *Uniforms* belong to a round: (key, choice, round, index), so that a repeated round
draws the same. *Exponentials* belong to a position in the text: (key, choice, position, token id), the same for every
draw there; this makes the rule `coupled` reproducible.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.method.keys import DrawKey

Words = TypeVar("Words", int, NDArray[np.int64], Tensor)
"""32-bit words. Plain integers for the few numbers of a round, numpy for many rounds, torch for a whole vocabulary.
Products of 64 bits wrap around the same way or not at all, so the numbers are the same on every device."""

FEW_COUNTERS = 12
"""Up to this many counters, plain integers are faster than arrays."""


def uniforms(keys: Sequence[DrawKey], count: int) -> Tensor:
    """Returns the first `count` numbers of each round, independent uniforms in [0, 1).

    Returns:
        `[len(keys), count] float64` on the CPU.
    """
    num_counters = (count + 1) // 2  # two numbers per counter
    if len(keys) * num_counters <= FEW_COUNTERS:
        few = np.array([_few_uniforms(key, count) for key in keys], dtype=np.float64)
        return torch.from_numpy(few.reshape(len(keys), count))
    pairs = np.arange(num_counters, dtype=np.int64)[None, :]
    words = np.array([key.round_words for key in keys], dtype=np.int64).reshape(-1, 2, 1)
    blank = np.zeros((len(keys), pairs.shape[1]), dtype=np.int64)
    drawn = philox((blank + pairs, blank, blank, blank), (words[:, 0], words[:, 1]))
    numbers = np.stack([_fraction(drawn[0], drawn[1]), _fraction(drawn[2], drawn[3])], axis=-1)
    return torch.from_numpy(numbers.reshape(len(keys), 2 * pairs.shape[1])[:, :count] * 2.0**-53)


def _few_uniforms(key: DrawKey, count: int) -> list[float]:
    """Returns `uniforms` of one round, computed with plain integers."""
    numbers: list[float] = []
    for index in range((count + 1) // 2):
        drawn = philox((index, 0, 0, 0), key.round_words)
        numbers += [_fraction(drawn[0], drawn[1]) * 2.0**-53, _fraction(drawn[2], drawn[3]) * 2.0**-53]
    return numbers[:count]


def exponentials(words: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Returns an exponential variable of mean 1 for every token at given positions of texts.

    Args:
        words: `[rows, 2] int64`, `DrawKey.text_words` of each row's text.
        positions: `[rows] int64`, position of the row's token in the text, prompt included.
        vocab_size: size of the vocabulary; a token's number does not depend on it.

    Returns:
        `[rows, vocab_size] float64` on the device of `words`, all above 0 and finite.
    """
    pairs = torch.arange((vocab_size + 1) // 2, device=words.device).unsqueeze(0)  # two tokens per counter
    counters = torch.broadcast_tensors(pairs, positions.unsqueeze(1), *[torch.zeros_like(pairs)] * 2)
    drawn = philox((counters[0], counters[1], counters[2], counters[3]), (words[:, :1], words[:, 1:]))
    numbers = torch.stack([_fraction(drawn[0], drawn[1]), _fraction(drawn[2], drawn[3])], dim=-1)
    cells = (numbers.flatten(1)[:, :vocab_size] >> 1).to(torch.float64)  # 52 bits leave one for the middle of a cell
    # At the middle no number is 0 or infinite, and small ones, with which unlikely tokens win, keep their precision.
    return -torch.log1p((cells + 0.5) * -(2.0**-52))


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Returns four random 32-bit words for each counter of four words under a key of two.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox4x32-10.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits, sign bit included
        c0, c1 = (product1 >> 32) & _MASK ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> 32) & _MASK ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


_MASK = 0xFFFFFFFF


def _fraction(high: Words, low: Words) -> Words:
    """Returns 53 random bits of two words."""
    return (high << 21) | (low >> 11)
