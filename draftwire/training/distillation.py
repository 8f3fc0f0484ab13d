"""The loss that pulls a drafter's distribution to the target's."""

from torch import Tensor
from torch.nn import functional


def divergence(target: Tensor, draft_logits: Tensor, draft_ids: Tensor | None = None) -> Tensor:
    """Returns the mean over all rows of the cross-entropy plus twice the total variation distance, nats.

    Args:
        target: `[..., vocab] float32`, the target's distributions.
        draft_logits: `[..., draft_vocab] float32`.
        draft_ids: `[draft_vocab] int64`, the target's ids that the drafter's stand for; None if they are the same. What
            the target gives to others can never be accepted, and adds half of itself to the distance, whatever is
            drafted.
    """
    if draft_ids is not None:
        target = target[..., draft_ids]
    draft_log = functional.log_softmax(draft_logits, dim=-1)
    cross_entropy = -(target * draft_log).sum(-1)
    total_variation = 0.5 * (target - draft_log.exp()).abs().sum(-1)
    return (cross_entropy + 2.0 * total_variation).mean()
