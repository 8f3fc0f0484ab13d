"""The forward pass of the Llama family with nothing in it but the operations.

Runs the weights of a transformers model: Llama, Mistral, Qwen2 and Qwen3, whose layers differ by biases, by norms of
queries and keys, and by sliding windows. Projections that read the same input are one, no module is called, and nothing
is looked up or decided layer by layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu
from transformers import PreTrainedModel

from draftwire.models.linear import Linear
from draftwire.models.paged_attention import AttentionShape, PackedStep
from draftwire.models.process_group import ProcessGroup

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in a model's configuration."""

STEADY_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary position embeddings whose angles do not depend on the length of the text."""

Attend = Callable[[int, AttentionShape, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: its index and shape, `[tokens, heads, head_dim]` queries, `[tokens, kv_heads, head_dim]` keys
and values of the new tokens; returns `[tokens, heads, head_dim]`."""


def why_not_lean(model: PreTrainedModel) -> str:
    """Returns why `LeanDecoder` cannot run a model; empty if it can."""
    config = model.config
    if config.model_type not in FAMILY:
        return f"models of type {config.model_type} have layers of their own"
    if getattr(config, "quantization_config", None) is not None:
        return "it is quantised"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rotation = getattr(model.model.rotary_emb, "rope_type", None)
    if rotation not in STEADY_ROTATIONS:
        return f"its position embeddings are of kind {rotation}"
    others = {type(module).__name__ for module in model.modules() if _is_replaced_linear(module)}
    return f"its linear layers are of kind {', '.join(sorted(others))}" if others else ""


def _is_replaced_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a quantised linear layer, an adapter, or the like."""
    return "linear" in type(module).__name__.lower() and type(module) is not torch.nn.Linear


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalises rows by their root mean square."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "Norm":
        """Takes over a norm of transformers."""
        return cls(module.weight.detach().clone(), float(module.variance_epsilon))

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the normalised rows, scaled."""
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    before_attention: Norm
    queries_keys_values: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    shape: AttentionShape
    output: Linear
    before_mlp: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, module: Any, config: Any) -> "Layer":
        """Takes over a layer of transformers."""
        attention, mlp = module.self_attn, module.mlp
        has_norms = hasattr(attention, "q_norm")
        # Mistral's layers read their window from the configuration.
        window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
        return cls(
            Norm.of(module.input_layernorm),
            Linear(attention.q_proj, attention.k_proj, attention.v_proj),
            Norm.of(attention.q_norm) if has_norms else None,
            Norm.of(attention.k_norm) if has_norms else None,
            AttentionShape(attention.scaling, window),
            Linear(attention.o_proj),
            Norm.of(module.post_attention_layernorm),
            Linear(mlp.gate_proj, mlp.up_proj),
            Linear(mlp.down_proj),
        )


class LeanDecoder:
    """A model of the Llama family. See `Decoder`."""

    def __init__(self, model: PreTrainedModel, consumes: bool = False, group: ProcessGroup | None = None) -> None:
        """Takes over a model's weights.

        Args:
            model: one that `why_not_lean` has nothing against, in evaluation mode, on its device.
            consumes: whether the model is given up layer by layer, so that there are never two copies of its weights.
            group: whose ranks have a part of the model each: whole embeddings and norms, some of the heads and of the
                MLPs' inner dimension, as many rows of the output. Only rank 0 gets logits of the whole vocabulary.
        """
        base: Any = model.model
        config = base.config
        self._group = group
        self.device = model.device
        self._embedding = base.embed_tokens.weight.detach()
        if consumes and self.device.type == "cpu":
            self._embedding = self._embedding.clone()  # else one tensor keeps the whole file of weights in memory
        self._layers = []
        for index, module in enumerate(base.layers):
            self._layers.append(Layer.of(module, config))
            if consumes:
                base.layers[index] = torch.nn.Identity()
        self._norm = Norm.of(base.norm)
        head: Any = model.get_output_embeddings()
        self._head = Linear(head)
        self.vocab_size = len(self._embedding)  # the head of a part may be padded
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._frequencies = base.rotary_emb.inv_freq.float()
        self._rotation_scale = float(base.rotary_emb.attention_scaling)
        self._head_dim = 2 * len(self._frequencies)

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        hidden = self.hidden(token_ids, step.positions, step.attend)
        return self.head(hidden if len(kept) == len(hidden) else hidden.index_select(0, kept))

    def head(self, hidden: Tensor) -> Tensor:
        """Returns `[tokens, vocab]` logits for `[tokens, hidden]` outputs of the last layer."""
        logits = self._head(self._norm(hidden))
        if self._group is None:
            return logits
        return self._group.gather_columns(logits)[:, : self.vocab_size].contiguous()

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns what the last layer puts out, `[tokens, hidden]`.

        Args:
            token_ids: `[tokens] int64`.
            positions: `[tokens] int64`, in their sequences.
            attend: looks after keys and values, and who sees whom.
        """
        rows = embedding(token_ids, self._embedding)
        cosines, sines = self._rotation(positions, rows.dtype)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._projected(layer, layer.before_attention(rows), cosines, sines)
            attended = attend(index, layer.shape, queries, keys, values)
            rows += self._summed(layer.output(attended.flatten(1)))
            gates, ups = layer.gate_up(layer.before_mlp(rows)).chunk(2, dim=-1)
            rows += self._summed(layer.down(silu(gates).mul_(ups)))
        return rows

    def _summed(self, part: Tensor) -> Tensor:
        """Returns the sum of what all ranks put out."""
        if self._group is not None:
            self._group.all_reduce(part)
        return part

    def _projected(self, layer: Layer, rows: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a layer's queries, keys and values, `[tokens, heads, head_dim]` each, positions applied."""
        projected = layer.queries_keys_values(rows).unflatten(-1, (-1, self._head_dim))
        num_rotated = self._heads + self._kv_heads
        rotated, values = projected[:, :num_rotated], projected[:, num_rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = layer.query_norm(rotated[:, : self._heads]), layer.key_norm(rotated[:, self._heads :])
            rotated = torch.cat([queries, keys], dim=1)
        # The second half of each head with the first one's sine, and the other way round.
        rotated = torch.addcmul(rotated * cosines, rotated.roll(self._head_dim // 2, -1), sines)
        return rotated[:, : self._heads], rotated[:, self._heads :], values

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns what heads are multiplied with, and their swapped halves, `[tokens, 1, head_dim]` each."""
        angles = positions.unsqueeze(-1) * self._frequencies
        cosines, sines = angles.cos() * self._rotation_scale, angles.sin() * self._rotation_scale
        both = torch.cat([cosines, cosines, -sines, sines], dim=-1).to(dtype).unsqueeze(1)
        return both[..., : self._head_dim], both[..., self._head_dim :]
