"""EasySpec: drafts with the attention of several consecutive layers computed in parallel.

Consecutive layers change the hidden states only a little, so a layer's attention can read an earlier layer's input.
The attention of all layers of a group reads the group's first input, which replaces many small operations by a few
large ones, or lets several devices share them. The MLPs follow in order. The logits are approximate, but the output
stays exact, because the verifier corrects any draft. The stored keys and values are approximate too;
`LanguageModelSequence` has them computed again once per round.

    attn_i = Attention_i(h_1)   for all layers i of the group
    h'_i = h_i + attn_i,   h_(i+1) = h'_i + MLP_i(h'_i)   one after the other

Source: Wu et al. 2025, "EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization" (arXiv
2502.02493), section 4. Fusing a group's projections and its attention on one device is our addition.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from draftwire.models.lean_decoder import Attention, LeanDecoder, Rotation
from draftwire.models.linear import Linear
from draftwire.models.paged_attention import PackedStep
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.options.layer_parallel.layer_groups import (
    LayerGroups,
    holders_of,
    runs_in_parallel,
)


class _Group(Protocol):
    """Layers whose attention reads the same input."""

    layers: tuple[int, ...]

    def outputs(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Sequence[Tensor]:
        """Returns the attention output of each layer, `[tokens, hidden]` each."""


class LayerParallelDecoder:
    """Decoder that computes the attention of each group of layers in parallel."""

    def __init__(self, base: LeanDecoder, groups: LayerGroups, ranks: "Ranks | None" = None) -> None:
        """Shares the weights of `base`.

        Args:
            base: the model, or this rank's part of it.
            groups: all layers. With groups of one layer each the result is the same as `base`'s, to the bit.
            ranks: distribution of the layers over several ranks; only rank 0 gets logits.
        """
        self._base = base
        self.device = base.device
        self.vocab_size = base.vocab_size
        self.num_layers, self.hidden_size = base.num_layers, base.hidden_size
        self._ranks = ranks
        self._groups: list[_Group] = [
            _local_group(base, group) if ranks is None else ranks.shared(base, group) for group in groups
        ]

    @property
    def is_approximate(self) -> bool:
        """Whether any result differs from `base`'s."""
        return runs_in_parallel(tuple(group.layers for group in self._groups))

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """Layers whose keys and values have to be contiguous in the storage."""
        own = [group.own if isinstance(group, _Gathered) else group for group in self._groups]
        return [group.layers for group in own if isinstance(group, _Fused)]

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """Returns the logits of the kept tokens; no rows on ranks other than 0."""
        base = self._base
        hidden, rotation = base.embed(token_ids, step.positions)
        for group in self._groups:
            for index, attended in zip(group.layers, group.outputs(hidden, rotation, step), strict=True):
                hidden += attended
                hidden += base.mlp(index, hidden)
        if self._ranks is not None and self._ranks.group.rank:
            return hidden.new_empty(len(kept), 0)
        return base.head(hidden, kept)


class _OneByOne:
    """Layers whose attention this process computes one after the other."""

    def __init__(self, base: LeanDecoder, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._base = base

    def outputs(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Sequence[Tensor]:
        return [self._base.attention(index, hidden, rotation, step) for index in self.layers]


class _Fused:
    """Layers of equal attention parameters, computed at once."""

    def __init__(self, base: LeanDecoder, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._base = base
        parts = _attentions(base, layers)
        self._shape = parts[0].shape
        self._epsilon = parts[0].norm.epsilon
        self._projection = _joined(parts)
        self._head_norms: Tensor | None = None
        if parts[0].query_norm is not None:
            self._head_norms = torch.stack([_head_norms(part, base) for part in parts])
        self._outputs = [part.output for part in parts]

    def outputs(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Sequence[Tensor]:
        base = self._base
        normalized = rms_norm(hidden, hidden.shape[-1:], None, self._epsilon)
        heads = self._projection(normalized).view(len(hidden), len(self.layers), -1, base.head_dim)
        num_rotated = base.heads + base.kv_heads
        rotated, values = heads[:, :, :num_rotated], heads[:, :, num_rotated:]
        if self._head_norms is not None:
            rotated = rms_norm(rotated, rotated.shape[-1:], None, self._epsilon) * self._head_norms
        rotated = Rotation(rotation.cosines.unsqueeze(1), rotation.sines.unsqueeze(1))(rotated)
        queries, keys = rotated[:, :, : base.heads], rotated[:, :, base.heads :]
        attended = step.attend_together(self.layers, self._shape, queries, keys, values).flatten(2)
        return [output(own) for output, own in zip(self._outputs, attended, strict=True)]


def _local_group(base: LeanDecoder, layers: tuple[int, ...]) -> "_OneByOne | _Fused":
    """Returns the group of layers as this process computes it."""
    if len(layers) > 1 and len({_fusion_key(part) for part in _attentions(base, layers)}) == 1:
        return _Fused(base, layers)
    return _OneByOne(base, layers)


def _attentions(base: LeanDecoder, layers: tuple[int, ...]) -> list[Attention]:
    parts = [base.attentions[index] for index in layers]
    return [part for part in parts if part is not None]


def _fusion_key(part: Attention) -> tuple[object, ...]:
    """Returns the properties that have to be equal for layers to be fused."""
    norms = [norm.epsilon for norm in (part.query_norm, part.key_norm) if norm is not None]
    return part.shape, {part.norm.epsilon, *norms} == {part.norm.epsilon}, part.norm.epsilon, len(norms)


def _joined(parts: Sequence[Attention]) -> Linear:
    """Fuses the projections of several layers, their norms' weights folded in: the input is normalised, not scaled."""
    weights = [part.queries_keys_values.weight() * part.norm.weight for part in parts]
    biases = [bias for part in parts if (bias := part.queries_keys_values.bias) is not None]
    streamed = parts[0].queries_keys_values.streamed
    return Linear(torch.cat(weights), torch.cat(biases) if biases else None, streamed=streamed)


def _head_norms(part: Attention, base: LeanDecoder) -> Tensor:
    """Returns the scales of a layer's query and key heads, `[heads + kv_heads, head_dim]`."""
    assert part.query_norm is not None
    assert part.key_norm is not None
    queries, keys = part.query_norm.weight, part.key_norm.weight
    return torch.cat([queries.expand(base.heads, -1), keys.expand(base.kv_heads, -1)])


class Ranks:
    """Distribution of the layers' attention over the ranks of a process group. Every rank computes all MLPs."""

    def __init__(self, group: ProcessGroup, groups: LayerGroups) -> None:
        self.group = group
        self.holders = holders_of(groups, group.size)

    @property
    def held_elsewhere(self) -> list[int]:
        """Layers whose attention this rank does not hold."""
        return [index for index, holder in enumerate(self.holders) if holder not in (None, self.group.rank)]

    def shared(self, base: LeanDecoder, layers: tuple[int, ...]) -> "_OneByOne | _Broadcast | _Gathered":
        """Returns a group as the ranks compute it; `layers` may also be a single layer of a larger group."""
        if len(layers) > 1:
            return _Gathered(base, layers, self.group)
        holder = self.holders[layers[0]]
        return _OneByOne(base, layers) if holder is None else _Broadcast(base, layers, holder, self.group)


class _Broadcast:
    """A layer that one rank computes and broadcasts."""

    def __init__(self, base: LeanDecoder, layers: tuple[int, ...], holder: int, group: ProcessGroup) -> None:
        self.layers = layers
        self._base = base
        self._holder = holder
        self._group = group

    def outputs(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Sequence[Tensor]:
        (index,) = self.layers
        is_own = self._holder == self._group.rank
        output = self._base.attention(index, hidden, rotation, step) if is_own else torch.empty_like(hidden)
        self._group.broadcast(output, self._holder)
        return [output]


class _Gathered:
    """Layers distributed over the ranks: one all-gather for all of them."""

    def __init__(self, base: LeanDecoder, layers: tuple[int, ...], group: ProcessGroup) -> None:
        self.layers = layers
        self._group = group
        own = layers[group.rank :: group.size]
        self.own = _local_group(base, own)
        self._most = -(-len(layers) // group.size)

    def outputs(self, hidden: Tensor, rotation: Rotation, step: PackedStep) -> Sequence[Tensor]:
        part = hidden.new_zeros(self._most, *hidden.shape)
        for place, output in zip(part, self.own.outputs(hidden, rotation, step), strict=False):
            place.copy_(output)
        gathered = self._group.all_gather(part)
        return [gathered[place % self._group.size, place // self._group.size] for place in range(len(self.layers))]
