"""A target without weights: what it waits for and what it accepts follow a script; see `draftwire.models.script`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.models.packing import positions_of
from draftwire.models.script import Script, expected_tokens, recovered_tokens, wait
from draftwire.models.sequence_model import Reading


class ScriptedTarget:
    """A `SequenceModel` that waits instead of computing. Its logits make the rules accept as the script says."""

    def __init__(self, script: Script, cache_tokens: int) -> None:
        self.vocab_size = script.vocab_size
        self.cache = KvCache(cache_tokens)
        self._script = script

    def read(self, readings: Sequence[Reading]) -> Tensor:
        """Waits, and returns logits: the last kept row is for the bonus token, the others are for the draft tokens.

        The row of a tree's node is that of its depth.
        """
        with appended(self.cache, [reading.segment for reading in readings]):
            num_tokens = sum(len(reading.token_ids) for reading in readings)
            wait(self._script.verify_ms / 1e3 + self._script.read_us * num_tokens / 1e6)
        rows = []
        for reading in readings:
            kept = positions_of(reading.segment)[len(reading.token_ids) - reading.keep :]
            for position in kept:
                (expected,) = expected_tokens(position + 1, 1)
                chances = self._script.chances_at(position - kept[0], kept[0] + 1)
                rows.append(np.zeros(self.vocab_size))
                rows[-1][[expected, *recovered_tokens(expected)]] = chances
        return torch.from_numpy(np.array(rows).reshape(-1, self.vocab_size)).log().float()

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        """Keeps of a sequence's token tree only a path; there is nothing to copy."""
        self.cache.keep_path(sequence, path)
