"""Theoretical mean number of accepted draft tokens per round, from the models alone.

Written position by position and independently of the rules, so that the two can be compared.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftwire.checking.all_blocks import all_blocks, digits, rows_along
from draftwire.checking.coupling import match_probs
from draftwire.checking.emissions import sequence_law
from draftwire.checking.toy_models import Pair

Expectation = Callable[[Pair, int], Tensor]
"""Takes a model pair and a block length; returns the mean after each context, `[vocab + 1] float64`."""


def token_expectation(pair: Pair, length: int) -> Tensor:
    """Returns the mean of sum over i of the product over j <= i of min(1, r_j), the rule `token`."""
    return _mean(pair, length, lambda reach, ratio: reach * ratio.clamp(max=1.0))


def block_expectation(pair: Pair, length: int) -> Tensor:
    """Returns the mean of sum over i of a_i = min(1, a_{i-1} r_i), the rule `block`: the most that is possible for
    rules that can be chained. Source: Sun et al. 2024 (arXiv 2403.10444), Lemma 4.
    """
    return _mean(pair, length, lambda reach, ratio: (reach * ratio).clamp(max=1.0))


def coupled_expectation(pair: Pair, length: int) -> Tensor:
    """Returns the sum over i and over texts of i tokens of the probability that both sides draw them: `coupled`."""
    result = torch.zeros(pair.vocab_size + 1, dtype=torch.float64)
    matches = match_probs(pair.target, pair.drafter)
    for count in range(1, length + 1):
        result += sequence_law(matches, count).sum(dim=1)
    return result


EXPECTATIONS: dict[str, Expectation] = {
    "token": token_expectation,
    "block": block_expectation,
    "coupled": coupled_expectation,
}


def _mean(pair: Pair, length: int, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    blocks = all_blocks(pair, length)
    contexts, tokens = digits(blocks.numbers, length, pair.vocab_size)
    target, draft = (rows_along(table, contexts, tokens)[:, :-1] for table in (pair.target, pair.drafter))
    ratios = (target / draft).gather(2, tokens.unsqueeze(2)).squeeze(2)
    reach, total = torch.ones_like(blocks.probs), torch.zeros_like(blocks.probs)
    for position in range(length):
        reach = step(reach, ratios[:, position])
        total = total + reach
    return torch.zeros(pair.vocab_size + 1, dtype=torch.float64).index_add_(0, contexts, blocks.probs * total)
