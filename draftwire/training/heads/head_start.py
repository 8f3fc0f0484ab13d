"""Initialises a head for training: with the target's own weights, as far as they fit."""

from typing import Any

import torch
from torch import Tensor, nn

from draftwire.training.heads.eagle_trainee import EagleTrainee
from draftwire.training.heads.mlp_trainee import MlpTrainee

SPREAD = 0.01
"""Standard deviation of the output projections of an EAGLE-3 layer, so that it changes its input little at first."""


@torch.no_grad()
def start_from(trainee: EagleTrainee | MlpTrainee, target: Any, draft_ids: Tensor | None, seed: int) -> None:
    """Initialises the weights of a head, in place: with the target's embeddings, output layer and norm.

    The projections of EAGLE-3 start at random and keep the size of normalised rows. The target's own layers would not
    help: they read and write states of another size.

    The target is as `load_lean_model` returns it. `draft_ids` is `[draft_vocab_size] int64`; None if the head drafts
    all ids.
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
