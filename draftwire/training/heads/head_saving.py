"""Writes trained heads in the format of the `speculators` package."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftwire.options.heads.head_formats import SPECULATORS, TAPS
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_shape import DRAFT_IDS, HeadShape


def save_head(
    head: nn.Module, shape: HeadShape, target: Path, folder: Path, draft_ids: Tensor | None, dtype: torch.dtype
) -> None:
    """Writes `config.json` and `model.safetensors`, without the weights of the target: those that were not trained.

    EAGLE-3 is written as `speculators` 0.4 reads it, Medusa as its registered configuration states; of Hydra, that
    package has no released version, and the names are those of its repository, with one output layer, the target's.

    `draft_ids` is `[draft_vocab_size] int64`; None if the head drafts all ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = shape.config.kind
    weights = {name: each for name, each in head.named_parameters() if each.requires_grad}
    if kind is not HeadKind.EAGLE3:
        weights = {_mlp_name(kind, name): each for name, each in weights.items()}
    stored = {name: each.detach().to("cpu", dtype).contiguous() for name, each in weights.items()}
    if draft_ids is not None:
        ids = draft_ids.cpu()
        drafted = torch.zeros(shape.config.vocab_size, dtype=torch.bool)
        drafted[ids] = True
        stored |= {DRAFT_IDS: ids - torch.arange(len(ids)), "t2d": drafted}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(shape, target, dtype), indent=2) + "\n", encoding="utf-8")


def _mlp_name(kind: HeadKind, name: str) -> str:
    _, depth, block, rest = name.split(".", 3)
    if kind is HeadKind.HYDRA:
        return f"hydra_mlp.{depth}.{block}.{rest}"
    return f"blocks.{depth}.layers.{block}.{rest.removeprefix('linear.')}"


def _config(shape: HeadShape, target: Path, dtype: torch.dtype) -> dict[str, Any]:
    config, kind = shape.config, shape.config.kind
    architecture = json.loads((target / "config.json").read_text(encoding="utf-8")).get("architectures", [])
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.most_tokens or 4,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    values: dict[str, Any] = {
        SPECULATORS: kind.value,
        "speculators_config": {
            "algorithm": kind.value,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": architecture, "name_or_path": target.name},
        },
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }
    if kind is HeadKind.EAGLE3:
        is_as_wide = config.target_hidden_size == config.hidden_size
        return values | {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": config.draft_vocab_size,
            TAPS: list(config.taps),
            "embed_requires_grad": False,
            "norm_before_fc": shape.norm_before_fusion,
            "norm_before_residual": shape.norm_before_residual,
            "target_hidden_size": None if is_as_wide else config.target_hidden_size,
            "transformer_layer_config": _layers(shape),
        }
    if kind is HeadKind.MEDUSA:
        return values | {
            "architectures": ["MedusaModel"],
            "num_heads": config.most_tokens,
            "num_hidden_layers": shape.num_blocks,
            "medusa_hidden_size": config.hidden_size,
            "medusa_vocab_size": config.vocab_size,
            "truncated_vocab_size": 0,
            "original_lm_head": True,
            "medusa_fc_bias": True,
        }
    return values | {
        "architectures": ["HydraModel"],
        "num_hydra_heads": config.most_tokens,
        "num_hydra_layers": shape.num_blocks,
        "use_prefix_mlp": False,
        "original_lm_head": True,
        "draft_vocab_size": config.draft_vocab_size,
        "transformer_layer_config": {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size},
    }


def _layers(shape: HeadShape) -> dict[str, Any]:
    """Returns the configuration of the decoder layers, as far as the head depends on it."""
    entries = (
        "model_type",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "vocab_size",
    )
    values = cast(dict[str, Any], shape.layers.to_dict())
    return {entry: values[entry] for entry in entries if entry in values}
