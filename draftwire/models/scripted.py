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
        """Creates a KV cache of `cache_tokens` tokens."""
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
        chosen, accepted = [], []
        for reading in readings:
            places = [
                position + 1 for position in positions_of(reading.segment)[len(reading.token_ids) - reading.keep :]
            ]
            for place in places:
                chosen += expected_tokens(place, 1)
                accepted.append(self._script.acceptance_at(place - places[0], places[0]))
        probs = np.zeros((len(chosen), self.vocab_size))
        rows, tokens = np.arange(len(chosen)), np.array(chosen, dtype=np.int64)
        probs[rows, tokens] = accepted
        for row, token in enumerate(chosen):
            capital, *digits = recovered_tokens(token)
            probs[row, capital] = (1.0 - accepted[row]) * self._script.recovered
            probs[row, digits] = (1.0 - accepted[row]) * (1.0 - self._script.recovered) / len(digits)
        return torch.from_numpy(probs).log().float()

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        """Keeps of a sequence's token tree only a path; there is nothing to copy."""
        self.cache.keep_path(sequence, path)
