"""The forward pass of the Llama family, reduced to its tensor operations.

Runs the weights of Llama, Mistral, Qwen2 and Qwen3, whose layers differ by biases, by norms of queries and keys, and by
sliding windows; they are in modules of transformers, or in those of `LeanModel`, which have the same names. Projections
with the same input are fused, no module is called, and layers do no look-ups or branches of their own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from draftwire.models.lean_model import STEADY_ROTATIONS, LeanModel, why_other
from draftwire.models.linear import Linear, is_streamed, repeated
from draftwire.models.paged_attention import AttentionShape, PackedStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def why_not_lean(model: "PreTrainedModel | LeanModel") -> str:
    """Returns the reason why `LeanDecoder` does not support a model; empty if it does."""
    if reason := why_other(model.config):
        return reason
    rotation = getattr(model.model.rotary_emb, "rope_type", None)
    if rotation not in STEADY_ROTATIONS:
        return f"its position embeddings are of kind {rotation}"
    others = {type(module).__name__ for module in model.modules() if _is_replaced_linear(module)}
    return f"its linear layers are of kind {', '.join(sorted(others))}" if others else ""


def _is_replaced_linear(module: torch.nn.Module) -> bool:
    """Whether a module replaces a linear layer: a quantised layer, an adapter, or the like."""
    return "linear" in type(module).__name__.lower() and type(module) is not torch.nn.Linear


class Norm:
    """RMSNorm."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """Takes `[size]` scales, and what is added to the mean of the squares."""
        self.weight, self.epsilon = weight, epsilon
        size = len(weight)
        self._scales = weight * size**0.5
        self._least_length = weight.new_tensor((size * epsilon) ** 0.5)
        self._has_kernel = weight.device.type != "cpu" or weight.dtype is not torch.float32

    @classmethod
    def of(cls, module: Any) -> "Norm":
        """Wraps the weights of a norm of transformers."""
        return cls(module.weight.detach().clone(), float(module.variance_epsilon))

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the normalised rows, scaled."""
        if self._has_kernel:
            return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)
        # Torch's own is nine operations on a CPU. The length of a row is the root of its size times its mean square.
        lengths = torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), self._least_length)
        return torch.div(rows, lengths).mul_(self._scales)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention weights of one decoder layer, with the norm before them."""

    norm: Norm
    queries_keys_values: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    shape: AttentionShape
    output: Linear

    @classmethod
    def of(cls, module: Any, config: Any, streamed: bool) -> "Attention":
        """Wraps the weights of a layer of transformers; see `Linear` for `streamed`."""
        attention = module.self_attn
        has_norms = hasattr(attention, "q_norm")
        # Mistral's layers read their window from the configuration.
        window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
        return cls(
            Norm.of(module.input_layernorm),
            Linear.of(attention.q_proj, attention.k_proj, attention.v_proj, streamed=streamed),
            Norm.of(attention.q_norm) if has_norms else None,
            Norm.of(attention.k_norm) if has_norms else None,
            AttentionShape(attention.scaling, window),
            Linear.of(attention.o_proj, streamed=streamed),
        )


@dataclass(frozen=True, slots=True)
class Mlp:
    """MLP weights of one decoder layer, with the norm before them."""

    norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, module: Any, streamed: bool) -> "Mlp":
        """Wraps the weights of a layer of transformers; see `Linear` for `streamed`."""
        norm, mlp = Norm.of(module.post_attention_layernorm), module.mlp
        gate_up = Linear.of(mlp.gate_proj, mlp.up_proj, streamed=streamed)
        return cls(norm, gate_up, Linear.of(mlp.down_proj, streamed=streamed))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of a step's tokens."""

    cosines: Tensor
    """`[tokens, 1, head_dim]`."""
    sines: Tensor
    """Same shape; the first half is negated."""

    def __call__(self, heads: Tensor) -> Tensor:
        """Returns the rotated `[tokens, heads, head_dim]`."""
        # Swaps the halves of each head.
        return torch.addcmul(heads * self.cosines, heads.roll(heads.shape[-1] // 2, -1), self.sines)


class Shards(Protocol):
    """Joins the results of the ranks that share a model, as `ProcessGroup` does."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by its sum over all ranks."""

    def gather_columns(self, tensor: Tensor) -> Tensor:
        """Returns the columns of all ranks on rank 0, `[rows, size * columns]`, and anything on the others."""


class LeanDecoder:
    """Decoder for a model of the Llama family."""

    def __init__(
        self,
        model: "PreTrainedModel | LeanModel",
        consumes: bool = False,
        group: Shards | None = None,
        without_attention: Collection[int] = (),
    ) -> None:
        """Wraps a model's weights.

        Args:
            model: supported by `why_not_lean`, in evaluation mode, on its device.
            consumes: whether the model is emptied layer by layer, so that there are never two copies of its weights.
            group: ranks that share the model by tensor parallelism. Each has whole embeddings and norms, some of the
                heads and of the MLPs' inner dimension, and a shard of the output's rows. Only rank 0 gets logits of
                the whole vocabulary.
            without_attention: layers whose attention another rank computes; `attention` is never called for them.
        """
        base: Any = model.model
        config = base.config
        self._group = group
        self.device = model.device
        self._embedding = base.embed_tokens.weight.detach()
        if consumes and self.device.type == "cpu":
            self._embedding = self._embedding.clone()  # else the tensor keeps the whole weight file in memory
        streamed = is_streamed(model)
        self.attentions: list[Attention | None] = []
        self._mlps: list[Mlp] = []
        for index, module in enumerate(base.layers):
            self.attentions.append(None if index in without_attention else Attention.of(module, config, streamed))
            self._mlps.append(Mlp.of(module, streamed))
            if consumes:
                base.layers[index] = torch.nn.Identity()
        self._norm = Norm.of(base.norm)
        head: Any = model.get_output_embeddings()
        self._head = Linear.of(head, streamed=streamed)
        self.vocab_size = len(self._embedding)  # the head of a shard may be padded
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._frequencies = base.rotary_emb.inv_freq.float().to(self.device)
        self._rotation_scale = float(base.rotary_emb.attention_scaling)
        self.head_dim = 2 * len(self._frequencies)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._mlps)

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""
        return int(self._embedding.shape[1])

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """Returns the logits of the kept tokens."""
        tap, num_tokens = step.storage.tap, len(token_ids)
        states: dict[int, Tensor] = {}
        # Rows that are repeated once are not repeated for every product. Ranks exchange no more than they have to.
        num_rows = self._head.least_rows if self._group is None else 1
        hidden, rotation = self.embed(repeated(token_ids, num_rows), repeated(step.positions, num_rows))
        for index in range(self.num_layers):
            if tap is not None and index in tap.layers:
                states[index] = hidden[:num_tokens].clone()
            hidden += self.attention(index, hidden, rotation, step)
            hidden += self.mlp(index, hidden)
        if tap is not None:
            tap.take(states | {self.num_layers: hidden[:num_tokens]}, step.slots)
        return self.head(hidden, kept)

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Returns the input of the first layer, `[tokens, hidden]`, and the rotary embedding for all layers, of
        `[tokens] int64` ids and positions in their sequences.
        """
        hidden = embedding(token_ids, self._embedding)
        angles = positions.unsqueeze(-1) * self._frequencies
        cosines, sines = angles.cos() * self._rotation_scale, angles.sin() * self._rotation_scale
        both = torch.cat([cosines, cosines, -sines, sines], dim=-1).to(hidden.dtype).unsqueeze(1)
        return hidden, Rotation(both[..., : self.head_dim], both[..., self.head_dim :])

    def attention(self, index: int, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Tensor:
        """Returns a layer's attention output, `[rows, hidden]`, without the residual; stores its keys and values.
        `hidden`, of the same shape, is of the step's tokens, perhaps `repeated`.
        """
        layer = self.attentions[index]
        assert layer is not None
        projected = layer.queries_keys_values(layer.norm(hidden)).unflatten(-1, (-1, self.head_dim))
        norms = layer.query_norm, layer.key_norm
        queries, keys, values = split_heads(projected, self.heads, self.kv_heads, norms, rotation)
        num_tokens = len(step.positions)
        if num_tokens < len(hidden):
            queries, keys, values = queries[:num_tokens], keys[:num_tokens], values[:num_tokens]
        attended = step.attend(index, layer.shape, queries, keys, values)
        return self._summed(layer.output(repeated(attended.flatten(1), len(hidden))))

    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        """Returns the output of a layer's MLP, `[tokens, hidden]`, without the residual."""
        layer = self._mlps[index]
        gates, ups = layer.gate_up(layer.norm(hidden)).chunk(2, dim=-1)
        return self._summed(layer.down(silu(gates).mul_(ups)))

    def head(self, hidden: Tensor, kept: Tensor) -> Tensor:
        """Returns `[count, vocab]` logits for outputs of the last layer.

        Args:
            hidden: `[tokens, hidden]`.
            kept: `[count] int64`, ascending: the rows of `hidden` to use.
        """
        logits = self._head(self._norm(hidden if len(kept) == len(hidden) else hidden.index_select(0, kept)))
        if self._group is None:
            return logits
        return self._group.gather_columns(logits)[:, : self.vocab_size].contiguous()

    def _summed(self, part: Tensor) -> Tensor:
        """All-reduces a rank's partial output."""
        if self._group is not None:
            self._group.all_reduce(part)
        return part


def split_heads(
    projected: Tensor, heads: int, kv_heads: int, norms: tuple[Norm | None, Norm | None], rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, of all in this order, `[tokens, heads + 2 * kv_heads, head_dim]`: normalised
    if the layer has `norms` of queries and keys, and rotated.
    """
    num_rotated = heads + kv_heads
    rotated, values = projected[:, :num_rotated], projected[:, num_rotated:]
    query_norm, key_norm = norms
    if query_norm is not None and key_norm is not None:
        rotated = torch.cat([query_norm(rotated[:, :heads]), key_norm(rotated[:, heads:])], dim=1)
    rotated = rotation(rotated)
    return rotated[:, :heads], rotated[:, heads:], values
