"""Models of the Llama family as `LeanDecoder` reads them: weights and where they belong, without a forward pass.

The modules have the names that transformers gives them, so that weights files fit, and fingerprints are the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in a model's configuration."""

STEADY_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary position embeddings whose angles do not depend on the sequence length."""

KNOWN_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of attention layers in a configuration."""


class LeanModel(nn.Module):
    """The weights of a causal language model."""

    def __init__(self, config: Any) -> None:
        """Makes modules for a configuration of transformers that `why_not_read` finds nothing against."""
        super().__init__()
        self.config = config
        self.name_or_path = str(config.name_or_path)
        self.generation_config: Any = None
        self.model = _Base(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.lm_head.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        """Returns the output layer, as models of transformers do."""
        return self.lm_head


class _Embedding(nn.Embedding):
    """Draws no values where there is no memory for them: torch would import its compiler for that."""

    def reset_parameters(self) -> None:
        """Draws initial values."""
        if not self.weight.is_meta:
            super().reset_parameters()


class _Base(nn.Module):
    """All but the output layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config)
        self.rotary_emb = rotation_of(config)


class _Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config)
        self.self_attn = _Attention(config, index)
        self.post_attention_layernorm = _Norm(config.hidden_size, config)
        self.mlp = _Mlp(config)


class _Attention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        size, queries, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        head = head_size(config)
        has_biases = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(size, queries * head, bias=has_biases)
        self.k_proj = nn.Linear(size, keys * head, bias=has_biases)
        self.v_proj = nn.Linear(size, keys * head, bias=has_biases)
        self.o_proj = nn.Linear(queries * head, size, bias=has_biases and config.model_type != "qwen2")
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = _Norm(head, config), _Norm(head, config)
        self.scaling = head**-0.5
        kinds = getattr(config, "layer_types", None) or []
        is_sliding = index < len(kinds) and kinds[index] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        has_biases = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(outer, inner, bias=has_biases)
        self.up_proj = nn.Linear(outer, inner, bias=has_biases)
        self.down_proj = nn.Linear(inner, outer, bias=has_biases)


class _Norm(nn.Module):
    def __init__(self, size: int, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = config.rms_norm_eps


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Rotary position embedding."""

    rope_type: str
    inv_freq: Tensor
    """`[head_size / 2] float32`: angles of a step, radians."""
    attention_scaling: float
    """Factor of sines and cosines."""


def rotation_of(config: Any) -> RotaryEmbedding:
    """Returns the position embedding of a configuration whose `rope_type` is one of `STEADY_ROTATIONS`."""
    kind = config.rope_parameters["rope_type"]
    with torch.device("cpu"):
        if kind == "default":
            size = head_size(config)
            places = torch.arange(0, size, 2, dtype=torch.float) / size
            return RotaryEmbedding(kind, 1.0 / (config.rope_parameters["rope_theta"] ** places), 1.0)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
        return RotaryEmbedding(kind, frequencies, float(scaling))


def head_size(config: Any) -> int:
    """Returns the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def why_other(config: Any) -> str:
    """Returns the reason why models of a configuration have other layers than the family's; empty if they have not."""
    if config.model_type not in FAMILY:
        return f"models of type {config.model_type} have layers of their own"
    return "" if config.hidden_act == "silu" else f"its activation is {config.hidden_act}"
