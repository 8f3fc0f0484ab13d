"""Text of the target's own, for drafters to learn from."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM


@torch.inference_mode()
def sample_continuations(
    target: LlamaForCausalLM,
    prompts: NDArray[np.uint16],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> NDArray[np.uint16]:
    """Draws `new_tokens` after each prompt and returns prompt and continuation, `[batch, length]`.

    The drafter is used on the target's own text, so it is trained on that text too. The prompts are
    `[batch, prompt_length] uint16`, the generator is on the target's device.
    """
    ids = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    produced, cache, step_input = [ids], None, ids
    for _ in range(new_tokens):
        output = target(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_input = torch.multinomial((output.logits[:, -1].float() / temperature).softmax(-1), 1, generator=generator)
        produced.append(step_input)
    return torch.cat(produced, dim=1).cpu().numpy().astype(np.uint16)
