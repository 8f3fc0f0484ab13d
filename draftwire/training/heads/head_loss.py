"""Loss of a head: the distance of its distributions from the target's, over several draft tokens in a row."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftwire.training.distillation import divergence
from draftwire.training.precision import fast_type

STEP_DECAY = 0.8
"""Weight of a draft token's loss, as a share of that of the one before it: it only matters if that one is accepted."""


def head_loss(draft_ids: Tensor | None) -> Callable[..., Tensor]:
    """Returns a loss for batches as `streamed_lessons` yields them, on the device of the head.

    The head computes in bfloat16 where the device has instructions for it, from weights in float32.

    Args:
        draft_ids: `[draft_vocab_size] int64`, the target's ids that the head drafts; None if it drafts all.

    Source: the weights are those of EAGLE-3's own training (arXiv 2503.01840); the distance is that of DistillSpec.
    """

    def loss(head: nn.Module, ids: Tensor, features: Tensor, target_logits: Tensor) -> Tensor:
        count = features.shape[1]
        is_mixed = fast_type(ids.device) is torch.bfloat16
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_mixed):
            drafted = head(features, ids)
        target = target_logits.float().softmax(-1)
        total, weights = ids.new_zeros((), dtype=torch.float32), 0.0
        for step, logits in enumerate(drafted):
            wanted = target[:, 1 + step : 1 + step + count]
            weight = STEP_DECAY**step
            total = total + weight * divergence(wanted, logits.float(), draft_ids)
            weights += weight
        return total / weights

    return loss
