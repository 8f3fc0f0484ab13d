"""Block verification: the draft tokens of a block are judged together, which accepts the most tokens possible.

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

from draftwire.verification.rule import BlockBatch, StopLaw


class BlockRule:
    """Accept the longest prefix whose test succeeds."""

    name = "block"

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """See `VerificationRule.stop_law`."""
        weights = block_weights(blocks)
        tests = _test_probs(blocks, weights)
        ones = weights.new_ones(len(weights), 1)
        later_fail = (1.0 - tests).flip(1).cumprod(dim=1).flip(1)  # [batch, max_len]: tests i .. n all fail
        accepted = torch.cat([ones, tests], dim=1) * torch.cat([later_fail, ones], dim=1)
        return StopLaw(accepted, weights)


def block_weights(blocks: BlockBatch) -> Tensor:
    """Returns a_0 .. a_n, `[batch, max_len + 1] float64`; 0 in the padding.

    In logarithms the recursion is a walk reflected at 0: log a_i = L_i - max(0, max over j <= i of L_j), where L_i is
    the sum of log r_1 .. log r_i. This form needs no loop over positions and cannot overflow.
    """
    walk = blocks.ratios().log().cumsum(dim=1)  # -inf from the first impossible token on, and in the padding
    highest = walk.clamp(min=0.0).cummax(dim=1).values
    return torch.cat([walk.new_ones(len(walk), 1), (walk - highest).exp()], dim=1)


def _test_probs(blocks: BlockBatch, weights: Tensor) -> Tensor:
    """Returns h_1 .. h_n, `[batch, max_len] float64`; 0 in the padding."""
    inner = weights[:, 1:-1]  # a_1 .. a_{n-1} of the longest block
    target, draft = blocks.target_probs[:, 1:-1], blocks.draft_probs[:, 1:]
    mass = (inner.unsqueeze(-1).to(target.dtype) * target - draft).clamp(min=0.0).sum(dim=-1, dtype=torch.float64)
    total = mass + (1.0 - inner)  # in this order: (mass + 1) - inner would lose a small mass
    # 0 / 0 means target == draft after a fully weighted prefix, where a later test succeeds with certainty: any value.
    inside_probs = torch.where(total > 0.0, mass / torch.where(total > 0.0, total, 1.0), 1.0)
    tests = torch.cat([inside_probs, weights[:, -1:]], dim=1)[:, : weights.shape[1] - 1]
    positions = torch.arange(1, tests.shape[1] + 1, device=tests.device)
    tests = torch.where(positions == blocks.lengths.unsqueeze(1), weights[:, 1:], tests)  # h_n = a_n
    return torch.where(blocks.inside, tests, 0.0)
