"""Training losses: next-token loss for the target, distillation from the target for the drafter."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

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


@torch.inference_mode()
def sample_continuations(
    target: LlamaForCausalLM,
    prompts: NDArray[np.uint16],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> NDArray[np.uint16]:
    """Draws `new_tokens` after each prompt and returns prompt and continuation, `[batch, length]`.

    The drafter is used on the target's own text, so it is trained on that text too.

    Args:
        target: the trained target.
        prompts: `[batch, prompt_length] uint16`.
        new_tokens: tokens to draw per prompt.
        temperature: above 0.
        generator: source of every random number drawn here, on the target's device.
    """
    ids = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    produced, cache, step_input = [ids], None, ids
    for _ in range(new_tokens):
        output = target(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_input = torch.multinomial((output.logits[:, -1].float() / temperature).softmax(-1), 1, generator=generator)
        produced.append(step_input)
    return torch.cat(produced, dim=1).cpu().numpy().astype(np.uint16)
