"""Block verification: decides about all draft tokens of a block together, which accepts the most tokens possible.

Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2.

With r_i = target / draft probability of draft token x_i, p_i and q_i the target's and the drafter's distribution after
x_1 .. x_i, and n the block's length:

    a_0 = 1,  a_i = min(1, a_{i-1} r_i)                           the block weights
    S_i = sum over tokens of [a_i p_i - q_i]+                     the residual mass
    h_i = S_i / (S_i + 1 - a_i) for 0 < i < n,  h_n = a_n

The rule accepts the largest i whose test, a coin of probability h_i, succeeds. All tests count: a failed one does not
end the block. So exactly i tokens are accepted with probability h_i (1 - h_{i+1}) ... (1 - h_n), where h_0 = 1. At
least i tokens are accepted with probability a_i, and no rule that can be chained does better.
"""

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import LawRule, StopLaw


class BlockRule(LawRule):
    """Accept the longest prefix whose test succeeds."""

    name = "block"
    takes_trees = True  # which `traversal` decides about

    @override
    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        weights = block_weights(blocks)
        return StopLaw(largest_success(_test_probs(blocks, weights)), weights)


def block_weights(blocks: BlockBatch) -> Tensor:
    """Returns a_0 .. a_n, `[batch, max_len + 1] float64`; 0 in the padding.

    In logarithms the recursion is a walk reflected at 0: log a_i = L_i - max(0, max over j <= i of L_j), where L_i is
    the sum of log r_1 .. log r_i. This form needs no loop over positions and cannot overflow.
    """
    if not blocks.has_drafts:
        return blocks.target_probs.new_ones(blocks.batch_size, 1, dtype=torch.float64)
    steps = blocks.log_ratios()  # -inf at impossible tokens, and in the padding
    walk = torch.cat([steps.new_zeros(blocks.batch_size, 1), steps], dim=1).cumsum(dim=1)  # L_0 = 0, L_1, ...
    return (walk - walk.cummax(dim=1).values).exp_()


def largest_success(test_probs: Tensor) -> Tensor:
    """Returns the law of the largest i whose independent test succeeds, 0 if none does.

    Args:
        test_probs: `[batch, max_len] float64`, of the tests 1 .. n.

    Returns:
        `[batch, max_len + 1] float64`.
    """
    ones = test_probs.new_ones(len(test_probs), 1)
    later_fail = (1.0 - test_probs).flip(1).cumprod(dim=1).flip(1)  # tests i .. n all fail
    return torch.cat([ones, test_probs], dim=1) * torch.cat([later_fail, ones], dim=1)


def _test_probs(blocks: BlockBatch, weights: Tensor) -> Tensor:
    """Returns h_1 .. h_n, `[batch, max_len] float64`; 0 in the padding."""
    if blocks.max_len == 0:
        return weights[:, 1:]
    mass = blocks.residual_mass(weights[:, :-1])[:, 1:]  # S_1 .. S_{n-1}
    inner = weights[:, 1:-1]
    total = mass + (1.0 - inner)  # in this order: (mass + 1) - inner would lose a small mass
    # 0 / 0 means target == draft after a prefix of weight 1, where a later test succeeds with certainty: any value.
    inside_probs = mass.div(total).nan_to_num_(nan=1.0)
    tests = torch.cat([inside_probs, weights[:, -1:]], dim=1)
    if not blocks.is_ragged:
        return tests
    tests = torch.where(blocks.positions + 1 == blocks.lengths.unsqueeze(1), weights[:, 1:], tests)  # h_n = a_n
    return tests.masked_fill_(~blocks.inside, 0.0)
