"""Drafts with a small language model, token by token, for many sequences at once."""

import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from draftwire.distributions import DraftDistributions, draw, race
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.models.cached_model import Reading, SequenceModel
from draftwire.randomness import exponentials, uniforms
from draftwire.sampling import Span, is_distribution, probabilities_of_spans


class LanguageModelSequence:
    """One session's tokens in the drafter's cache.

    The cache holds all committed tokens but the last, or more: logits for the next token come from reading that last
    one.
    """

    def __init__(self, model: SequenceModel, token_ids: list[int], cache_salt: str, substitute_id: int) -> None:
        """See `LanguageModelDrafter.open`."""
        self.model = model
        self.ids: list[int] = []  # as read: everything known, committed tokens, then drafted ones
        self._substitute_id = substitute_id
        self._num_committed = 0
        self._commit(0, token_ids)
        self.cached = model.cache.open(self.ids, cache_salt)

    @property
    def num_unread(self) -> int:
        """See `DraftSequence.num_unread`; at least 1 after `calibrate`."""
        return max(0, self._num_committed - self.cached.length)

    @property
    def num_reused(self) -> int:
        """See `DraftSequence.num_reused`."""
        return self.cached.num_reused

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """See `DraftSequence.calibrate`. Accepted draft tokens stay in the cache; only what differs is read again."""
        agreeing = self._commit(base_len, token_ids)
        # The last token is always read (again), because its logits are the ones to draw from.
        length = min(agreeing, self.cached.length, self._num_committed - 1)
        self.model.cache.truncate(self.cached, length)

    def publish(self) -> None:
        """Offers what is read and committed to other sequences, but for the last token, which may be read again."""
        self.model.cache.publish(self.cached, self.ids[: self._num_committed - 1])

    def close(self) -> None:
        """See `DraftSequence.close`."""
        self.model.cache.close(self.cached)

    def unread(self, limit: int | None) -> list[int]:
        """Returns the next committed tokens to read, at most `limit`."""
        start = self.cached.length
        return self.ids[start : self._num_committed if limit is None else min(self._num_committed, start + limit)]

    def _commit(self, base_len: int, token_ids: list[int]) -> int:
        """Takes over committed tokens and returns how many of all are as they were known."""
        size, substitute = self.model.vocab_size, self._substitute_id
        readable = [token if token < size else substitute for token in token_ids]
        agreeing = base_len
        for known, token in zip(self.ids[base_len:], readable, strict=False):
            if known != token:
                break
            agreeing += 1
        del self.ids[base_len:]
        self.ids += readable
        self._num_committed = len(self.ids)
        return agreeing


class LanguageModelDrafter:
    """A causal language model as a drafting strategy."""

    def __init__(self, model: SequenceModel, context_length: int, substitute_id: int = 0) -> None:
        """Wraps a loaded model.

        Args:
            model: reads and gives logits.
            context_length: positions that the model can attend to.
            substitute_id: read in the place of committed ids that this model's vocabulary lacks.
        """
        self.model = model
        self.context_length = context_length
        self._substitute_id = substitute_id

    def open(self, token_ids: list[int], cache_salt: str = "") -> LanguageModelSequence:
        """See `DraftingStrategy.open`."""
        return LanguageModelSequence(self.model, token_ids, cache_salt, self._substitute_id)

    @torch.inference_mode()
    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """See `DraftingStrategy.step`. One forward pass for the tokens to read, then one for each drafted token."""
        started = time.perf_counter()
        members: list[tuple[int, LanguageModelSequence, DraftRequest]] = []
        readings = []
        for index, drafting in enumerate(draftings):
            sequence = cast(LanguageModelSequence, drafting.sequence)
            unread = sequence.unread(drafting.max_read)
            drafts = drafting.request is not None and len(unread) == sequence.num_unread
            if unread:
                readings.append(Reading(sequence.cached, unread, int(drafts)))
            if drafts:
                assert unread, "calibrate comes first"
                members.append((index, sequence, cast(DraftRequest, drafting.request)))
        if not readings:
            return DraftStep([None] * len(draftings))
        logits = self.model.read(readings)
        calibrated = time.perf_counter()
        drafts_of = self._draw(logits, [(sequence, request) for _, sequence, request in members])
        results: list[Draft | DraftwireError | None] = [None] * len(draftings)
        for (index, sequence, _), draft in zip(members, drafts_of, strict=True):
            results[index] = draft
            if isinstance(draft, Draft):
                sequence.ids += draft.token_ids
                sequence.publish()
        num_read = sum(len(reading.token_ids) for reading in readings)
        return DraftStep(results, num_read, calibrated - started, time.perf_counter() - calibrated)

    def _draw(
        self, logits: Tensor, members: list[tuple[LanguageModelSequence, DraftRequest]]
    ) -> list[Draft | DraftwireError]:
        """Draws block after block, position by position.

        A block whose next logits are not finite ends there: a failure of the model for that sequence alone.

        Args:
            logits: `[members, vocab]`, after each member's committed tokens.
            members: sequences with what is wanted for them.
        """
        most = max(request.num_tokens for _, request in members) if members else 0
        numbers = uniforms([request.key for _, request in members], most).tolist()
        blocks = [
            _Block(sequence, request, min(request.vocab_size, self.model.vocab_size), own)
            for (sequence, request), own in zip(members, numbers, strict=True)
        ]
        active = blocks  # those that the rows of `logits` belong to
        while active:
            for row, block in zip(logits, active, strict=True):
                if block.limit < len(row):
                    row[block.limit :] = -torch.inf
            probs = probabilities_of_spans(logits, [block.span for block in active]).float()  # as they are sent
            is_good = is_distribution(probs).tolist()
            for group in (True, False):
                rows = [row for row, block in enumerate(active) if block.request.is_coupled is group and is_good[row]]
                if rows:
                    own = probs if len(rows) == len(active) else probs[torch.tensor(rows, device=probs.device)]
                    _draw_tokens([active[row] for row in rows], own)
            active = [block for block, good in zip(active, is_good, strict=True) if good and block.num_left]
            if active:
                logits = self.model.read([Reading(block.sequence.cached, [block.token_ids[-1]], 1) for block in active])
        return [block.draft() for block in blocks]


class _Block:
    """One block while it is drawn."""

    def __init__(
        self, sequence: LanguageModelSequence, request: DraftRequest, limit: int, numbers: list[float]
    ) -> None:
        self.sequence = sequence
        self.request = request
        self.limit = limit
        self.token_ids: list[int] = []
        self.rows: list[Tensor] = []
        self._numbers = numbers

    @property
    def needs_rows(self) -> bool:
        """Whether the distributions are sent; those of a greedy drafter can be told without them."""
        return self.request.needs_probs and not self.request.sampling.greedy

    @property
    def number(self) -> float:
        """The uniform number that draws the next token."""
        return self._numbers[len(self.token_ids)]

    @property
    def num_left(self) -> int:
        """Tokens that are still to be drawn."""
        return self.request.num_tokens - len(self.token_ids)

    @property
    def position(self) -> int:
        """Where in the text the next token stands."""
        return len(self.sequence.ids) + len(self.token_ids)

    @property
    def span(self) -> Span:
        """The place of the next token."""
        request = self.request
        text = [*self.sequence.ids, *self.token_ids] if request.sampling.penalizes else ()
        return Span(request.sampling, 1, text, request.prompt_len, request.stop_token_ids, self.position)

    def add(self, token: int, row: Tensor) -> None:
        """Takes a token that was drawn from `row`."""
        self.token_ids.append(token)
        if self.needs_rows:
            self.rows.append(row[: self.limit])

    def draft(self) -> Draft | DraftwireError:
        """Returns what was drawn."""
        if not self.token_ids:
            return UnavailableError("the draft model gave no finite logits")
        if not self.request.needs_probs:
            return Draft(self.token_ids, DraftDistributions.none(self.limit))
        if self.request.sampling.greedy:
            return Draft(self.token_ids, DraftDistributions.one_hot(self.limit))
        return Draft(self.token_ids, DraftDistributions.from_rows(torch.stack(self.rows)))


def _draw_tokens(blocks: list[_Block], probs: Tensor) -> None:
    """Draws the next token of blocks that are all coupled, or none of them.

    Args:
        blocks: whose tokens.
        probs: `[blocks, vocab]`.
    """
    if blocks[0].request.is_coupled:
        words = torch.tensor([block.request.key.text_words for block in blocks], device=probs.device)
        positions = torch.tensor([block.position for block in blocks], device=probs.device)
        drawn = race(probs, exponentials(words, positions, probs.shape[1])).winners
    else:
        numbers = torch.tensor([block.number for block in blocks], dtype=torch.float64, device=probs.device)
        drawn = draw(probs, numbers)
    if any(block.needs_rows for block in blocks):
        probs = probs.cpu()
    for block, token, row in zip(blocks, drawn.tolist(), probs, strict=True):
        block.add(token, row)
