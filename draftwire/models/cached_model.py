"""A causal language model with a KV cache: reads many sequences in one forward pass, and can roll each back.

Everything here uses tensors and must run on the process's one torch thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.models.kv_cache import CachedSequence, KvCache, slots_between
from draftwire.models.kv_storage import StoredFeatures
from draftwire.models.pass_engine import IdRows, PassEngine
from draftwire.models.sequence_model import FeatureSpan, Reading, Segment


class CachedModel:
    """A model's forward passes over a paged KV cache."""

    def __init__(
        self,
        engine: PassEngine,
        cache_tokens: int,
        features: Callable[[int], StoredFeatures] | None = None,
    ) -> None:
        """Starts with an empty cache.

        Args:
            engine: computes the forward passes.
            cache_tokens: capacity of the KV cache, tokens of all sequences together.
            features: returns room for what is kept of the hidden states of so many tokens; None keeps nothing. Not with
                an engine that extends approximately, which has no exact ones.
        """
        assert engine.extends_exactly or features is None, "approximate passes have no features"
        self.vocab_size, self.device = engine.vocab_size, engine.device
        self.extends_exactly, self.is_static = engine.extends_exactly, engine.is_static
        self._engine = engine
        self._make_features = features
        self.resize(cache_tokens)

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Bytes that all layers, and that the largest one, store of a token; 0 before the first step."""
        of_layers = self._storage.token_bytes_of_layers
        return sum(of_layers), max(of_layers, default=0)

    def resize(self, cache_tokens: int) -> None:
        """Replaces the KV cache with an empty one of so many tokens, of all sequences together. No sequence is open."""
        self.cache = KvCache(cache_tokens)
        features = self._make_features(self.cache.num_slots) if self._make_features else None
        self._storage, self._exact, self._fuzzy = self._engine.begin(self.cache.num_slots, features)

    def fit(self, count: Callable[["CachedModel"], int]) -> int:
        """Gives the KV cache the size that fits, and returns it, tokens: `count` of this, once the largest step was
        run.
        """
        num_tokens = count(self)
        self.resize(num_tokens)
        return num_tokens

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        """Reads all sequences in one forward pass, and returns the logits of the kept positions."""
        assert all(0 <= reading.keep <= len(reading.token_ids) for reading in readings)
        segments = [reading.segment for reading in readings]
        token_ids = [token for reading in readings for token in reading.token_ids]
        return self._forward(segments, token_ids, _kept(readings), fuzzily)

    def extend(
        self, sequences: Sequence[CachedSequence], token_ids: Tensor, parents: Sequence[tuple[int, ...]] = ()
    ) -> Tensor:
        """Reads tokens or nodes in one forward pass, approximately if the engine drafts so."""
        nodes = parents or [()] * len(sequences)
        segments = [Segment(one, max(len(own), 1), own) for one, own in zip(sequences, nodes, strict=True)]
        return self._forward(segments, token_ids, range(len(token_ids)), fuzzily=True)

    @torch.inference_mode()
    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        """Opens another sequence that has read the first `length` tokens of this one; see `KvCache.fork`."""
        fork, sources, targets = self.cache.fork(sequence, length)
        self._copy(sources, targets)
        return fork

    @torch.inference_mode()
    def features(self, spans: Sequence[FeatureSpan[CachedSequence]]) -> Tensor:
        """Returns what is kept of some tokens' hidden states, `[sum of stop - start, kept]`, by one gather."""
        features = self._storage.features
        assert features is not None, "the model keeps features"
        assert features.rows is not None, "tokens were read"
        slots = [slots_between(each.sequence, each.start, each.stop) for each in spans]
        return features.rows.index_select(0, upload(np.concatenate(slots), self.device))

    @torch.inference_mode()
    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        """Keeps of a sequence's token tree only a path; copies its keys and values, unless they are in their places."""
        base = sequence.base
        sources, targets = self.cache.keep_path(sequence, path)
        if np.array_equal(sources, targets):
            return
        try:
            self._copy(sources, targets)
        except BaseException:
            self.cache.truncate(sequence, base)
            raise

    @torch.inference_mode()
    def _forward(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int], fuzzily: bool) -> Tensor:
        with appended(self.cache, segments):
            return self._run(segments, token_ids, kept, fuzzily)

    def _run(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int], fuzzily: bool) -> Tensor:
        """Computes the forward pass of segments whose blocks are allocated."""
        return (self._fuzzy if fuzzily else self._exact).logits(segments, token_ids, kept)

    def _copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies keys and values between slots, `[count]` each."""
        self._storage.copy(upload(sources, self.device), upload(targets, self.device))


@contextmanager
def appended(cache: KvCache, segments: Sequence[Segment]) -> Iterator[None]:
    """Appends the new tokens to the sequences, and rolls back if the context fails."""
    lengths = [segment.sequence.length for segment in segments]
    try:
        for segment in segments:
            assert segment.num_tokens > 0
            cache.append(segment.sequence, segment.num_tokens, segment.parents)
        yield
    except BaseException:
        for segment, length in zip(segments, lengths, strict=True):
            cache.truncate(segment.sequence, length)
        raise


def _kept(readings: Sequence[Reading]) -> list[int]:
    """Returns the positions in the packed step whose logits are kept."""
    kept: list[int] = []
    end = 0
    for reading in readings:
        end += len(reading.token_ids)
        kept.extend(range(end - reading.keep, end))
    return kept
