"""Drafting strategy that follows a script instead of a model; see `draftwire.models.script`."""

import time
from collections.abc import Sequence
from typing import cast

from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding
from draftwire.models.script import Script, expected_tokens, recovered_tokens, wait


class ScriptedSequence:
    """Counts the tokens of one session."""

    num_reused = 0

    def __init__(self, num_committed: int) -> None:
        """Starts with all committed tokens unread."""
        self.num_committed = num_committed
        self.num_read = 0

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft."""
        return self.num_committed - self.num_read

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens after the first `base_len`; drafted tokens are forgotten."""
        self.num_committed = base_len + len(token_ids)
        self.num_read = min(self.num_read, self.num_committed - 1)

    def fork(self, base_len: int, num_tokens: int) -> "ScriptedSequence":
        """Returns a sequence that has read the first `base_len` tokens, and has more to read."""
        fork = ScriptedSequence(base_len + num_tokens)
        fork.num_read = base_len
        return fork

    def close(self) -> None:
        """Does nothing: no resources are held."""


class ScriptedDrafter:
    """A drafting strategy that waits instead of computing, and proposes the alphabet."""

    def __init__(self, script: Script) -> None:
        """Wraps a script."""
        self.context_length = script.context_length
        self._script = script

    def open(self, token_ids: list[int], cache_salt: str = "", *, shares_text: bool = False) -> ScriptedSequence:
        """Opens a sequence whose committed tokens are `token_ids`."""
        return ScriptedSequence(len(token_ids))

    @property
    def can_fork(self) -> bool:
        """Whether sequences can be forked: always."""
        return True

    def fork(self, sequence: ScriptedSequence, base_len: int, token_ids: list[int]) -> ScriptedSequence:
        """Returns another sequence; see `ForkingStrategy.fork`."""
        return sequence.fork(base_len, len(token_ids))

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Waits as long as the script says, and proposes the alphabet for each sequence that has read its tokens."""
        started = time.perf_counter()
        num_read = 0
        members: list[tuple[int, ScriptedSequence, DraftRequest]] = []
        for index, drafting in enumerate(draftings):
            sequence = cast(ScriptedSequence, drafting.sequence)
            unread = sequence.num_unread
            taken = unread if drafting.max_read is None else min(unread, drafting.max_read)
            sequence.num_read += taken
            num_read += taken
            if drafting.request is not None and taken == unread:
                members.append((index, sequence, drafting.request))
        wait(self._script.calibration_ms / 1e3 + self._script.read_us * num_read / 1e6)
        calibrated = time.perf_counter()
        lengths = self._drawn([request for _, _, request in members])
        drafts: list[Draft | DraftwireError | None] = [None] * len(draftings)
        for (index, sequence, request), length in zip(members, lengths, strict=True):
            drafts[index] = self._draft(sequence, request, length)
        return DraftStep(drafts, num_read, calibrated - started, time.perf_counter() - calibrated)

    def _drawn(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Waits as long as drawing the batch takes, and returns the length of each block."""
        lengths = [0] * len(requests)
        active = list(range(len(requests)))
        while active:
            wait(self._script.draft_ms / 1e3 + (len(active) - 1) * self._script.draft_row_us / 1e6)
            for index in active:
                lengths[index] += 1
            active = [i for i in active if lengths[i] < requests[i].num_tokens and not requests[i].is_cut()]
        return [min(length, request.num_tokens) for length, request in zip(lengths, requests, strict=True)]

    def _draft(self, sequence: ScriptedSequence, request: DraftRequest, length: int) -> Draft:
        tokens = expected_tokens(sequence.num_committed, length)
        encoding = Encoding.ONE_HOT if request.needs_probs else Encoding.NONE
        stated = DraftDistributions(encoding, min(request.vocab_size, self._script.vocab_size))
        return Draft(tokens, stated, self._guesses(sequence, request, length))

    def _guesses(self, sequence: ScriptedSequence, request: DraftRequest, length: int) -> list[list[int]]:
        if not request.num_guesses:
            return []
        if not request.num_tokens:
            (expected,) = expected_tokens(sequence.num_committed, 1)
            return [[expected, *recovered_tokens(expected)][: request.num_guesses]]
        places = expected_tokens(sequence.num_committed, length)
        return [recovered_tokens(expected)[: request.num_guesses] for expected in places]
