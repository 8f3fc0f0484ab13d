"""Where the training of a head starts from: the target's own weights, as far as they fit."""

from typing import Any

import torch
from torch import Tensor, nn

from draftwire.training.heads.eagle_trainee import EagleTrainee
from draftwire.training.heads.mlp_trainee import MlpTrainee

SPREAD = 0.02
"""Standard deviation of weights that the target has nothing for."""


@torch.no_grad()
def start_from(trainee: EagleTrainee | MlpTrainee, target: Any, draft_ids: Tensor | None, seed: int) -> None:
    """Gives a head weights to start from.

    A head takes the target's embeddings, and its output layer, of the ids that it drafts. EAGLE-3 also takes the
    target's last norm; the features of the last tap pass through `fc` as they are; and where its layer is like the
    target's last but one, it takes that one, which reads the features as it would its own input, with as many neurons
    of its MLP as there are in both.

    Args:
        trainee: is changed.
        target: a model of the Llama family, as `load_lean_model` gives it.
        draft_ids: `[draft_vocab_size] int64`; None if the head drafts all ids.
        seed: of the weights that the target has nothing for.
    """
    generator = torch.Generator().manual_seed(seed)
    trainee.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    output = target.lm_head.weight
    trainee.lm_head.weight.copy_(output if draft_ids is None else output[draft_ids])
    if isinstance(trainee, MlpTrainee):
        trainee.target_norm.weight.copy_(target.model.norm.weight)
        return
    trainee.norm.weight.copy_(target.model.norm.weight)
    size = trainee.fc.out_features
    for module in trainee.modules():
        if isinstance(module, nn.Linear) and module is not trainee.lm_head:
            module.weight.normal_(0.0, SPREAD, generator=generator)
    width = trainee.fc.in_features
    if target.config.hidden_size == size:
        trainee.fc.weight[:, width - size :].copy_(torch.eye(size))
    own: Any = trainee.layers[0]
    source = target.model.layers[max(0, len(target.model.layers) - 2)]
    if target.config.model_type not in ("llama", "mistral") or target.config.hidden_size != size:
        return
    own.hidden_norm.weight.copy_(source.input_layernorm.weight)
    own.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    own.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own.self_attn, name).weight[:, size:].copy_(getattr(source.self_attn, name).weight)
    for name in ("gate_proj", "up_proj"):
        _copy_first(getattr(source.mlp, name).weight, getattr(own.mlp, name).weight)
    _copy_first(source.mlp.down_proj.weight.T, own.mlp.down_proj.weight.T)


def _copy_first(source: Tensor, target: Tensor) -> None:
    """Copies as many of the first rows as both have."""
    count = min(len(source), len(target))
    target[:count] = source[:count]
