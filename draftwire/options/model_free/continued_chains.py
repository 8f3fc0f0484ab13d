"""Chains of a language model that reads guessed tokens beside the last drawn one, since several take it as long as one.

What it draws does not depend on them; those that it draws need no pass of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.drafting.language_model import BatchMember, Chains, LanguageModelDrafter, LanguageModelSequence
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.models.sequence_model import Reading
from draftwire.requests.session_parameters import SessionParameters


class ContinuedSequence(LanguageModelSequence):
    """One session's tokens in the drafter's KV cache, which may end with tokens that are ahead of what is drawn."""

    ahead: Sequence[int] = ()
    """Tokens that were read ahead of what is drawn, and are in the cache."""
    rows: Sequence[Tensor] = ()
    """`[vocab]` logits after each of them, which are good for a token whose text they are."""

    @override
    def reading(self, unread: list[int], request: DraftRequest) -> Reading:
        return self.reading_on(unread, request, [])

    def reading_on(self, unread: list[int], request: DraftRequest, drawn: list[int]) -> Reading:
        """Returns what to read for the next token: tokens that are certain, and those ahead of it.

        Args:
            unread: tokens of the text.
            request: the block's.
            drawn: all tokens of the block, the last of which is the last of `unread`, if there are any.
        """
        continuation, most = request.continuation, request.num_tokens - len(drawn) - 1
        can_read = most > 0 and self.model.extends_exactly
        self.ahead = continuation.may_follow(drawn)[:most] if continuation is not None and can_read else []
        return Reading(self.cached, [*unread, *self.ahead], 1 + len(self.ahead))

    def row_after(self, token: int) -> Tensor | None:
        """Returns the logits after a drawn token that was read ahead. Of another one there are none, nor of any after
        it: then what was read is forgotten.
        """
        if self.ahead and self.ahead[0] == token:
            row, self.ahead, self.rows = self.rows[0], self.ahead[1:], self.rows[1:]
            return row
        self.forget_ahead()
        return None

    def forget_ahead(self) -> None:
        """Takes the tokens that were read ahead, and are not drawn, out of the cache."""
        if self.ahead:
            self.model.cache.truncate(self.cached, self.cached.length - len(self.ahead))
        self.ahead = self.rows = ()


class ContinuedChains(Chains):
    """Chains whose members may have guesses of how they go on; their sequences are `ContinuedSequence`s."""

    @override
    def draw(self, logits: Tensor) -> list[Draft | DraftwireError]:
        drafts = super().draw(_first_rows(logits, [self._sequence(index) for index in self.active]))
        for index in range(len(self.members)):
            self._sequence(index).forget_ahead()
        return drafts

    @override
    def goes_on(self, index: int) -> bool:
        if not super().goes_on(index):
            return False
        continuation = self.members[index].request.continuation
        return continuation is None or not continuation.takes_over(self.drawer.token_ids(index))

    @override
    def extend(self, tokens: Tensor) -> Tensor:
        reads_one_by_one = all(self.members[index].request.continuation is None for index in self.active)
        if reads_one_by_one or not self.model.extends_exactly:
            return super().extend(tokens)
        rows: list[Tensor | None] = []
        readings: dict[int, Reading] = {}
        for place, index in enumerate(self.active):
            sequence, drawn = self._sequence(index), self.drawer.token_ids(index)
            rows.append(sequence.row_after(drawn[-1]))
            if rows[place] is None:
                readings[place] = sequence.reading_on([drawn[-1]], self.members[index].request, drawn)
        if readings:
            self.num_passes += 1
            sequences = [self._sequence(self.active[place]) for place in readings]
            read = _first_rows(self.model.read(list(readings.values())), sequences)
            for place, row in zip(readings, read, strict=True):
                rows[place] = row
        return torch.stack([row for row in rows if row is not None])

    def _sequence(self, index: int) -> ContinuedSequence:
        sequence = self.members[index].sequence
        assert isinstance(sequence, ContinuedSequence), "it was opened here"
        return sequence


def _first_rows(logits: Tensor, sequences: Sequence[ContinuedSequence]) -> Tensor:
    """Returns the logits for the next token of each sequence, and keeps in it those after what it has read ahead."""
    if not any(sequence.ahead for sequence in sequences):
        return logits
    firsts, place = [], 0
    for sequence in sequences:
        firsts.append(place)
        sequence.rows = list(logits[place + 1 : place + 1 + len(sequence.ahead)])
        place += 1 + len(sequence.ahead)
    return logits[upload(firsts, logits.device, torch.int64)]


class ContinuedDrafter(LanguageModelDrafter):
    """A causal language model that takes guesses of how its chains go on: `DraftRequest.continuation`."""

    @override
    def open(self, token_ids: list[int], parameters: SessionParameters) -> ContinuedSequence:
        return ContinuedSequence(self.model, token_ids, parameters.cache_salt, self._substitute_id, self._calibrates)

    @override
    def _chains(self, members: list[BatchMember]) -> Chains:
        return ContinuedChains(self.model, members, self._quantization)
