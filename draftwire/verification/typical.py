"""Typical acceptance: draft tokens are accepted while their target probability is high enough. Lossy.

A draft token is accepted if its target probability is above min(epsilon, delta * exp(-H)), where H is the entropy of
the target's distribution at its position, in nats. The extra token is drawn from the target. No distribution is sent.

Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774), section 2.3.1, with the constants of its code.
"""

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import LawRule, StopLaw


class TypicalRule(LawRule):
    """Accept x_i if its target probability is above a threshold; stop at the first token below it."""

    name = "typical"
    is_lossless = False
    needs_draft_probs = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        """Sets the thresholds: `epsilon` is the maximum, `delta` scales the one that falls with the entropy."""
        self._epsilon = epsilon
        self._delta = delta

    @override
    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """Returns a deterministic law: everything is accepted up to the first unlikely token."""
        inside = blocks.inside.nonzero(as_tuple=True)
        probs = blocks.target_probs[blocks.target_rows[inside]]
        entropies = torch.special.entr(probs).sum(dim=1).to(torch.float64)
        thresholds = torch.zeros(blocks.inside.shape, dtype=torch.float64, device=probs.device)
        thresholds.index_put_(inside, (self._delta * (-entropies).exp()).clamp(max=self._epsilon))
        is_kept = (blocks.target_probs_of_drafts() > thresholds) & blocks.inside
        num_accepted = is_kept.to(torch.int64).cumprod(dim=1).sum(dim=1)
        law = torch.nn.functional.one_hot(num_accepted, blocks.max_len + 1).to(torch.float64)
        return StopLaw(law, torch.ones_like(law))

    @override
    def extra_weights(self, blocks: BlockBatch, law: StopLaw, num_accepted: Tensor) -> Tensor:
        """Returns the target's own distribution, wherever the block ended."""
        return blocks.target_row_after(num_accepted)
