"""Greedy block verification: accepts the most tokens that one round can, at the expense of the rounds after it.

One round accepts as much as if the joint laws of target and drafter were known in full, more than any stateless rule
that can be chained. The price: if a round of n draft tokens accepts tau < n of them, the next n - tau - 1 tokens have
to follow, in place of the target p,

    p'(x | s) = norm([R(s) p(x | s) - q(x | s)]+),   R(s) = P(s) / Q(s) over the tokens s since the round began

A round that is drafted while p' is in force uses p' as its target, so modifications nest. Over a whole text most of the
gain is lost again, and p' needs the drafter's law at contexts of later rounds, which a server whose drafter may be
replaced, adapted or lost cannot guarantee: this rule is for experiments in one process.

    draftwire check-rule examples.rules.greedy_block:GreedyBlockRule

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithms 4, 5 and 6.
"""

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.checking import StatefulRule
from draftwire.checking.emissions import sequence_law
from draftwire.checking.toy_models import Pair
from draftwire.verification.block import largest_success
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import Noise, Outcome, StopLaw
from examples.rules.greedy_block_laws import drawing_deviation, law_of_rounds
from examples.rules.greedy_block_state import Modifications, advance, modify, path_ratios


class GreedyBlockRule(StatefulRule):
    """Algorithm 4 against the target that is in force. Keeps the state of one batch of texts: use one for each run."""

    name = "greedy_block"

    def __init__(self) -> None:
        self.modifications: Modifications | None = None

    @override
    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """Returns the law of Algorithm 4 alone, for blocks whose target is the one in force."""
        if blocks.max_len == 0:
            ones = torch.ones(blocks.batch_size, 1, dtype=torch.float64, device=blocks.lengths.device)
            return StopLaw(ones, ones)
        ratios = path_ratios(blocks)
        scales = torch.cat([ratios.new_ones(blocks.batch_size, 1), ratios], dim=1)
        mass = blocks.residual_mass(scales[:, :-1])[:, 1:]
        inner = ratios[:, :-1]
        other = mass + (1.0 - inner)  # sum over tokens of [draft - R * target]+
        inside_probs = torch.where((inner >= 1.0) | (other <= 0.0), 1.0, (mass / other).clamp(max=1.0))
        tests = torch.cat([inside_probs, ratios[:, -1:]], dim=1)
        at_end = blocks.positions + 1 == blocks.lengths.unsqueeze(1)
        tests = torch.where(at_end, ratios.clamp(max=1.0), tests)
        return StopLaw(largest_success(torch.where(blocks.inside, tests, 0.0)), scales)

    @override
    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Decides and updates the state. The next call must be for the same texts, with blocks no shorter.

        Raises:
            ValueError: a block is too short for a modification that is in force.
        """
        state = self.modifications or Modifications.none(blocks.batch_size, blocks.lengths.device)
        if bool((state.left > blocks.lengths.unsqueeze(1)).any()):
            raise ValueError("greedy_block needs blocks of constant length")
        modified = modify(blocks, state)
        outcome = super().decide(modified.blocks, noise)
        self.modifications = advance(modified, outcome)
        return outcome

    @override
    def law_of_rounds(self, pair: Pair, block_length: int, length: int) -> Tensor:
        return law_of_rounds(self, pair, block_length, length)

    @override
    def drawing_deviation(self, pair: Pair, block_length: int) -> float:
        return drawing_deviation(self, pair, block_length)

    @override
    def expectation(self, pair: Pair, length: int) -> Tensor:
        """Returns the sum over i and over texts of i tokens of min(P, Q): the maximum of one round under any rule."""
        result = torch.zeros(pair.vocab_size + 1, dtype=torch.float64)
        for count in range(1, length + 1):
            result += torch.minimum(*(sequence_law(table, count) for table in (pair.target, pair.drafter))).sum(dim=1)
        return result
