"""Shapes of the embedded pair, and reading and writing its folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT_LENGTH = 2048
"""Positions that both models declare."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """Dimensions of a Llama model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    head_dim: int

    def build(self, vocab_size: int, seed: int) -> LlamaForCausalLM:
        """Returns a freshly initialised float32 model; token 0 is both BOS and EOS."""
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LlamaForCausalLM(config)


TARGET = PairShape(hidden_size=192, intermediate_size=576, layers=24, heads=4, head_dim=64)
"""13.5 million parameters, deep and narrow, so that a pass costs what a draft can save."""


class DrafterName(StrEnum):
    """Folders of the drafters."""

    DRAFTER = "drafter"
    EIGHT_LAYERS = "drafter-8-layers"
    """Drafter to try layer-parallel drafting on."""


DRAFTERS = {
    DrafterName.DRAFTER: PairShape(hidden_size=192, intermediate_size=576, layers=3, heads=4, head_dim=64),
    DrafterName.EIGHT_LAYERS: PairShape(hidden_size=128, intermediate_size=384, layers=8, heads=4, head_dim=32),
}
"""2.4 and 2.2 million parameters."""


@torch.no_grad()
def inherit(drafter: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Initialises a drafter from the target.

    One as wide as the target takes its embeddings, its last norm, and layers at equal distances, the first and the last
    among them, which shortens the distillation by far. Any other takes the embeddings, projected on their principal
    directions (SVD).

    Source: Sanh et al. 2019, DistilBERT (arXiv 1910.01108), section 3.
    """
    embeddings = target.model.embed_tokens.weight
    if drafter.config.hidden_size != target.config.hidden_size:
        left, scales, _ = torch.linalg.svd(embeddings, full_matrices=False)
        width = min(drafter.config.hidden_size, embeddings.shape[1])
        drafter.model.embed_tokens.weight[:, :width] = left[:, :width] * scales[:width]
        return
    drafter.model.embed_tokens.weight.copy_(embeddings)
    drafter.model.norm.load_state_dict(target.model.norm.state_dict())
    last, last_of_target = len(drafter.model.layers) - 1, len(target.model.layers) - 1
    for place, layer in enumerate(drafter.model.layers):
        source = round(place * last_of_target / max(1, last))
        layer.load_state_dict(target.model.layers[source].state_dict())


def mean_of(models: Sequence[LlamaForCausalLM]) -> LlamaForCausalLM:
    """Returns a model with the mean of the weights of `models`, which were trained on from the same ones.

    Source: Wortsman et al. 2022, Model soups (arXiv 2203.05482).
    """
    mean = LlamaForCausalLM(models[0].config)
    states = [model.state_dict() for model in models]
    mean.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    return mean


def save_bf16(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes the weights to `folder` in bfloat16, leaving `model` as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    cast(torch.nn.Module, copy).to(torch.bfloat16)
    copy.save_pretrained(folder)


def load_float32(folder: Path) -> LlamaForCausalLM:
    """Reads a folder written by `save_bf16` into float32, ready for evaluation."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model
