"""Exact laws of small models, by enumeration in float64.

A model here is an order-1 table: `[vocab + 1, vocab]`, row t is the law after token t and the last row the law at the
start. Order 1 is the least that shows a rule reading the row before or after the right one, and a vocabulary of three
the least that shows a residual with a wrong weight.
"""

from collections import defaultdict
from itertools import product

import torch
from torch import Tensor

from draftwire.verification import BlockBatch, LawRule
from draftwire.verification.blocks import cut_impossible

Sequence = tuple[int, ...]


def random_table(vocab_size: int, sharpness: float, generator: torch.Generator) -> Tensor:
    """Returns a random model; sharp ones have entries near 0 and 1."""
    return (sharpness * torch.randn(vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)


def rows_along(table: Tensor, context: Sequence, tokens: Sequence) -> Tensor:
    """Returns the laws before each of `tokens` and after the last, `[len(tokens) + 1, vocab]`."""
    start = context[-1] if context else len(table) - 1
    return table[torch.tensor([start, *tokens])]


def sequence_law(table: Tensor, length: int) -> dict[Sequence, float]:
    """Returns the model's law of the first `length` tokens."""
    law = {}
    for tokens in product(range(table.shape[1]), repeat=length):
        rows = rows_along(table, (), tokens)
        law[tokens] = float(torch.stack([rows[i, token] for i, token in enumerate(tokens)]).prod())
    return law


def outcome_law(rule: LawRule, target_rows: Tensor, draft_rows: Tensor, tokens: Sequence) -> Tensor:
    """Returns the probability of accepting i tokens and then emitting y, `[len(tokens) + 1, vocab]`, for this block."""
    blocks = cut_impossible(
        BlockBatch.padded(
            target_rows.unsqueeze(0),
            draft_rows.unsqueeze(0),
            torch.tensor([tokens], dtype=torch.int64).reshape(1, len(tokens)),
            torch.tensor([len(tokens)]),
        )
    )
    law = rule.stop_law(blocks)
    result = torch.zeros(len(tokens) + 1, target_rows.shape[1], dtype=torch.float64)
    for accepted in range(int(blocks.lengths[0]) + 1):
        weights = rule.extra_weights(blocks, law, torch.tensor([accepted]))[0]
        result[accepted] = law.accepted_probs[0, accepted] * weights / weights.sum()
    return result


def speculative_law(
    rule: LawRule, target: Tensor, drafter: Tensor, block_lengths: list[int], length: int
) -> dict[Sequence, float]:
    """Returns the law of the first `length` tokens that rounds of speculation emit.

    Round after round is enumerated, each continuing from what the rounds before committed; the last block length is
    used again when the list ends. Tokens beyond `length` are cut off, as a server cuts at max_tokens.
    """
    finished: dict[Sequence, float] = defaultdict(float)
    growing: dict[Sequence, float] = {(): 1.0}
    for round_number in range(length):  # every round emits at least one token
        block_length = block_lengths[min(round_number, len(block_lengths) - 1)]
        following: dict[Sequence, float] = defaultdict(float)
        for context, mass in growing.items():
            for tokens in product(range(target.shape[1]), repeat=block_length):
                target_rows, draft_rows = rows_along(target, context, tokens), rows_along(drafter, context, tokens)[:-1]
                drawn = [draft_rows[i, token] for i, token in enumerate(tokens)]
                drawn_prob = float(torch.stack(drawn).prod()) if drawn else 1.0
                if drawn_prob == 0.0:
                    continue
                outcomes = outcome_law(rule, target_rows, draft_rows, tokens)
                for accepted, extra in outcomes.nonzero().tolist():
                    emitted = (*context, *tokens[:accepted], extra)
                    probability = mass * drawn_prob * float(outcomes[accepted, extra])
                    done = len(emitted) >= length
                    (finished if done else following)[emitted[:length]] += probability
        growing = following
    return finished


def largest_deviation(law: dict[Sequence, float], expected: dict[Sequence, float]) -> float:
    """Returns the largest difference of two laws in one outcome."""
    return max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in law.keys() | expected.keys())
