"""A causal language model that reads many sequences in one forward pass, and can be made to forget the end of each.

Everything here touches tensors and must run on the process's one torch thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwire.models.decoder import Decoder
from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.models.paged_attention import KvStorage, Segment, pack


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens to read for one sequence."""

    sequence: CachedSequence
    token_ids: list[int]
    """At least one."""
    keep: int
    """How many of the last positions to return logits for, 0 to `len(token_ids)`."""


class SequenceModel(Protocol):
    """Something that reads tokens and gives logits. The cache's accounts are its `cache`."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output."""

    @property
    def cache(self) -> KvCache:
        """Whose room the sequences take."""

    def read(self, readings: Sequence[Reading]) -> Tensor:
        """Reads more tokens of some sequences, each of them at most once in a call. Makes each that much longer.

        Returns:
            `[sum of keep, vocab]` logits on the model's device: for each reading in order, the rows for the tokens
            after its last `keep` positions.

        Raises:
            NoRoomError: the cache is full. No sequence has changed, as with every other error.
        """


class CachedModel:
    """A decoder with a paged KV cache."""

    def __init__(self, decoder: Decoder, cache_tokens: int) -> None:
        """Makes an empty cache.

        Args:
            decoder: does the forward passes.
            cache_tokens: room of the KV cache, tokens of all sequences together.
        """
        self._decoder = decoder
        self.vocab_size = decoder.vocab_size
        self.cache = KvCache(cache_tokens)
        self._storage = KvStorage(self.cache.num_slots)

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading]) -> Tensor:
        """See `SequenceModel.read`."""
        with appended(self.cache, readings):
            segments = [Segment(reading.sequence, len(reading.token_ids)) for reading in readings]
            device = self._decoder.device
            step = pack(segments, self._storage, device)
            token_ids = [token for reading in readings for token in reading.token_ids]
            kept = torch.tensor(_kept(readings), dtype=torch.int64, device=device)
            return self._decoder.logits(torch.tensor(token_ids, device=device), step, kept)

    @torch.inference_mode()
    def keep_path(self, sequence: CachedSequence, base_len: int, path: Sequence[int]) -> None:
        """Forgets all but the first `base_len` tokens and a path through the tree after them; see `KvCache`."""
        sources, targets = self.cache.keep_path(sequence, base_len, path)
        device = self._decoder.device
        self._storage.copy(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device))


@contextmanager
def appended(cache: KvCache, readings: Sequence[Reading]) -> Iterator[None]:
    """Makes the sequences longer by what they read, and takes that back if reading fails."""
    lengths = [reading.sequence.length for reading in readings]
    try:
        for reading in readings:
            assert 0 <= reading.keep <= len(reading.token_ids) > 0
            cache.append(reading.sequence, len(reading.token_ids))
        yield
    except BaseException:
        for reading, length in zip(readings, lengths, strict=True):
            cache.truncate(reading.sequence, length)
        raise


def _kept(readings: Sequence[Reading]) -> list[int]:
    """Returns which positions of the packed step logits are wanted for."""
    kept: list[int] = []
    end = 0
    for reading in readings:
        end += len(reading.token_ids)
        kept.extend(range(end - reading.keep, end))
    return kept
