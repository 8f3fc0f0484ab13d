"""Attention over a paged KV cache for many sequences of different lengths, packed into one batch row.

The linear layers of a model are independent of the sequence that a token belongs to, so they run over all tokens of a
step at once, without padding. Attention is not: here the new keys and values are written to their slots in the cache,
and rows of similar shape are gathered, padded and computed together, so that neither a long text among short ones nor
a prefill among single tokens makes the others wait for padding.

Registered with transformers as an attention implementation: every model whose layers call it is supported.
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
    """The tensors of a `KvCache`: for each layer `[num_slots, kv_heads, head_dim]` keys and values."""

    def __init__(self, num_slots: int, stacks: Sequence[Sequence[int]] = ()) -> None:
        """Allocates nothing yet: the first step that reaches a layer determines its shape.

        Args:
            num_slots: capacity in tokens.
            stacks: layers that are also attended to together; their tensors are contiguous.
        """
        self._num_slots = num_slots
        self._stacks = {index: tuple(stack) for stack in stacks for index in stack}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacked: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values. Slots that were never written are undefined, except the null block: 0.

        Args:
            index: of the layer.
            key: `[tokens, kv_heads, head_dim]`, an example of the tensors to store.
            value: likewise; its last dimension may differ.
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
        """Copies keys and values between slots, `[count] int64` each, in all layers."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor[targets] = tensor[sources]

    def _allocate(self, num_layers: int, new: Tensor) -> Tensor:
        tensor = new.new_empty(num_layers, self._num_slots, *new.shape[1:])  # on a CPU, committed on first write
        tensor[:, NULL_BLOCK * BLOCK_SIZE : (NULL_BLOCK + 1) * BLOCK_SIZE] = 0.0
        return tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a step."""

    sequence: CachedSequence
    """Its length already includes the new tokens."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of a layer's attention."""

    scaling: float | None = None
    """Factor of the scores; None is 1 / sqrt(head_dim)."""
    window: int | None = None
    """Sliding window: positions that a query sees, its own included; None is all."""
    softcap: float | None = None
    """Bound of the scores (tanh soft-capping), before masking."""


@dataclass(slots=True)
class SegmentGroup:
    """Segments of similar shape, padded to the longest, one per row."""

    tokens: Tensor
    """`[rows, queries] int64`: index of each query in the packed step; padding repeats a row's last token."""
    real: Tensor | None
    """`[rows, queries] bool`: False for padding; None if there is no padding."""
    slots: Tensor
    """`[rows, keys] int64`: slots of each row's keys in the cache; padding points into the null block."""
    positions: Tensor
    """`[rows, queries] int64`: position of each query in its sequence."""
    run: slice | None
    """The slots of the keys, if there is one row and they are contiguous."""
    sees_all: bool
    """Whether every query sees every key, apart from sliding windows."""
    biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)
    """Masks by sliding window, query heads per key head, and layers."""

    def of_rows(self, stored: Tensor) -> Tensor:
        """Gathers `[rows, keys, kv_heads, any]` from a layer's keys or values, `[num_slots, kv_heads, any]`."""
        return _take(stored, self.slots) if self.run is None else stored[self.run].unsqueeze(0)

    def of_stack(self, stored: Tensor) -> Tensor:
        """Gathers the same from several layers: `[layers * rows, keys, kv_heads, any]`."""
        if self.run is not None:
            return stored[:, self.run]
        rows = stored.index_select(1, self.slots.flatten())
        return rows.view(-1, self.num_keys, *stored.shape[2:])

    @property
    def num_keys(self) -> int:
        """Keys per row, padding included."""
        return self.slots.shape[1]

    def bias(self, window: int | None, repeats: int, num_layers: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the attention mask to add to the scores, 0 or -inf; None if every query sees every key.

        Its shape is `[num_layers * rows, 1, repeats * queries, keys]`.
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
    """Layout of all `num_tokens` new tokens of one forward pass, packed into one row."""

    storage: KvStorage
    slots: Tensor
    """`[num_tokens] int64`: slots of the new tokens in the cache."""
    positions: Tensor
    """`[num_tokens] int64`: their positions in their sequences."""
    groups: list[SegmentGroup]

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
    """Returns the layout of a step whose segments are packed in this order."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        # Padding at most doubles queries and keys.
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
    return packed_step.attend(cast(int, module.layer_idx), shape, queries, keys, values).unsqueeze(0), None


def _check_supported(module: torch.nn.Module, sliding_window: int | None, s_aux: Tensor | None) -> None:
    """Refuses layers with features that `paged_attention` lacks; a service's warm-up calls it for every layer."""
    if s_aux is not None:
        raise InvalidRequestError("models with attention sinks are not supported")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
        raise InvalidRequestError("the model's layers do not say how far their sliding windows reach")


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, group: SegmentGroup, shape: AttentionShape, num_layers: int = 1
) -> Tensor:
    """Returns `[num_layers * rows, queries, heads, value_dim]`.

    The query heads that share a key head are concatenated along the queries, so no key is repeated (grouped-query
    attention).
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
    """Returns `source[index]`; several times as fast as indexing on a CPU."""
    return source.index_select(0, index.flatten()).view(*index.shape, *source.shape[1:])


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return upload(array, device)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
