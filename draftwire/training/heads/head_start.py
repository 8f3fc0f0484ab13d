"""Where the training of a head starts from: the target's own weights, as far as they fit."""

from typing import Any

import torch
from torch import Tensor, nn

from draftwire.training.heads.eagle_trainee import EagleTrainee
from draftwire.training.heads.mlp_trainee import MlpTrainee

SPREAD = 0.01
"""Standard deviation of what an EAGLE-3 layer adds to its input with, so that it begins by changing little."""


@torch.no_grad()
def start_from(trainee: EagleTrainee | MlpTrainee, target: Any, draft_ids: Tensor | None, seed: int) -> None:
    """Gives a head weights to start from: the target's embeddings, and its output layer and norm.

    The projections of EAGLE-3 start at random and keep the size of normalised rows. The target's own layers would be no
    help: they read and write states of another size.

    Args:
        trainee: is changed.
        target: a model of the Llama family, as `load_lean_model` gives it.
        draft_ids: `[draft_vocab_size] int64`; None if the head drafts all ids.
        seed: of the weights that the target has nothing for.
    """
    trainee.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    output = target.lm_head.weight
    trainee.lm_head.weight.copy_(output if draft_ids is None else output[draft_ids])
    if isinstance(trainee, MlpTrainee):
        trainee.target_norm.weight.copy_(target.model.norm.weight)
        return
    trainee.norm.weight.copy_(target.model.norm.weight)
    generator = torch.Generator().manual_seed(seed)
    for name, module in trainee.named_modules():
        if isinstance(module, nn.Linear) and module is not trainee.lm_head:
            spread = SPREAD if name.endswith(("o_proj", "down_proj")) else module.in_features**-0.5
            module.weight.normal_(0.0, spread, generator=generator)
