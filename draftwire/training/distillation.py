"""What the models are trained towards: text for the target, the target itself for the drafter."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from draftwire.training.trainer import LossFunction


def next_token_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, nats; `batch` is `[batch, length + 1] int64`."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def distillation_loss(teacher: LlamaForCausalLM, total_variation_share: float) -> LossFunction:
    """Returns a loss that pulls the drafter's distribution to the target's at every position.

    A mixture of the forward KL divergence, whose gradients are good from the start, and the total variation distance,
    which is exactly one minus the acceptance probability of a draft token.

    Source: Zhou et al. 2024, DistillSpec (arXiv 2310.08461); Leviathan et al. 2023, Corollary 3.6.
    """

    @torch.compile
    def teacher_logits(ids: Tensor) -> Tensor:
        logits: Tensor = teacher(input_ids=ids).logits
        return logits

    def loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
        inputs = batch[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target_logits = teacher_logits(inputs)
            draft_logits = model(input_ids=inputs).logits
        target = functional.softmax(target_logits.float(), dim=-1)
        draft_log = functional.log_softmax(draft_logits.float(), dim=-1)
        divergence = -(target * draft_log).sum(-1).mean()
        if total_variation_share == 0.0:
            return divergence
        distance = 0.5 * (target - draft_log.exp()).abs().sum(-1).mean()
        return (1.0 - total_variation_share) * divergence + total_variation_share * 10.0 * distance

    return loss


@torch.inference_mode()
def sample_continuations(
    target: LlamaForCausalLM,
    prompts: NDArray[np.uint16],
    new_tokens: int,
    generator: torch.Generator,
) -> NDArray[np.uint16]:
    """Draws `new_tokens` at temperature 1 after each prompt and returns prompt and continuation, `[batch, length]`.

    The drafter is used on the target's own text, so it is trained on that text too.

    Args:
        target: the trained target.
        prompts: `[batch, prompt_length] uint16`.
        new_tokens: tokens to draw per prompt.
        generator: source of every random number drawn here.
    """
    ids = torch.from_numpy(prompts.astype(np.int64))
    produced, cache, step_input = [ids], None, ids
    for _ in range(new_tokens):
        output = target(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_input = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator)
        produced.append(step_input)
    return torch.cat(produced, dim=1).numpy().astype(np.uint16)
