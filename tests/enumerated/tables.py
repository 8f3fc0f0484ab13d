"""Models that are tables: the law of the next token depends on its position and on the token before it.

Where a table's rows are certain, nothing is enumerated: so a text can be led to the round in question.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from tiny_models import ExtendsByReading
from torch import Tensor

from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.models.packing import positions_of
from draftwire.models.sequence_model import FeatureSpan, Reading

POSITIONS = 16
CACHE_TOKENS = 4096
FEATURES = 6
"""Numbers that a head reads of a token."""

Wait = Callable[[float], None]
"""Lets so many seconds pass on the thread that calls it."""


def random_rows(vocab_size: int, seed: int, sharpness: float = 1.0) -> Tensor:
    """Returns a table `[POSITIONS, vocab, vocab] float64`: the law of the token at a position, by the one before it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(POSITIONS, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(dim=2)


def certain_at(rows: Tensor, positions: Sequence[int]) -> Tensor:
    """Returns a table whose tokens are certain at some positions: there it is the position, counted round."""
    vocab_size = rows.shape[2]
    result = rows.clone()
    for position in positions:
        result[position] = torch.eye(vocab_size, dtype=rows.dtype)[position % vocab_size]
    return result


@dataclass(frozen=True, slots=True)
class Speed:
    """How long the passes of a table take, seconds."""

    pass_s: float
    slow: frozenset[tuple[int, int]] = frozenset()
    """Positions and drawn tokens after which a pass takes longer."""
    slow_s: float = 0.0
    """By so much."""

    def seconds(self, drawn: Collection[tuple[int, int]]) -> float:
        """Returns the time of a pass that reads drawn tokens at positions, among others."""
        return self.pass_s + self.slow_s * (not self.slow.isdisjoint(drawn))


class PlacedTable(ExtendsByReading):
    """A table with a KV cache, whose sequences can be forked. A table of the target has logits of float64."""

    def __init__(self, rows: Tensor, speed: Speed, wait: Wait, bad: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Takes a table.

        Args:
            rows: of `random_rows`.
            speed: of its passes.
            wait: is called in each pass.
            bad: positions and tokens after which the logits are not finite.
        """
        self.vocab_size = rows.shape[2]
        self.cache = KvCache(CACHE_TOKENS)
        self._logits = rows.log()
        for position, token in bad:
            self._logits[position + 1, token] = torch.nan
        self._speed, self._wait = speed, wait
        self._is_extending = False

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        kept, drawn = [], set()
        with appended(self.cache, [reading.segment for reading in readings]):
            for reading in readings:
                places = list(zip(positions_of(reading.segment), reading.token_ids, strict=True))
                drawn.update(places if self._is_extending else ())
                kept += [self._logits[position + 1, token] for position, token in places[len(places) - reading.keep :]]
        self._wait(self._speed.seconds(drawn))
        return torch.stack(kept) if kept else self._logits.new_zeros(0, self.vocab_size)

    def extend(
        self, sequences: Sequence[CachedSequence], token_ids: Tensor, parents: Sequence[tuple[int, ...]] = ()
    ) -> Tensor:
        self._is_extending = True
        try:
            return super().extend(sequences, token_ids, parents)
        finally:
            self._is_extending = False

    def features(self, spans: Sequence[FeatureSpan[CachedSequence]]) -> Tensor:
        """Returns what a head reads of each token: its position alone."""
        positions = [position for span in spans for position in range(span.start, span.stop)]
        features = torch.zeros(len(positions), FEATURES, dtype=torch.float64)
        features[:, 0] = torch.tensor(positions, dtype=torch.float64)
        return features

    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        return self.cache.fork(sequence, length)[0]

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        self.cache.keep_path(sequence, path)
