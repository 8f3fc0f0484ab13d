"""A head with random weights whose drafts depend on every pair that it has read, so that a wrong one shows."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwire.errors import NoRoomError
from draftwire.models.kv_cache import CachedSequence
from draftwire.options.heads.draft_head import HeadConfig, HeadState, PairReading
from draftwire.options.heads.head_names import HeadKind


class ToyHead:
    """A recurrent network over pairs: h' = tanh(0.7 W h + features + E[token]); its output is in the place of features.

    Attributes:
        readings: numbers of the pairs of each call of `read`.
        begins: whether each reading of all calls was said to begin its text.
        sequences: what each open sequence has: the states after its pairs.
        room: pairs that fit, of all sequences together.
        size: of its own states.
    """

    device, dtype = torch.device("cpu"), torch.float64
    token_bytes = 48

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 16,
        taps: tuple[int, ...] = (1, 2, 0),
        sharpness: float = 2.0,
        reads_history: bool = True,
        most_tokens: int | None = None,
        missing: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.size = 6
        self.config = HeadConfig(
            HeadKind.EAGLE3 if reads_history else HeadKind.MEDUSA,
            taps,
            hidden_size,
            self.size,
            vocab_size,
            vocab_size - len(missing),
            most_tokens,
            reads_history,
        )
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self._fusing = weights(len(taps) * hidden_size, self.size) * 0.2
        self._inner, self._embedding = weights(self.size, self.size), weights(vocab_size, self.size)
        self._output = sharpness * weights(self.size, vocab_size)
        self._missing = list(missing)
        self.sequences: dict[CachedSequence, list[Tensor]] = {}
        self.readings: list[list[int]] = []
        self.begins: list[bool] = []
        self.room = 10**9

    def fuse(self, features: Tensor) -> Tensor:
        return features.double() @ self._fusing

    def resize(self, cache_tokens: int) -> None:
        assert not self.sequences
        self.room = cache_tokens

    def open(self) -> CachedSequence:
        sequence = CachedSequence(b"")
        self.sequences[sequence] = []
        return sequence

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        assert length <= sequence.length
        del self.sequences[sequence][length:]
        sequence.length = length

    def close(self, sequence: CachedSequence) -> None:
        del self.sequences[sequence]

    def read(self, readings: Sequence[PairReading]) -> HeadState:
        self._reserve(sum(len(reading.token_ids) for reading in readings))
        self.readings.append([len(reading.token_ids) for reading in readings])
        self.begins += [reading.begins_text for reading in readings]
        for reading in readings:
            assert len(reading.features) == len(reading.token_ids) > 0
            for token, features in zip(reading.token_ids, reading.features, strict=True):
                self._step(reading.sequence, token, features)
        return self._state([reading.sequence for reading in readings if reading.keep], 0)

    def extend(self, state: HeadState, token_ids: Tensor) -> HeadState:
        self._reserve(len(state.sequences))
        for sequence, token, carried in zip(state.sequences, token_ids.tolist(), state.carried, strict=True):
            self._step(sequence, token, carried)
        return self._state(state.sequences, state.depth + 1)

    def rows(self, features: Tensor, text: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Returns the logits of the places of a block after a text, by a fresh sequence, `[len(tokens), vocab]`."""
        sequence = self.open()
        state = self.read([PairReading(sequence, list(text[1:]), features)])
        rows = [state.logits[0]]
        for token in tokens[:-1]:
            state = self.extend(state, torch.tensor([token]))
            rows.append(state.logits[0])
        self.close(sequence)
        return torch.stack(rows)

    def _reserve(self, num_pairs: int) -> None:
        if sum(map(len, self.sequences.values())) + num_pairs > self.room:
            raise NoRoomError("the head's cache is full")

    def _step(self, sequence: CachedSequence, token: int, features: Tensor) -> None:
        states = self.sequences[sequence]
        last = states[-1] if states and self.config.reads_history else torch.zeros(self.size, dtype=torch.float64)
        states.append(torch.tanh(0.7 * self._inner @ last + features + self._embedding[token]))
        sequence.length = len(states)

    def _state(self, sequences: list[CachedSequence], depth: int) -> HeadState:
        carried = torch.stack([self.sequences[each][-1] for each in sequences]) if sequences else torch.empty(0, 6)
        logits = carried.double() @ self._output if sequences else torch.empty(0, self.config.vocab_size)
        logits[:, self._missing] = -torch.inf
        return HeadState(sequences, depth, carried, logits)


def without_rows(state: HeadState) -> HeadState:
    """Returns a state without logits that are numbers: a head that failed."""
    return replace(state, logits=torch.full_like(state.logits, torch.nan))
