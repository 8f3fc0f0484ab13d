"""Attention over a paged KV cache for many sequences of different lengths, packed into one batch row.

The linear layers of a model are independent of the sequence that a token belongs to, so they run over all tokens of a
step at once, without padding. Attention is not: here the new keys and values are written to their slots in the cache,
and a layer is computed as the step's layout (`packing`) says.

Registered with transformers as an attention implementation (`TransformersDecoder`): every model whose layers call it is
supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftwire.errors import InvalidRequestError
from draftwire.models.kv_storage import KvStorage

IMPLEMENTATION = "draftwire_paged"

KeysOrValues = Literal["keys", "values"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of a layer's attention."""

    scaling: float | None = None
    """Factor of the scores; None is 1 / sqrt(head_dim)."""
    window: int | None = None
    """Sliding window: positions that a query sees, its own included; None is all."""
    softcap: float | None = None
    """Bound of the scores (tanh soft-capping), before masking."""

    def sees(self, num_keys: int) -> bool:
        """Whether the last of so many tokens attends to all of them, and plainly."""
        return self.softcap is None and (self.window is None or self.window >= num_keys)


@dataclass(frozen=True, slots=True)
class Trees:
    """The token trees that end some rows' keys, as the queries see them."""

    bases: Tensor
    """`[rows] int64`: each row's keys before its tree, which every query sees up to its own position."""
    distances: Tensor
    """`[rows, queries, nodes] int64`: how many positions a query is behind each node, -1 if it does not see it."""

    def distances_of(self, positions: Tensor, num_keys: int) -> Tensor:
        """Returns how many positions each query is behind each key, negative where it does not see it.

        Args:
            positions: `[rows, queries] int64`, of the queries.
            num_keys: keys per row, padding included.

        Returns:
            `[rows, queries, num_keys] int64`.
        """
        places = torch.arange(num_keys, device=positions.device)
        nodes = (places - self.bases.unsqueeze(-1)).unsqueeze(1)
        # No query sees what lies behind a tree.
        inside = torch.nn.functional.pad(self.distances, (0, 1), value=-1.0)
        index = nodes.clamp(0, self.distances.shape[-1]).expand(-1, positions.shape[1], -1)
        return torch.where(nodes < 0, positions.unsqueeze(-1) - places, inside.gather(-1, index))


@dataclass(slots=True)
class Masks:
    """Masks of the keys that the queries of some rows see."""

    positions: Tensor
    """`[rows, queries] int64`: position of each query in its sequence."""
    num_keys: int
    """Keys per row, padding included."""
    sees_all: bool
    """Whether every query sees every key, apart from sliding windows."""
    trees: Trees | None = None
    """None if every row's keys are those of a text."""
    _biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)
    """Biases by sliding window, query heads per key head, and layers."""

    def bias(self, window: int | None, repeats: int, num_layers: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the attention mask to add to the scores, 0 or -inf; None if every query sees every key.

        Its shape is `[num_layers * rows, 1, repeats * queries, keys]`.
        """
        if self.sees_all and (window is None or window >= self.num_keys):
            return None
        known = self._biases.get((window, repeats, num_layers))
        if known is None:
            distance = self._distances()
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            known = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            known = known.repeat(num_layers, repeats, 1).unsqueeze(1)
            self._biases[window, repeats, num_layers] = known
        return known

    def _distances(self) -> Tensor:
        """Returns how many positions each query is behind each key; negative where it does not see it."""
        if self.trees is not None:
            return self.trees.distances_of(self.positions, self.num_keys)
        return self.positions.unsqueeze(-1) - torch.arange(self.num_keys, device=self.positions.device)


@dataclass(slots=True)
class SegmentGroup:
    """Segments of similar shape, padded to the longest, one per row. Their keys and values are gathered."""

    tokens: Tensor
    """`[rows, queries] int64`: index of each query in the packed step; padding repeats a row's last token."""
    real: Tensor | None
    """`[rows, queries] bool`: False for padding; None if there is no padding."""
    slots: Tensor
    """`[rows, keys] int64`: slots of each row's keys in the cache; padding points into the null block."""
    masks: Masks
    _indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Indices by heads and slots of the stored tensor."""
    _gathered_last: dict[KeysOrValues, Tensor] = field(default_factory=dict)
    """Tensors that the layer before had gathered: memory to gather into again, whose pages are there already."""

    def parts(self, stored: Tensor, kind: KeysOrValues) -> list[Tensor]:
        """Gathers `[rows, kv_heads, keys, any]` from a layer's keys or values, `[kv_heads, num_slots, any]`.

        They are valid until the next layer's of this kind are gathered.
        """
        if stored.is_contiguous():
            return [self._gathered(stored, len(stored), kind)]
        return [self._take(stored.transpose(0, 1), self.slots, kind).transpose(1, 2)]

    def stacked_parts(self, stored: Tensor, kind: KeysOrValues) -> list[Tensor]:
        """Gathers `[layers * rows, kv_heads, keys, any]` from several layers, `[layers, kv_heads, num_slots, any]`."""
        if stored.is_contiguous():
            return [self._gathered(stored, len(stored) * stored.shape[1], kind).flatten(0, 1)]
        rows = stored.transpose(1, 2).index_select(1, self.slots.flatten())
        return [rows.view(-1, self.masks.num_keys, *rows.shape[2:]).transpose(1, 2)]

    def _gathered(self, stored: Tensor, num_heads: int, kind: KeysOrValues) -> Tensor:
        """Gathers `[..., rows, kv_heads, keys, any]` from `[..., kv_heads, num_slots, any]`.

        To select rows of a contiguous matrix is several times as fast as any other index on a CPU.
        """
        *layers, heads, num_slots, _ = stored.shape
        index = self._indices.get((num_heads, num_slots))
        if index is None:
            first = torch.arange(0, num_heads * num_slots, num_slots, device=stored.device).view(*layers, 1, heads, 1)
            index = self._indices[num_heads, num_slots] = first + self.slots.unsqueeze(1)
        return self._take(stored.flatten(0, -2), index, kind)

    def _take(self, source: Tensor, index: Tensor, kind: KeysOrValues) -> Tensor:
        """Returns `source[index]`, on a CPU in the memory of the layer before."""
        if source.device.type != "cpu":
            return _take(source, index)
        last = self._gathered_last.get(kind)
        if last is None or last.shape != (*index.shape, *source.shape[1:]):
            last = self._gathered_last[kind] = source.new_empty(*index.shape, *source.shape[1:])
        torch.index_select(source, 0, index.flatten(), out=last.view(-1, *source.shape[1:]))
        return last


@dataclass(slots=True)
class LoneSegment:
    """A segment whose keys and values are in few contiguous runs of slots, and are read where they are."""

    tokens: slice
    """Tokens of the packed step."""
    runs: list[slice]
    """Slots of the keys, in order."""
    masks: Masks

    def parts(self, stored: Tensor, _kind: KeysOrValues) -> list[Tensor]:
        """Returns a layer's keys or values, run by run: `[1, kv_heads, keys, any]` of `[kv_heads, num_slots, any]`."""
        return [stored[:, run].unsqueeze(0) for run in self.runs]

    def stacked_parts(self, stored: Tensor, _kind: KeysOrValues) -> list[Tensor]:
        """Returns those of several layers: `[layers, kv_heads, keys, any]` of `[layers, kv_heads, num_slots, any]`."""
        return [stored[:, :, run] for run in self.runs]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Layout of all `num_tokens` new tokens of one forward pass, packed into one row."""

    storage: KvStorage
    slots: Tensor
    """`[num_tokens] int64`: slots of the new tokens in the cache."""
    positions: Tensor
    """`[num_tokens] int64`: how many tokens of its text come before each of them."""
    groups: list[SegmentGroup]
    lone: list[LoneSegment] = field(default_factory=list)
    """The segments that are in no group, in the order of their tokens."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """First slot and number of the keys of each token, if all are single tokens of texts that are in one run each."""

    def attend(
        self, layer: int, shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        """Stores the keys and values of a layer's new tokens and computes attention over them and all earlier ones.

        Args:
            layer: index of the layer.
            shape: the layer's attention parameters.
            queries: `[num_tokens, heads, head_dim]`, rotary embedding applied.
            new_keys: `[num_tokens, kv_heads, head_dim]`.
            new_values: `[num_tokens, kv_heads, value_dim]`.

        Returns:
            `[num_tokens, heads, value_dim]`.
        """
        keys, values = self.storage.layer(layer, new_keys, new_values)
        _store(new_keys, keys, self.slots)
        _store(new_values, values, self.slots)

        if self.spans and shape.sees(max(length for _, length in self.spans)):
            return _attend_one_by_one(queries, keys, values, self.spans, shape)

        def attended(rows: Tensor, part: SegmentGroup | LoneSegment) -> Tensor:
            return _attend(rows, part.parts(keys, "keys"), part.parts(values, "values"), part.masks, shape)

        if len(self.groups) == 1 and self.groups[0].real is None and not self.lone:  # its tokens are the step's
            group = self.groups[0]
            return attended(queries.unflatten(0, group.tokens.shape), group).flatten(0, 1)
        of_lone = [attended(queries[each.tokens].unsqueeze(0), each).squeeze(0) for each in self.lone]
        if not self.groups:
            return of_lone[0] if len(of_lone) == 1 else torch.cat(of_lone)
        result = queries.new_empty(*queries.shape[:2], new_values.shape[-1])
        for each, own in zip(self.lone, of_lone, strict=True):
            result[each.tokens] = own
        for group in self.groups:
            own = attended(_take(queries, group.tokens), group)
            if group.real is None:
                result.index_copy_(0, group.tokens.flatten(), own.flatten(0, 1))
            else:
                result[group.tokens[group.real]] = own[group.real]
        return result

    def attend_together(
        self, layers: tuple[int, ...], shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        """Computes `attend` for several layers at once.

        Args:
            layers: indices of the layers, a stack of the storage.
            shape: attention parameters of all these layers.
            queries: `[num_tokens, layers, heads, head_dim]`, rotary embedding applied.
            new_keys: `[num_tokens, layers, kv_heads, head_dim]`.
            new_values: same shape.

        Returns:
            `[layers, num_tokens, heads, head_dim]`.
        """
        keys, values = self.storage.stack(layers, new_keys[:, 0], new_values[:, 0])
        keys.index_copy_(2, self.slots, new_keys.permute(1, 2, 0, 3))
        values.index_copy_(2, self.slots, new_values.permute(1, 2, 0, 3))
        stacked = queries.transpose(0, 1)

        def attended(rows: Tensor, part: SegmentGroup | LoneSegment) -> Tensor:
            """Returns `[layers * rows, queries, heads, head_dim]`, of the same shape."""
            own = part.stacked_parts(keys, "keys"), part.stacked_parts(values, "values")
            return _attend(rows, *own, part.masks, shape, len(layers))

        if len(self.groups) == 1 and self.groups[0].real is None and not self.lone:
            rows = stacked.reshape(-1, self.groups[0].tokens.shape[1], *stacked.shape[2:])
            return attended(rows, self.groups[0]).reshape(stacked.shape)
        result = torch.empty_like(stacked)
        for each in self.lone:
            result[:, each.tokens] = attended(stacked[:, each.tokens], each)
        for group in self.groups:
            rows = stacked.index_select(1, group.tokens.flatten()).view(-1, group.tokens.shape[1], *stacked.shape[2:])
            own = attended(rows, group).reshape(len(layers), *group.tokens.shape, *stacked.shape[2:])
            if group.real is None:
                result.index_copy_(1, group.tokens.flatten(), own.flatten(1, 2))
            else:
                result[:, group.tokens[group.real]] = own[:, group.real]
        return result


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_step: PackedStep | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention implementation that transformers' layers call.

    Args:
        module: the layer, with its index.
        query: `[1, heads, num_tokens, head_dim]`, rotary embedding applied.
        key: `[1, kv_heads, num_tokens, head_dim]`.
        value: `[1, kv_heads, num_tokens, value_dim]`.
        attention_mask: None; the mask follows from the step.
        scaling: of the scores; None is 1 / sqrt(head_dim).
        sliding_window: positions that a query sees, its own included; None is all.
        softcap: bound of the scores by tanh, before masking.
        s_aux: attention sinks, which are not supported.
        packed_step: the step's layout.

    Returns:
        `[1, num_tokens, heads, value_dim]`.

    Raises:
        InvalidRequestError: the model needs an unsupported feature.
    """
    assert packed_step is not None
    assert attention_mask is None
    _check_supported(module, sliding_window, s_aux)
    shape = AttentionShape(scaling, sliding_window, softcap)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_step.attend(cast(int, module.layer_idx), shape, queries, keys, values).contiguous().unsqueeze(0), None


def _check_supported(module: torch.nn.Module, sliding_window: int | None, s_aux: Tensor | None) -> None:
    """Refuses layers with features that `paged_attention` lacks; a service's warm-up calls it for every layer."""
    if s_aux is not None:
        raise InvalidRequestError("models with attention sinks are not supported")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
        raise InvalidRequestError("the model's layers do not say how far their sliding windows reach")


def _attend(
    queries: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    masks: Masks,
    shape: AttentionShape,
    num_layers: int = 1,
) -> Tensor:
    """Returns `[num_layers * rows, queries, heads, value_dim]` for keys and values in one part or several.

    The query heads that share a key head are concatenated along the queries, so no key is repeated (grouped-query
    attention).
    """
    rows, num_queries, heads, head_dim = queries.shape
    kv_heads = keys[0].shape[1]
    repeats = heads // kv_heads
    if num_queries == 1:
        folded = queries.reshape(rows, kv_heads, repeats, head_dim)
    else:
        folded = queries.reshape(rows, num_queries, kv_heads, repeats, head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, kv_heads, repeats * num_queries, head_dim)
    bias = masks.bias(shape.window, repeats, num_layers, queries.dtype)
    if shape.softcap is None and len(keys) == 1:
        attended = scaled_dot_product_attention(folded, keys[0], values[0], attn_mask=bias, scale=shape.scaling)
    else:
        attended = _attend_in_parts(folded, keys, values, bias, shape)
    if num_queries == 1:
        return attended.reshape(rows, 1, heads, -1)
    attended = attended.reshape(rows, kv_heads, repeats, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(rows, num_queries, heads, -1)


def _attend_one_by_one(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[tuple[int, int]], shape: AttentionShape
) -> Tensor:
    """Returns `[rows, heads, value_dim]` for single tokens of texts, in as few operations as that takes.

    Args:
        queries: `[rows, heads, head_dim]`.
        keys: `[kv_heads, num_slots, head_dim]`.
        values: `[kv_heads, num_slots, value_dim]`.
        spans: first slot and number of the keys of each text.
        shape: of the layer.
    """
    rows = queries.unflatten(1, (len(keys), -1)).split(1)
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    attended = [
        scaled_dot_product_attention(row, keys.narrow(2, *span), values.narrow(2, *span), scale=shape.scaling)
        for row, span in zip(rows, spans, strict=True)
    ]
    return torch.cat(attended).flatten(1, 2)


def _attend_in_parts(
    folded: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor | None, shape: AttentionShape
) -> Tensor:
    """Returns attention for `[rows, kv_heads, any, head_dim]` queries, with all scores in memory."""
    scores = torch.cat([folded @ part.transpose(-1, -2) for part in keys], -1)
    scores *= folded.shape[-1] ** -0.5 if shape.scaling is None else shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores if bias is None else scores + bias
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(folded.dtype)
    parts = weights.split([part.shape[-2] for part in keys], -1)
    attended: Tensor = parts[0] @ values[0]
    for part, own in zip(parts[1:], values[1:], strict=True):
        attended += part @ own
    return attended


def _store(new: Tensor, stored: Tensor, slots: Tensor) -> None:
    """Copies `[tokens, heads, any]` to slots of `[heads, num_slots, any]`, along the order in memory."""
    if stored.is_contiguous():
        stored.index_copy_(1, slots, new.transpose(0, 1))
    else:
        stored.transpose(0, 1).index_copy_(0, slots, new)


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Returns `source[index]`; several times as fast as indexing on a CPU."""
    return source.index_select(0, index.flatten()).view(*index.shape, *source.shape[1:])
