"""Attention of many sequences of different lengths, whose tokens lie packed behind each other in one batch row.

The linear layers of a model do not care which sequence a token belongs to, so they run over all tokens of a step at
once, without padding. Attention does care: here the new keys and values are written to their places in the cache, and
rows of similar shape are gathered, padded and attended to together, so that neither a long text among short ones nor
a prompt among single tokens makes the others wait for padding.

Registered with transformers as an attention implementation: every model whose layers call it is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from draftwire.errors import InvalidRequestError
from draftwire.method.devices import upload
from draftwire.models.kv_cache import BLOCK_SIZE, NULL_BLOCK, CachedSequence, slots_of

IMPLEMENTATION = "draftwire_paged"


class KvStorage:
    """The tensors behind a `KvCache`: for each layer `[num_slots, kv_heads, head_dim]` keys and values."""

    def __init__(self, num_slots: int, stacks: Sequence[Sequence[int]] = ()) -> None:
        """Allocates nothing yet: the first step that reaches a layer tells its shape.

        Args:
            num_slots: room for tokens.
            stacks: layers that are also attended to together; their tensors lie behind each other.
        """
        self._num_slots = num_slots
        self._stacks = {index: tuple(stack) for stack in stacks for index in stack}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacked: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values. What was never written is anything, but for the null block, which is 0.

        Args:
            index: which layer.
            key: `[tokens, kv_heads, head_dim]`, as is to be stored.
            value: alike; its last dimension may be another.
        """
        if index not in self._layers:
            stack = self._stacks.get(index, (index,))
            keys, values = self._allocate(len(stack), key), self._allocate(len(stack), value)
            self._stacked[stack] = keys, values
            self._layers.update(zip(stack, zip(keys, values, strict=True), strict=True))
        return self._layers[index]

    def stack(self, layers: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the layers of a stack, `[layers, num_slots, kv_heads, head_dim]`; see `layer`."""
        if layers not in self._stacked:
            self.layer(layers[0], key, value)
        return self._stacked[layers]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies tokens to other places, `[count] int64` each, in all layers."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor[targets] = tensor[sources]

    def _allocate(self, num_layers: int, new: Tensor) -> Tensor:
        tensor = new.new_empty(num_layers, self._num_slots, *new.shape[1:])  # on a CPU, no memory yet
        tensor[:, NULL_BLOCK * BLOCK_SIZE : (NULL_BLOCK + 1) * BLOCK_SIZE] = 0.0
        return tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a step."""

    sequence: CachedSequence
    """Has its new tokens in its length already."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How the layers of a model attend."""

    scaling: float | None = None
    """Of the scores; None is 1 / sqrt(head_dim)."""
    window: int | None = None
    """Positions that a query sees, its own included; None is all."""
    softcap: float | None = None
    """Bound of the scores by tanh, before masking."""


@dataclass(slots=True)
class SegmentGroup:
    """Segments of similar shape, padded to the longest."""

    tokens: Tensor
    """`[rows, queries] int64`: where each query lies in the packed step; padding repeats a row's last token."""
    real: Tensor | None
    """`[rows, queries] bool`: which queries are no padding; None where all are real."""
    slots: Tensor
    """`[rows, keys] int64`: where each row's keys lie in the cache; padding points into the null block."""
    positions: Tensor
    """`[rows, queries] int64`: position of each query in its sequence."""
    run: slice | None
    """The places of the keys, if there is one row and they lie behind each other."""
    sees_all: bool
    """Whether every query sees every key, but for sliding windows."""
    biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)
    """Masks by sliding window, query heads per key head, and layers."""

    def of_rows(self, stored: Tensor) -> Tensor:
        """Returns `[rows, keys, kv_heads, any]` of a layer's keys or values, `[num_slots, kv_heads, any]`."""
        return _take(stored, self.slots) if self.run is None else stored[self.run].unsqueeze(0)

    def of_stack(self, stored: Tensor) -> Tensor:
        """Returns the same of several layers, one behind the other: `[layers * rows, keys, kv_heads, any]`."""
        if self.run is not None:
            return stored[:, self.run]
        rows = stored.index_select(1, self.slots.flatten())
        return rows.view(-1, self.num_keys, *stored.shape[2:])

    @property
    def num_keys(self) -> int:
        """Keys of each row, padding included."""
        return self.slots.shape[1]

    def bias(self, window: int | None, repeats: int, num_layers: int, dtype: torch.dtype) -> Tensor | None:
        """Returns what is added to the scores: 0 to see, -inf to mask; None where every query sees every key.

        It is `[num_layers * rows, 1, repeats * queries, keys]`.
        """
        if self.sees_all and (window is None or window >= self.num_keys):
            return None
        known = self.biases.get((window, repeats, num_layers))
        if known is None:
            distance = self.positions.unsqueeze(-1) - torch.arange(self.num_keys, device=self.slots.device)
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            known = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            known = known.repeat(num_layers, repeats, 1).unsqueeze(1)
            self.biases[window, repeats, num_layers] = known
        return known


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All new tokens of one forward pass, `num_tokens` of them behind each other."""

    storage: KvStorage
    slots: Tensor
    """`[num_tokens] int64`: where the new tokens go in the cache."""
    positions: Tensor
    """`[num_tokens] int64`: their positions in their sequences."""
    groups: list[SegmentGroup]

    def attend(
        self, layer: int, shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        """Stores the keys and values of a layer's new tokens and attends to them and to the earlier ones.

        Args:
            layer: its index.
            shape: how it attends.
            queries: `[num_tokens, heads, head_dim]`, positions applied.
            new_keys: `[num_tokens, kv_heads, head_dim]`.
            new_values: `[num_tokens, kv_heads, value_dim]`.

        Returns:
            `[num_tokens, heads, value_dim]`.
        """
        keys, values = self.storage.layer(layer, new_keys, new_values)
        keys.index_copy_(0, self.slots, new_keys)
        values.index_copy_(0, self.slots, new_values)
        if len(self.groups) == 1 and self.groups[0].real is None:  # its tokens are the step's, in the same order
            group = self.groups[0]
            rows = queries.unflatten(0, group.tokens.shape)
            return _attend(rows, group.of_rows(keys), group.of_rows(values), group, shape).flatten(0, 1)
        result = queries.new_empty(*queries.shape[:2], new_values.shape[-1])
        for group in self.groups:
            own = _take(queries, group.tokens)
            attended = _attend(own, group.of_rows(keys), group.of_rows(values), group, shape)
            if group.real is None:
                result.index_copy_(0, group.tokens.flatten(), attended.flatten(0, 1))
            else:
                result[group.tokens[group.real]] = attended[group.real]
        return result

    def attend_together(
        self, layers: tuple[int, ...], shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        """Does for several layers at once what `attend` does for one.

        Args:
            layers: their indices, a stack of the storage.
            shape: how all of them attend.
            queries: `[num_tokens, layers, heads, head_dim]`, positions applied.
            new_keys: `[num_tokens, layers, kv_heads, head_dim]`.
            new_values: alike.

        Returns:
            `[layers, num_tokens, heads, head_dim]`.
        """
        keys, values = self.storage.stack(layers, new_keys[:, 0], new_values[:, 0])
        keys.index_copy_(1, self.slots, new_keys.transpose(0, 1))
        values.index_copy_(1, self.slots, new_values.transpose(0, 1))
        stacked = queries.transpose(0, 1)

        def attended(own: Tensor, group: SegmentGroup) -> Tensor:
            """Returns `[layers, rows, queries, heads, head_dim]` for `[layers, rows * queries, heads, head_dim]`."""
            rows = own.reshape(-1, group.tokens.shape[1], *own.shape[2:])
            results = _attend(rows, group.of_stack(keys), group.of_stack(values), group, shape, len(layers))
            return results.reshape(len(layers), *group.tokens.shape, *own.shape[2:])

        if len(self.groups) == 1 and self.groups[0].real is None:
            return attended(stacked, self.groups[0]).flatten(1, 2)
        result = torch.empty_like(stacked)
        for group in self.groups:
            own = attended(stacked.index_select(1, group.tokens.flatten()), group)
            if group.real is None:
                result.index_copy_(1, group.tokens.flatten(), own.flatten(1, 2))
            else:
                result[:, group.tokens[group.real]] = own[:, group.real]
        return result


def pack(segments: list[Segment], storage: KvStorage, device: torch.device) -> PackedStep:
    """Lays out a step of segments that lie behind each other in this order."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        # Padding at most doubles either side.
        shape = (segment.num_tokens.bit_length(), segment.sequence.length.bit_length())
        shapes.setdefault(shape, []).append(index)
    counts = np.array([segment.num_tokens for segment in segments])
    lengths = np.array([segment.sequence.length for segment in segments])
    starts = np.cumsum(counts) - counts
    slots = np.empty(counts.sum(), dtype=np.int64)
    positions = np.empty_like(slots)
    groups = []
    for members in shapes.values():
        count, length, start = counts[members, None], lengths[members, None], starts[members, None]
        query = np.arange(count.max())
        real = query < count
        tokens = start + np.minimum(query, count - 1)
        position = length - count + np.minimum(query, count - 1)
        places = slots_of([segments[index].sequence for index in members], int(length.max()))
        positions[tokens] = position
        slots[tokens] = np.take_along_axis(places, position, axis=1)
        mask = None if real.all() else _tensor(real, device)
        first = int(places[0, 0])
        is_run = len(members) == 1 and bool((places[0] == np.arange(first, first + places.shape[1])).all())
        groups.append(
            SegmentGroup(
                tokens=_tensor(tokens, device),
                real=mask,
                slots=_tensor(places, device),
                positions=_tensor(position, device),
                run=slice(first, first + places.shape[1]) if is_run else None,
                sees_all=tokens.shape[1] == 1 and bool((length == places.shape[1]).all()),
            )
        )
    return PackedStep(storage, _tensor(slots, device), _tensor(positions, device), groups)


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
    """What transformers' layers call.

    Args:
        module: the layer, which knows its index.
        query: `[1, heads, num_tokens, head_dim]`, positions applied.
        key: `[1, kv_heads, num_tokens, head_dim]`.
        value: `[1, kv_heads, num_tokens, value_dim]`.
        attention_mask: None; who sees whom follows from the step.
        scaling: of the scores; None is 1 / sqrt(head_dim).
        sliding_window: positions that a query sees, its own included; None is all.
        softcap: bound of the scores by tanh, before masking.
        s_aux: attention sinks, which are not supported.
        packed_step: the step's layout.

    Returns:
        `[1, num_tokens, heads, value_dim]`.

    Raises:
        InvalidRequestError: the model needs something that is not supported here.
    """
    assert packed_step is not None
    assert attention_mask is None
    _check_supported(module, sliding_window, s_aux)
    shape = AttentionShape(scaling, sliding_window, softcap)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_step.attend(cast(int, module.layer_idx), shape, queries, keys, values).unsqueeze(0), None


def _check_supported(module: torch.nn.Module, sliding_window: int | None, s_aux: Tensor | None) -> None:
    """Refuses what a layer wants and `paged_attention` does not know of; meets every layer when a service warms up."""
    if s_aux is not None:
        raise InvalidRequestError("models with attention sinks are not supported")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
        raise InvalidRequestError("the model's layers do not say how far their sliding windows reach")


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, group: SegmentGroup, shape: AttentionShape, num_layers: int = 1
) -> Tensor:
    """Returns `[num_layers * rows, queries, heads, value_dim]`.

    The query heads that share a key head are laid behind each other as further queries, so no key is repeated.
    """
    rows, num_queries, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    repeats = heads // kv_heads
    folded = queries.reshape(rows, num_queries, kv_heads, repeats, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, repeats * num_queries, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    bias = group.bias(shape.window, repeats, num_layers, queries.dtype)
    if shape.softcap is None:
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=shape.scaling)
    else:
        scores = folded @ keys.transpose(-1, -2) * (head_dim**-0.5 if shape.scaling is None else shape.scaling)
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
        scores = scores if bias is None else scores + bias
        attended = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
    attended = attended.reshape(rows, kv_heads, repeats, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(rows, num_queries, heads, -1)


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Returns `source[index]`, several times as fast on a CPU."""
    return source.index_select(0, index.flatten()).view(*index.shape, *source.shape[1:])


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return upload(array, device)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
