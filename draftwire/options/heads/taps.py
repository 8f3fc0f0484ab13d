"""Taps: hidden states between the layers of a forward pass, which trained draft heads read.

A tap of id i reads the hidden states before layer i; that of the number of layers, those after the last layer, before
the final norm. The *features* of a token are the states at all taps, concatenated in the order of the ids. They are
fused by the head that reads them, inside the pass, and kept by slot beside the keys and values: so whatever shares,
copies or moves those carries the features too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.models.kv_cache import BLOCK_SIZE, NULL_BLOCK, CachedSequence
from draftwire.models.sequence_model import FeatureSpan, SequenceModel, Text


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """Features that a model keeps of each token."""

    layers: tuple[int, ...]
    """Ids of the taps."""
    fuse: Callable[[Tensor], Tensor]
    """Makes `[num_tokens, kept]`, what is kept of tokens, of their `[num_tokens, len(layers) * hidden]` features."""

    def __call__(self, num_slots: int) -> "SlotFeatures":
        """Returns room for the features of so many tokens."""
        return SlotFeatures(self, num_slots)


class SlotFeatures:
    """A tap that keeps fused features by slot: one more layer of a KV cache."""

    def __init__(self, source: FeatureSource, num_slots: int) -> None:
        """Allocates nothing yet: the first pass determines the shape."""
        self.layers = source.layers
        self._fuse = source.fuse
        self._num_slots = num_slots
        self.rows: Tensor | None = None
        """`[num_slots, kept]`; None before the first pass. Slots that were never written are undefined."""

    @property
    def token_bytes(self) -> int:
        """Bytes that are kept of a token; 0 before the first pass."""
        return 0 if self.rows is None else self.rows[0].nbytes

    def take(self, states: Mapping[int, Tensor], slots: Tensor) -> None:
        """Fuses and stores the features of a pass."""
        fused = self._fuse(joined(states, self.layers))
        if self.rows is None:
            self.rows = fused.new_empty(self._num_slots, fused.shape[1])
            self.rows[NULL_BLOCK * BLOCK_SIZE : (NULL_BLOCK + 1) * BLOCK_SIZE] = 0.0
        self.rows.index_copy_(0, slots, fused)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies features between slots, `[count] int64` each."""
        if self.rows is not None:
            self.rows.index_copy_(0, targets, self.rows.index_select(0, sources))


class FeatureReader(Protocol[Text]):
    """A holder of the features of texts' tokens."""

    def features(self, spans: Sequence[FeatureSpan[Text]]) -> Tensor:
        """Returns what is kept of some tokens' hidden states.

        Returns:
            `[sum of stop - start, kept]` on the device of who reads them, for each span in order.
        """


@runtime_checkable
class FeatureModel(SequenceModel, FeatureReader[CachedSequence], Protocol):
    """A model that keeps features of the tokens that it has read."""


def joined(states: Mapping[int, Tensor], layers: tuple[int, ...]) -> Tensor:
    """Returns the features of tokens, `[num_tokens, len(layers) * hidden]`."""
    return torch.cat([states[layer] for layer in layers], dim=-1)


def check_taps(layers: tuple[int, ...], num_layers: int) -> None:
    """Checks the ids of taps.

    Raises:
        InvalidRequestError: there is none, one occurs twice, or one is out of range.
    """
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(num_layers + 1)):
        raise InvalidRequestError(
            f"hidden states are read before different layers from 0 to {num_layers}, where {num_layers} is after the "
            f"last, not {', '.join(map(str, layers)) or 'nowhere'}"
        )
