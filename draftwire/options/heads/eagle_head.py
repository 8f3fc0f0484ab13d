"""EAGLE heads and multi-token-prediction layers: a decoder layer or more over pairs of features and tokens.

EAGLE-3 joins the normalised token embedding and the normalised features; its first layer reads both, and adds its
output to the features. EAGLE-1 projects the embedding and the features down to one row before its layers; so do
multi-token-prediction layers (MTP), with norms of both before that and of the output.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077), section 4.1; Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3;
DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 2.2; Xiaomi 2025, MiMo (arXiv 2505.07608).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from draftwire.method.devices import upload
from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.kv_storage import KvStorage
from draftwire.models.lean_decoder import Norm, Rotation, split_heads
from draftwire.models.lean_model import head_size, rotation_of
from draftwire.models.linear import STREAMED_BYTES, Linear
from draftwire.models.packing import pack
from draftwire.models.paged_attention import AttentionShape
from draftwire.models.sequence_model import Segment
from draftwire.options.heads.draft_head import DraftHead, HeadState, PairReading
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_parts import DraftIds, Fusion
from draftwire.options.heads.head_shape import (
    DRAFT_IDS,
    EMBEDDING,
    FUSING,
    FUSING_BIAS,
    GATE_UP,
    OUTPUT,
    QUERIES_KEYS_VALUES,
    TOKEN_NORM,
    HeadShape,
    Tensors,
)


def rotations(frequencies: Tensor, scale: float, count: int, like: Tensor) -> Tensor:
    """Returns the rotary position embeddings of all positions, `[count, 1, 2 * head_dim]`: cosines, then sines.

    Args:
        frequencies: `[head_dim / 2]`, angles of a step, radians.
        scale: of the cosines and sines.
        count: positions.
        like: a tensor of the model's type and device.
    """
    positions = torch.arange(count, device=like.device, dtype=torch.float64)
    angles = positions.unsqueeze(-1) * frequencies.to(like.device, torch.float64)
    cosines, sines = (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)
    return torch.cat([cosines, cosines, -sines, sines], -1).unsqueeze(1)


class EagleHead(DraftHead):
    """An EAGLE-1 or EAGLE-3 head, or a multi-token-prediction layer, with a paged KV cache of its own."""

    def __init__(self, shape: HeadShape, tensors: Tensors, cache_tokens: int) -> None:
        """Wraps a head's tensors.

        Args:
            shape: of the head.
            tensors: all of them, those shared with the target included, on one device and of one type.
            cache_tokens: capacity of the cache, tokens of all sequences together.
        """
        self.config, layers = shape.config, shape.layers
        is_eagle3 = self.config.kind is HeadKind.EAGLE3
        self._is_mtp = self.config.kind is HeadKind.MTP
        epsilon = float(layers.rms_norm_eps)

        def norm(name: str) -> Norm:
            return Norm(tensors[name], epsilon)

        self.device, self.dtype = tensors[FUSING].device, tensors[FUSING].dtype
        streamed = sum(tensor.nbytes for name, tensor in tensors.items() if name != EMBEDDING) > STREAMED_BYTES
        self._embedding = tensors[EMBEDDING]
        self.fuse = Fusion(shape, tensors, streamed)
        self._norm_before_residual = shape.norm_before_residual
        self._joining = None if is_eagle3 else Linear(tensors[FUSING], tensors.get(FUSING_BIAS), streamed=streamed)
        self._hidden_norm = norm("layers.0.hidden_norm.weight") if is_eagle3 else None
        self._norm = norm("norm.weight") if is_eagle3 or self._is_mtp else None
        if is_eagle3 or self._is_mtp:  # nothing else reads the embeddings, so they are normalised once, here
            self._embedding = norm("layers.0.input_layernorm.weight" if is_eagle3 else TOKEN_NORM)(self._embedding)
        self.heads, self.kv_heads = int(layers.num_attention_heads), int(layers.num_key_value_heads)
        self.head_dim = head_size(layers)
        places = range(int(layers.num_hidden_layers))
        self._layers = [
            _Layer.of(tensors, index, epsilon, streamed, has_norm=index > 0 or self._is_mtp) for index in places
        ]
        self.token_bytes = 2 * len(self._layers) * self.kv_heads * self.head_dim * self._embedding.element_size()
        self._output = Linear(tensors[OUTPUT], streamed=streamed)
        self._draft_ids = DraftIds(tensors.get(DRAFT_IDS), self.config.vocab_size)
        rotation = rotation_of(layers)
        frequencies, scale = rotation.inv_freq.float(), rotation.attention_scaling
        self._rotations = rotations(frequencies, scale, shape.num_positions, self._embedding)
        self.resize(cache_tokens)

    def resize(self, cache_tokens: int) -> None:
        """Replaces the cache with an empty one."""
        super().resize(cache_tokens)
        self._storage = KvStorage(self.cache.num_slots)

    @torch.inference_mode()
    def read(self, readings: Sequence[PairReading]) -> HeadState:
        """Reads pairs in one pass, and returns the first logits of the readings with `keep`."""
        segments = [Segment(reading.sequence, len(reading.token_ids)) for reading in readings]
        token_ids = [token for reading in readings for token in reading.token_ids]
        features = readings[0].features if len(readings) == 1 else torch.cat([each.features for each in readings])
        kept, unknown, start = [], [], 0
        for reading in readings:
            if self._is_mtp and reading.begins_text and reading.sequence.length == 0:
                unknown.append(start)
            start += len(reading.token_ids)
            if reading.keep:
                kept.append(start - 1)
        with appended(self.cache, segments):
            output = self._output_of(segments, upload(token_ids, self.device, torch.int64), features, unknown)
        sequences = [reading.sequence for reading in readings if reading.keep]
        return self._state(sequences, 0, output[upload(kept, self.device, torch.int64)])

    @torch.inference_mode()
    def extend(self, state: HeadState, token_ids: Tensor) -> HeadState:
        """Reads one more draft token of each block, with the head's own output as its features."""
        segments = [Segment(sequence, 1) for sequence in state.sequences]
        with appended(self.cache, segments):
            output = self._output_of(segments, token_ids, state.carried)
        return self._state(state.sequences, state.depth + 1, output)

    def _state(self, sequences: list[CachedSequence], depth: int, output: Tensor) -> HeadState:
        rows = output if self._norm is None else self._norm(output)
        carried = self.fuse(rows) if self._is_mtp else output
        return HeadState(sequences, depth, carried, self._draft_ids.spread(self._output(rows)))

    def _output_of(
        self, segments: list[Segment], token_ids: Tensor, features: Tensor, unknown: Sequence[int] = ()
    ) -> Tensor:
        """Returns the last layer's output, `[tokens, hidden_size]`, for pairs of sequences that have room for them.

        Args:
            segments: of the pairs.
            token_ids: of the pairs, `[tokens]`.
            features: of the pairs, fused, `[tokens, hidden_size]`.
            unknown: pairs whose embedding is zero: of MTP the first of each text, as its authors do.
        """
        step = pack(segments, self._storage, self.device)
        rotation = Rotation(*self._rotations.index_select(0, step.positions).chunk(2, dim=-1))
        embedded = embedding(token_ids, self._embedding)
        if self._joining is not None:
            if unknown:
                embedded = embedded.index_fill(0, upload(unknown, self.device, torch.int64), 0.0)
            parts = (features, embedded) if self._is_mtp else (embedded, features)
            hidden = rows = self._joining(torch.cat(parts, -1))
        else:
            assert self._hidden_norm is not None, "of EAGLE-3"
            normalised = self._hidden_norm(features)
            hidden = normalised if self._norm_before_residual else features
            rows = torch.cat([embedded, normalised], -1)
        for index, layer in enumerate(self._layers):
            if layer.norm is not None:
                rows = layer.norm(hidden)
            projected = layer.queries_keys_values(rows).unflatten(-1, (-1, self.head_dim))
            heads = split_heads(projected, self.heads, self.kv_heads, layer.head_norms, rotation)
            hidden = hidden + layer.attention_output(step.attend(index, AttentionShape(), *heads).flatten(1))
            gates, ups = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden += layer.down(silu(gates).mul_(ups))
        return hidden


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer."""

    norm: Norm | None
    """Norm before attention; None in the first layer of EAGLE heads."""
    queries_keys_values: Linear
    head_norms: tuple[Norm | None, Norm | None]
    attention_output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, tensors: Tensors, index: int, epsilon: float, streamed: bool, has_norm: bool) -> "_Layer":
        """Wraps a layer's tensors; see `Linear` for `streamed`, and `norm` for `has_norm`."""

        def norm(name: str) -> Norm | None:
            weight = tensors.get(f"layers.{index}.{name}.weight")
            return None if weight is None else Norm(weight, epsilon)

        def fused(*names: str) -> Linear:
            weights = [tensors[f"layers.{index}.{name}.weight"] for name in names]
            biases = [tensors.get(f"layers.{index}.{name}.bias") for name in names]
            present = [bias for bias in biases if bias is not None]
            assert len(present) in (0, len(names)), "checked when the head was loaded"
            return Linear(torch.cat(weights), torch.cat(present) if present else None, streamed=streamed)

        mlp_norm = norm("post_attention_layernorm")
        assert mlp_norm is not None
        return cls(
            norm("input_layernorm") if has_norm else None,
            fused(*QUERIES_KEYS_VALUES),
            (norm("self_attn.q_norm"), norm("self_attn.k_norm")),
            fused("self_attn.o_proj"),
            mlp_norm,
            fused(*GATE_UP),
            fused("mlp.down_proj"),
        )
