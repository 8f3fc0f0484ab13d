"""A rule of one's own: keep a draft token while it is what the target itself draws.

The target draws a token after each prefix, as it would alone. As long as that is the draft token, one forward pass has
decided several; the first other token ends the block. So a draft token x is kept with the probability p(x) that the
target gives it, and what follows a rejection is drawn from the rest of p. Nothing has to be known of the drafter. At
higher temperatures less is kept than by `block`: the sum of p q over the vocabulary in place of that of min(p, q).

    draftwire check-rule examples.rules.exact_match.ExactMatchRule
    draftwire serve verifier --rules examples.rules.exact_match.ExactMatchRule ...
"""

import torch
from torch import Tensor

from draftwire.verification import BlockBatch, LawRule, StopLaw


class ExactMatchRule(LawRule):
    """Accept x_i with the target's probability of it; stop at the first rejection."""

    name = "exact_match"
    needs_draft_probs = False

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """Returns how many draft tokens are kept: each on its own, with the target's probability of it."""
        keep_probs = blocks.target_probs_of_drafts().masked_fill(~blocks.inside, 0.0)  # [batch, max_len]
        ones = keep_probs.new_ones(blocks.batch_size, 1)
        reach_probs = torch.cat([ones, keep_probs.cumprod(dim=1)], dim=1)  # P(accepted >= i)
        stop_probs = torch.cat([1.0 - keep_probs, ones], dim=1)
        return StopLaw(reach_probs * stop_probs, torch.ones_like(reach_probs))

    def extra_weights(self, blocks: BlockBatch, law: StopLaw, num_accepted: Tensor) -> Tensor:
        """Returns the target's distribution, without the draft token that was rejected if one was."""
        weights = blocks.target_row_after(num_accepted)
        if blocks.has_drafts:
            is_rejected = num_accepted < blocks.lengths
            rejected = blocks.draft_tokens.gather(1, num_accepted.clamp(max=blocks.max_len - 1).unsqueeze(1))
            weights.scatter_(1, rejected, weights.gather(1, rejected).masked_fill(is_rejected.unsqueeze(1), 0.0))
        return weights
