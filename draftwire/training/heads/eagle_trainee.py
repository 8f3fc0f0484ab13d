"""An EAGLE-3 head that gradients flow through, over whole texts and several drafted tokens in a row.

In the first step the head reads the target's features of every token, in every further one its own output of the step
before, as it does when it drafts (*training-time test*). A draft after a token thus attends to the true pairs up to
that token, and to its own pair of each further step.

Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3.2.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftwire.models.lean_model import head_size
from draftwire.options.heads.head_shape import HeadShape

CHUNK = 128
"""Queries that are attended for together on a CPU."""


class TraineeNorm(nn.RMSNorm):
    """RMSNorm in float32, whatever its rows are."""

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the normalised rows, scaled."""
        return super().forward(rows.float())


class EagleTrainee(nn.Module):
    """A trainable EAGLE-3 head. Its modules have the names of the checkpoint's tensors."""

    def __init__(self, shape: HeadShape, trains_output: bool = True) -> None:
        """Builds random layers; the shape is that of an EAGLE-3 head with one layer. What does not train is the
        target's.
        """
        super().__init__()
        config, layers = shape.config, shape.layers
        size, epsilon = config.hidden_size, float(layers.rms_norm_eps)
        self._norm_before_residual = shape.norm_before_residual
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.input_norm = TraineeNorm(config.feature_size, epsilon) if shape.norm_before_fusion else None
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.layers = nn.ModuleList([_Layer(layers, epsilon)])
        self.norm = TraineeNorm(size, epsilon)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(trains_output)
        self.rotation = LlamaRotaryEmbedding(layers)

    def forward(self, features: Tensor, token_ids: Tensor) -> list[Tensor]:
        """Returns the logits of each step, `[batch, count, draft_vocab_size]`.

        Args:
            features: `[batch, count, feature_size]`, of the first `count` tokens of each text.
            token_ids: `[batch, count + steps] int64`, for as many steps as they are longer. Step `s` reads the token at
                `i + 1 + s` and drafts the one at `i + 2 + s`, after the pairs up to token `i`.
        """
        count = features.shape[1]
        layer: Any = self.layers[0]
        rows = features if self.input_norm is None else self.input_norm(features)
        hidden = self.fc(rows).float()  # sums stay in float32 under autocast
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(token_ids.shape[1] - count):
            rotation = self.rotation(hidden, torch.arange(step, step + count, device=features.device)[None])
            embedded = layer.input_layernorm(self.embed_tokens(token_ids[:, 1 + step : 1 + step + count]))
            normalised = layer.hidden_norm(hidden)
            residual = normalised if self._norm_before_residual else hidden
            attended = layer.self_attn(torch.cat([embedded, normalised], -1), rotation, keys, values)
            hidden = residual + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


class _Layer(nn.Module):
    def __init__(self, layers: Any, epsilon: float) -> None:
        super().__init__()
        size = int(layers.hidden_size)
        self.input_layernorm, self.hidden_norm = TraineeNorm(size, epsilon), TraineeNorm(size, epsilon)
        self.self_attn = _Attention(layers)
        self.post_attention_layernorm = TraineeNorm(size, epsilon)
        self.mlp = LlamaMLP(layers)


class _Attention(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        size, self._head_dim = int(layers.hidden_size), head_size(layers)
        queries, keys = layers.num_attention_heads * self._head_dim, layers.num_key_value_heads * self._head_dim
        self._repeats = layers.num_attention_heads // layers.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, queries, bias=False)
        self.k_proj, self.v_proj = nn.Linear(2 * size, keys, bias=False), nn.Linear(2 * size, keys, bias=False)
        self.o_proj = nn.Linear(queries, size, bias=False)

    def forward(
        self, rows: Tensor, rotation: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Returns `[batch, count, hidden]`; appends the step's keys and values to those of the steps before."""
        query, key, value = (
            projection(rows).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (each.to(value.dtype) for each in apply_rotary_pos_emb(query, key, *rotation))
        keys.append(key.repeat_interleave(self._repeats, 1))
        values.append(value.repeat_interleave(self._repeats, 1))
        attended = steps_attention(query, keys, values)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


def steps_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attends to the first step's keys up to the own place, and to those of the further steps at the own place.

    Args:
        query: `[batch, heads, count, head_dim]`, of the last step.
        keys: as `query`, of each step.
        values: as `keys`.

    Returns:
        As `query`.
    """
    count = query.shape[2]
    size = CHUNK if query.device.type == "cpu" else count  # a GPU loses more by operations than by masked scores
    query = query * query.shape[-1] ** -0.5
    own = [(query * key).sum(-1, keepdim=True, dtype=torch.float32) for key in keys[1:]]
    parts = []
    for start in range(0, count, size):
        end = min(start + size, count)
        scores = (query[:, :, start:end] @ keys[0][:, :, :end].transpose(-1, -2)).float()
        is_visible = torch.ones(end - start, end, dtype=torch.bool, device=query.device).tril(start)
        scores = scores.masked_fill(~is_visible, -torch.inf)
        weights = torch.cat([scores, *(each[:, :, start:end] for each in own)], -1).softmax(-1).to(query.dtype)
        part = weights[..., :end] @ values[0][:, :, :end]
        for step, value in enumerate(values[1:]):
            part = part + weights[..., end + step : end + step + 1] * value[:, :, start:end]
        parts.append(part)
    return torch.cat(parts, 2)
