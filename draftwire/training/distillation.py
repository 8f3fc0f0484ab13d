"""Losses that pull a drafter's distribution to the target's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftwire.training.muon import fast_type

STEP_DECAY = 0.8
"""Weight of a draft token's loss, as a share of that of the one before it: it only matters if that one is accepted."""


def divergence(target: Tensor, draft_logits: Tensor) -> Tensor:
    """Returns the mean over all rows of the cross-entropy plus twice the total variation distance, nats.

    Args:
        target: `[..., draft_vocab] float32`, the target's probabilities of what can be drafted. What it gives to other
            tokens can never be accepted, and adds half of itself to the distance, whatever is drafted.
        draft_logits: `[..., draft_vocab] float32`.
    """
    draft_log = functional.log_softmax(draft_logits, dim=-1)
    cross_entropy = -(target * draft_log).sum(-1)
    total_variation = 0.5 * (target - draft_log.exp()).abs().sum(-1)
    return (cross_entropy + 2.0 * total_variation).mean()


def _masses(logits: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Returns the probabilities of the ids that can be drafted, in float32; `draft_ids` None is all of them."""
    if draft_ids is None:
        return logits.float().softmax(-1)
    log_sums = logits.float().logsumexp(-1, keepdim=True)
    return (logits[..., draft_ids].float() - log_sums).exp()


def head_loss(draft_ids: Tensor | None) -> Callable[..., Tensor]:
    """Returns a loss for batches as `streamed_lessons` yields them, on the device of the head.

    The head computes in bfloat16 where the device has instructions for it, from weights in float32. `draft_ids` are
    the target's ids that the head's stand for, `[draft_vocab] int64`; None if they are the same.

    Source: the weights are those of EAGLE-3's own training (arXiv 2503.01840); the distance is that of DistillSpec.
    """

    def loss(head: nn.Module, ids: Tensor, features: Tensor, target_logits: Tensor) -> Tensor:
        count = features.shape[1]
        is_mixed = fast_type(ids.device) is torch.bfloat16
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_mixed):
            drafted = head(features, ids)
        target = _masses(target_logits, draft_ids)
        total, weights = ids.new_zeros((), dtype=torch.float32), 0.0
        for step, logits in enumerate(drafted):
            wanted = target[:, 1 + step : 1 + step + count]
            weight = STEP_DECAY**step
            total = total + weight * divergence(wanted, logits.float())
            weights += weight
        return total / weights

    return loss
