"""Runs a decoder of torch over a KV cache."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.models.decoder import Decoder, DraftingDecoder
from draftwire.models.kv_storage import KvStorage, StoredFeatures
from draftwire.models.packing import pack
from draftwire.models.pass_engine import IdRows, Pass
from draftwire.models.sequence_model import Segment


class RecordedSteps(Protocol):
    """Runs steps of some shapes faster than their decoder, with the same results."""

    def fit(self, segments: list[Segment]) -> bool:
        """Whether a step is of such a shape."""

    def logits(self, segments: list[Segment], token_ids: Tensor, kept: Sequence[int]) -> Tensor:
        """Computes it; see `Pass`."""


RecordSteps = Callable[[Decoder, KvStorage], RecordedSteps]


class TorchEngine:
    """A decoder, and perhaps another one with the same weights for drafts."""

    def __init__(
        self, decoder: Decoder, record: RecordSteps | None = None, drafting: DraftingDecoder | None = None
    ) -> None:
        """Takes decoders.

        Args:
            decoder: computes the forward passes.
            record: makes what runs some of the steps of a decoder over a storage faster; None runs all alike.
            drafting: computes drafts with the same weights, approximately; None if `decoder` does.
        """
        self.vocab_size, self.device = decoder.vocab_size, decoder.device
        self.extends_exactly = drafting is None or not drafting.is_approximate
        self.is_static = record is not None
        self._decoder, self._record, self._drafting = decoder, record, drafting

    def begin(self, num_slots: int, features: StoredFeatures | None) -> tuple[KvStorage, Pass, Pass]:
        """Starts over an empty cache; see `PassEngine`."""
        drafting = self._drafting
        storage = KvStorage(num_slots, drafting.stacks if drafting else (), features=features)
        exact = _Pass(self._decoder, storage, self._record)
        return storage, exact, _Pass(drafting, storage, self._record) if drafting else exact


class _Pass:
    """A decoder over a KV cache, with recorded steps if they are wanted."""

    def __init__(self, decoder: Decoder, storage: KvStorage, record: RecordSteps | None) -> None:
        self._decoder = decoder
        self._storage = storage
        self._static = None if record is None else record(decoder, storage)

    def logits(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int]) -> Tensor:
        device = self._decoder.device
        ids = token_ids if isinstance(token_ids, Tensor) else upload(token_ids, device, torch.int64)
        if self._static is not None and self._static.fit(segments):
            return self._static.logits(segments, ids, kept)
        step = pack(segments, self._storage, device)
        return self._decoder.logits(ids, step, upload(kept, device, torch.int64))
