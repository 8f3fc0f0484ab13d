"""Checkpoints of heads with random weights, in the public formats, and what they compute, written down plainly.

Nothing here uses the heads' own code: the formulas are those of the formats' authors, over whole texts, no cache.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 16, 4, 2, 6, 24
LAYERS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


MIMO_THETA = 640_000
"""As published, in the form of older releases of transformers."""


@dataclass
class Checkpoint:
    """A head's folder, and its tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, suffix: str = "safetensors", dtype: torch.dtype = torch.float64) -> "Checkpoint":
        """Writes the folder anew."""
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink()
        (self.folder / "config.json").write_text(json.dumps(self.config))
        stored = {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.tensors.items()}
        if suffix == "safetensors":
            save_file(stored, self.folder / "model.safetensors")
        else:
            torch.save(stored, self.folder / f"pytorch_model.{suffix}")
        return self


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else 1.5 / shape[1] ** 0.5
        made[name] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return made


def draft_ids(count: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Returns `d2t` and `t2d` of some of the ids."""
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(count), "t2d": drafted}


def _layer_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, width),
        f"{prefix}self_attn.v_proj.weight": (keys, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, queries),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3_of_authors(folder: Path, vocab_size: int, drafted: int, num_taps: int = 3, seed: int = 1) -> Checkpoint:
    """Returns a head as the EAGLE authors publish it: without embeddings."""
    shapes = {
        "fc.weight": (HIDDEN, num_taps * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (drafted, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        **_layer_shapes("midlayer.", 2 * HIDDEN),
    }
    config = {**LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": vocab_size}
    tensors = random_tensors(shapes, seed) | draft_ids(drafted, vocab_size, seed)
    return Checkpoint(folder, {**config, "draft_vocab_size": drafted}, tensors)


def eagle3_of_speculators(
    folder: Path, vocab_size: int, drafted: int, taps: list[int], seed: int = 2, **config: Any
) -> Checkpoint:
    """Returns a head in the `speculators` format, with embeddings."""
    own = eagle3_of_authors(folder, vocab_size, drafted, len(taps), seed)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own.tensors.items()}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab_size, HIDDEN)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(taps) * HIDDEN,)
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": drafted,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": taps,
        "transformer_layer_config": {**LAYERS, "vocab_size": vocab_size},
        **config,
    }
    return Checkpoint(folder, values, tensors | random_tensors(shapes, seed + 100))


def eagle1_of_authors(folder: Path, vocab_size: int, layers: int = 1, bias: bool = True, seed: int = 3) -> Checkpoint:
    """Returns a head of EAGLE-1 or 2 as their authors publish it."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "embed_tokens.weight": (vocab_size, HIDDEN),
    }
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    for index in range(layers):
        shapes |= _layer_shapes(f"layers.{index}.", HIDDEN)
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (HIDDEN,)
    config = {**LAYERS, "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "num_hidden_layers": layers}
    return Checkpoint(folder, config, random_tensors(shapes, seed))


def medusa_of_authors(folder: Path, vocab_size: int, depth: int = 3, blocks: int = 1, seed: int = 4) -> Checkpoint:
    """Returns Medusa heads as their authors publish them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(depth):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{block}.linear.bias"] = (HIDDEN,)
        shapes[f"{head}.{blocks}.weight"] = (vocab_size, HIDDEN)
    config = {"medusa_num_heads": depth, "medusa_num_layers": blocks, "base_model_name_or_path": "some/target"}
    return Checkpoint(folder, config, random_tensors(shapes, seed))


def hydra_of_authors(folder: Path, vocab_size: int, depth: int = 3, blocks: int = 2, seed: int = 5) -> Checkpoint:
    """Returns Hydra heads as their authors publish them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(depth):
        for block in range(blocks):
            name = f"hydra_mlp.{head}.{1 + 2 * block}"
            width = HIDDEN if block else (2 + head) * HIDDEN
            for part in ("linear",) if block else ("linear", "res_connection"):
                shapes[f"{name}.{part}.weight"], shapes[f"{name}.{part}.bias"] = (HIDDEN, width), (HIDDEN,)
        shapes[f"hydra_lm_head.{head}.1.weight"] = (vocab_size, HIDDEN)
        shapes[f"hydra_lm_head.{head}.1.bias"] = (vocab_size,)
    config = {"hydra_num_heads": depth, "hydra_num_layers": blocks, "hydra_head_arch": "mlp", "grounded_heads": True}
    return Checkpoint(folder, config, random_tensors(shapes, seed))


def mtp_of_mimo(folder: Path, vocab_size: int, num_layers: int, seed: int = 6) -> Checkpoint:
    """Returns the multi-token-prediction layer of a MiMo target, beside a tensor of the target's own layers."""
    prefix, queries, keys = "model.mtp_layers.0.", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("token", "hidden", "input", "final")},
        f"{prefix}input_proj.weight": (HIDDEN, 2 * HIDDEN),
        **_layer_shapes(prefix, HIDDEN),
        **{f"{prefix}self_attn.{name}_proj.bias": (queries if name == "q" else keys,) for name in "qkv"},
        "model.layers.0.self_attn.q_proj.weight": (1, 1),
    }
    config = {
        **LAYERS,
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": MIMO_THETA,
        "vocab_size": vocab_size,
    }
    return Checkpoint(folder, config, random_tensors(shapes, seed))


# What is changed of them


def with_config(**values: Any) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.config.update(values)


def without(*names: str) -> Callable[[Checkpoint], None]:
    def remove(checkpoint: Checkpoint) -> None:
        for name in names:
            del checkpoint.tensors[name]

    return remove


def with_tensor(name: str, tensor: Tensor) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.tensors.update({name: tensor})


# What they compute


def normalised(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * rows / (rows.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def _attention(tensors: dict[str, Tensor], prefix: str, rows: Tensor, theta: float = 10_000.0) -> Tensor:
    """Returns causal attention over `[count, width]` rows, place by place."""
    count, none = len(rows), torch.zeros((), dtype=torch.float64)
    frequencies = (1.0 / theta ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)).double()
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies

    def turned(heads: Tensor) -> Tensor:
        first, second = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)

    queries, keys, values = (
        (
            rows @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T
            + tensors.get(f"{prefix}self_attn.{name}_proj.bias", none)
        ).view(count, -1, HEAD_DIM)
        for name in "qkv"
    )
    queries, keys = turned(queries), turned(keys)
    mixed = torch.zeros(count, HEADS, HEAD_DIM, dtype=torch.float64)
    for place in range(count):
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            weights = (keys[: place + 1, own] @ queries[place, head] / HEAD_DIM**0.5).softmax(0)
            mixed[place, head] = weights @ values[: place + 1, own]
    return mixed.flatten(1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def _mlp(tensors: dict[str, Tensor], prefix: str, rows: Tensor) -> Tensor:
    gates, ups = (rows @ tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (silu(gates) * ups) @ tensors[f"{prefix}mlp.down_proj.weight"].T


def eagle3_outputs(checkpoint: Checkpoint, embeddings: Tensor, fused: Tensor, token_ids: list[int]) -> Tensor:
    """Returns the layer's outputs, `[count, hidden]`, for pairs of a whole text."""
    tensors, epsilon = checkpoint.tensors, LAYERS["rms_norm_eps"]
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    embedded = normalised(embeddings[token_ids], tensors[f"{prefix}input_layernorm.weight"], epsilon)
    hidden = normalised(fused, tensors[f"{prefix}hidden_norm.weight"], epsilon)
    residual = hidden if checkpoint.config.get("norm_before_residual") else fused
    residual = residual + _attention(tensors, prefix, torch.cat([embedded, hidden], -1))
    weight = tensors[f"{prefix}post_attention_layernorm.weight"]
    return residual + _mlp(tensors, prefix, normalised(residual, weight, epsilon))


def eagle3_logits(checkpoint: Checkpoint, outputs: Tensor, vocab_size: int) -> Tensor:
    """Returns `[count, vocab]` logits of the target's ids."""
    tensors = checkpoint.tensors
    rows = normalised(outputs, tensors["norm.weight"], LAYERS["rms_norm_eps"])
    drafted = rows @ tensors["lm_head.weight"].T
    spread = torch.full((len(rows), vocab_size), -torch.inf, dtype=torch.float64)
    for own, offset in enumerate(tensors["d2t"].tolist()):
        spread[:, own + offset] = drafted[:, own]
    return spread


def eagle1_outputs(checkpoint: Checkpoint, fused: Tensor, token_ids: list[int]) -> Tensor:
    """Returns the last layer's outputs, `[count, hidden]`, for pairs of a whole text."""
    tensors, epsilon = checkpoint.tensors, LAYERS["rms_norm_eps"]
    rows = torch.cat([tensors["embed_tokens.weight"][token_ids], fused], -1) @ tensors["fc.weight"].T
    hidden = rows + tensors.get("fc.bias", torch.zeros(()))
    for index in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        rows = normalised(hidden, tensors[f"{prefix}input_layernorm.weight"], epsilon) if index else hidden
        hidden = hidden + _attention(tensors, prefix, rows)
        weight = tensors[f"{prefix}post_attention_layernorm.weight"]
        hidden = hidden + _mlp(tensors, prefix, normalised(hidden, weight, epsilon))
    return hidden


def mtp_outputs(checkpoint: Checkpoint, embeddings: Tensor, features: Tensor, token_ids: list[int]) -> Tensor:
    """Returns the layer's outputs after its last norm, `[count, hidden]`, for pairs of a whole text whose features were
    normalised. The first pair's embedding counts as 0.
    """
    tensors, epsilon, prefix = checkpoint.tensors, LAYERS["rms_norm_eps"], "model.mtp_layers.0."

    def norm(rows: Tensor, name: str) -> Tensor:
        return normalised(rows, tensors[f"{prefix}{name}_layernorm.weight"], epsilon)

    embedded = embeddings[token_ids].clone()
    embedded[0] = 0.0
    hidden = torch.cat([features, norm(embedded, "token")], -1) @ tensors[f"{prefix}input_proj.weight"].T
    hidden = hidden + _attention(tensors, prefix, norm(hidden, "input"), checkpoint.config["rope_theta"])
    hidden = hidden + _mlp(tensors, prefix, norm(hidden, "post_attention"))
    return norm(hidden, "final")
