"""Losses of the pair: of the next token for the target, distillation from the target for a drafter."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from draftwire.training.distillation import divergence
from draftwire.training.trainer import LossFunction


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, nats; `ids` is `[batch, length + 1] int64`."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def distillation_loss(target: LlamaForCausalLM) -> LossFunction:
    """Returns a loss that pulls the drafter's distribution to the target's at every position.

    The cross-entropy to the target's distribution, which has good gradients from the start, plus twice the total
    variation distance, which is one minus the probability that a draft token is accepted.

    Its batches are of lessons: what the target says is the product of its last hidden states and its embeddings.

    Source: Zhou et al. 2024, DistillSpec (arXiv 2310.08461); Leviathan et al. 2023, Corollary 3.6.
    """
    embeddings = target.lm_head.weight.detach()

    def loss(model: PreTrainedModel, ids: Tensor, states: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            target_logits = functional.linear(states, embeddings)
            draft_logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return divergence(functional.softmax(target_logits.float(), dim=-1), draft_logits.float())

    return loss
