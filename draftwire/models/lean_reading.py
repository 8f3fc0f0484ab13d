"""Reads the weights of models of the Llama family from their folders, without transformers' modelling code.

Importing that takes longer than reading a small model does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftwire.models.configuration import DRAFTING_WEIGHTS
from draftwire.models.folder import NAMED_WEIGHTS, weights_files
from draftwire.models.lean_model import KNOWN_LAYERS, STEADY_ROTATIONS, LeanModel, why_other


def why_not_read(config: Any) -> str:
    """Returns the reason why a model of a configuration is left to transformers; empty if `read_weights` reads it."""
    if reason := why_other(config):
        return reason
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in STEADY_ROTATIONS:
        return f"its position embeddings are of kind {rope.get('rope_type')}"
    kinds = getattr(config, "layer_types", None) or ()
    if not all(kind in KNOWN_LAYERS for kind in kinds) or getattr(config, "attention_chunk_size", None):
        return "it has layers of other kinds"
    if getattr(config, NAMED_WEIGHTS, None):
        return "its weights have a name of their own"
    return ""


def read_weights(folder: Path, config: Any) -> LeanModel | None:
    """Returns the model in a folder that `check_folder` takes, with weights of the file's types; None if the files hold
    others than it needs. For its configuration see `why_not_read`.

    Raises:
        OSError: a file cannot be read.
    """
    with torch.device("meta"):
        model = LeanModel(config)
    weights = dict(_tensors_of(folder))
    if config.tie_word_embeddings:
        if "lm_head.weight" in weights:
            return None  # which of the two counts is for transformers to say
        weights["lm_head.weight"] = weights.get("model.embed_tokens.weight", torch.empty(0))
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        return None
    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(False).eval()


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weights_files(folder):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # which is no mapping
                if not key.endswith("rotary_emb.inv_freq") and not key.startswith(DRAFTING_WEIGHTS):
                    yield key, file.get_tensor(key)
