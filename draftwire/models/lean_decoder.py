"""The forward pass of the Llama family with nothing in it but the operations.

Runs the weights of a transformers model: Llama, Mistral, Qwen2 and Qwen3, whose layers differ by biases, by norms of
queries and keys, and by sliding windows. Projections that read the same input are one, no module is called, and nothing
is looked up or decided layer by layer.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu
from transformers import PreTrainedModel

from draftwire.models.linear import Linear
from draftwire.models.paged_attention import AttentionShape, PackedStep
from draftwire.models.parallel.process_group import ProcessGroup

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in a model's configuration."""

STEADY_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary position embeddings whose angles do not depend on the length of the text."""


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
class Attention:
    """One decoder layer's weights, up to its MLP."""

    norm: Norm
    queries_keys_values: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    shape: AttentionShape
    output: Linear

    @classmethod
    def of(cls, module: Any, config: Any) -> "Attention":
        """Takes over a layer of transformers."""
        attention = module.self_attn
        has_norms = hasattr(attention, "q_norm")
        # Mistral's layers read their window from the configuration.
        window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
        return cls(
            Norm.of(module.input_layernorm),
            Linear.of(attention.q_proj, attention.k_proj, attention.v_proj),
            Norm.of(attention.q_norm) if has_norms else None,
            Norm.of(attention.k_norm) if has_norms else None,
            AttentionShape(attention.scaling, window),
            Linear.of(attention.o_proj),
        )


@dataclass(frozen=True, slots=True)
class Mlp:
    """The rest of a decoder layer's weights."""

    norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, module: Any) -> "Mlp":
        """Takes over a layer of transformers."""
        norm, mlp = Norm.of(module.post_attention_layernorm), module.mlp
        return cls(norm, Linear.of(mlp.gate_proj, mlp.up_proj), Linear.of(mlp.down_proj))


@dataclass(frozen=True, slots=True)
class Rotation:
    """What heads are multiplied with for their positions in the text, and their swapped halves."""

    cosines: Tensor
    """`[tokens, 1, head_dim]`."""
    sines: Tensor
    """Alike; those of the first half negative."""

    def __call__(self, heads: Tensor) -> Tensor:
        """Returns the rotated `[tokens, heads, head_dim]`."""
        # The second half of each head with the first one's sine, and the other way round.
        return torch.addcmul(heads * self.cosines, heads.roll(heads.shape[-1] // 2, -1), self.sines)


class LeanDecoder:
    """A model of the Llama family. See `Decoder`."""

    def __init__(
        self,
        model: PreTrainedModel,
        consumes: bool = False,
        group: ProcessGroup | None = None,
        without_attention: Collection[int] = (),
    ) -> None:
        """Takes over a model's weights.

        Args:
            model: one that `why_not_lean` has nothing against, in evaluation mode, on its device.
            consumes: whether the model is given up layer by layer, so that there are never two copies of its weights.
            group: whose ranks have a part of the model each: whole embeddings and norms, some of the heads and of the
                MLPs' inner dimension, as many rows of the output. Only rank 0 gets logits of the whole vocabulary.
            without_attention: layers whose attention is computed elsewhere; all that `attention` is not called for.
        """
        base: Any = model.model
        config = base.config
        self._group = group
        self.device = model.device
        self._embedding = base.embed_tokens.weight.detach()
        if consumes and self.device.type == "cpu":
            self._embedding = self._embedding.clone()  # else one tensor keeps the whole file of weights in memory
        self.attentions: list[Attention | None] = []
        self._mlps: list[Mlp] = []
        for index, module in enumerate(base.layers):
            self.attentions.append(None if index in without_attention else Attention.of(module, config))
            self._mlps.append(Mlp.of(module))
            if consumes:
                base.layers[index] = torch.nn.Identity()
        self._norm = Norm.of(base.norm)
        head: Any = model.get_output_embeddings()
        self._head = Linear.of(head)
        self.vocab_size = len(self._embedding)  # the head of a part may be padded
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._frequencies = base.rotary_emb.inv_freq.float()
        self._rotation_scale = float(base.rotary_emb.attention_scaling)
        self.head_dim = 2 * len(self._frequencies)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._mlps)

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """Returns the logits of the tokens that are kept, layer by layer."""
        hidden, rotation = self.embed(token_ids, step.positions)
        for index in range(self.num_layers):
            hidden += self.attention(index, hidden, rotation, step)
            hidden += self.mlp(index, hidden)
        return self.head(hidden, kept)

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Returns what the first layer reads, `[tokens, hidden]`, and what all layers rotate heads by.

        Args:
            token_ids: `[tokens] int64`.
            positions: `[tokens] int64`, in their sequences.
        """
        hidden = embedding(token_ids, self._embedding)
        angles = positions.unsqueeze(-1) * self._frequencies
        cosines, sines = angles.cos() * self._rotation_scale, angles.sin() * self._rotation_scale
        both = torch.cat([cosines, cosines, -sines, sines], dim=-1).to(hidden.dtype).unsqueeze(1)
        return hidden, Rotation(both[..., : self.head_dim], both[..., self.head_dim :])

    def attention(self, index: int, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Tensor:
        """Returns what a layer's attention adds to its input, `[tokens, hidden]`; stores its keys and values."""
        layer = self.attentions[index]
        assert layer is not None
        queries, keys, values = self._projected(layer, layer.norm(hidden), rotation)
        attended = step.attend(index, layer.shape, queries, keys, values)
        return self._summed(layer.output(attended.flatten(1)))

    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        """Returns what a layer's MLP adds, `[tokens, hidden]`."""
        layer = self._mlps[index]
        gates, ups = layer.gate_up(layer.norm(hidden)).chunk(2, dim=-1)
        return self._summed(layer.down(silu(gates).mul_(ups)))

    def head(self, hidden: Tensor, kept: Tensor) -> Tensor:
        """Returns `[count, vocab]` logits for outputs of the last layer.

        Args:
            hidden: `[tokens, hidden]`.
            kept: `[count] int64`, ascending: which of them.
        """
        logits = self._head(self._norm(hidden if len(kept) == len(hidden) else hidden.index_select(0, kept)))
        if self._group is None:
            return logits
        return self._group.gather_columns(logits)[:, : self.vocab_size].contiguous()

    def _summed(self, part: Tensor) -> Tensor:
        """Returns the sum of what all ranks put out."""
        if self._group is not None:
            self._group.all_reduce(part)
        return part

    def _projected(self, layer: Attention, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a layer's queries, keys and values, `[tokens, heads, head_dim]` each, positions applied."""
        projected = layer.queries_keys_values(rows).unflatten(-1, (-1, self.head_dim))
        num_rotated = self.heads + self.kv_heads
        rotated, values = projected[:, :num_rotated], projected[:, num_rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = layer.query_norm(rotated[:, : self.heads]), layer.key_norm(rotated[:, self.heads :])
            rotated = torch.cat([queries, keys], dim=1)
        rotated = rotation(rotated)
        return rotated[:, : self.heads], rotated[:, self.heads :], values
