"""Token verification: decides about each draft token by itself; the first rejection ends the block.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192),
Algorithm 1; Chen et al. 2023 (arXiv 2302.01318).
"""

import torch
from typing_extensions import override

from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import LawRule, StopLaw


class TokenRule(LawRule):
    """Accept x_i with probability min(1, target / draft); stop at the first rejection."""

    name = "token"

    @override
    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        keep_probs = blocks.ratios().clamp(max=1.0)  # [batch, max_len], 0 in the padding
        ones = keep_probs.new_ones(blocks.batch_size, 1)
        reach_probs = torch.cat([ones, keep_probs.cumprod(dim=1)], dim=1)  # P(accepted >= i)
        stop_probs = torch.cat([1.0 - keep_probs, ones], dim=1)
        return StopLaw(reach_probs * stop_probs, torch.ones_like(reach_probs))
