"""Drafts with a small language model, token by token, for many sequences at once."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from draftwire.drafting.drawing import BlockStart, Drawer, PlaceGuesses
from draftwire.drafting.places import KeptEdits, span_of_next
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.method.quantization import Quantization
from draftwire.method.sampling import TokenEdits, probabilities_of_spans
from draftwire.models.sequence_model import DraftModel, ForkingModel, Reading
from draftwire.requests.session_parameters import SessionParameters

PROMPT_TOKENS = 32
"""A step that reads more tokens than this for one sequence counts as prefill."""


class LanguageModelSequence:
    """One session's tokens in the drafter's KV cache.

    The cache holds at least all committed tokens but the last: reading the last one gives the logits for the next.
    Drafted tokens may have been read approximately. Unless calibration is switched off, the next round reads them again
    exactly, accepted or not, so that approximations never add up over rounds.

    Source: bonus calibration, Wu et al. 2025 (arXiv 2502.02493), section 4.3.
    """

    def __init__(
        self, model: DraftModel, token_ids: list[int], cache_salt: str, substitute_id: int, calibrates: bool = True
    ) -> None:
        """Opens a sequence in the model's cache; arguments as in `LanguageModelDrafter`."""
        self.model = model
        self.ids: list[int] = []  # as read by the model: committed tokens, then drafted ones
        self._substitute_id = substitute_id
        self._calibrates = calibrates
        self._num_committed = 0
        self._commit(0, token_ids)
        self._num_opened_with = len(token_ids)
        self.cached = model.cache.open(self.ids, cache_salt)
        self._num_read_exactly = self.cached.length
        self.edits = KeptEdits()

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft; at least 1 after `calibrate`."""
        return max(0, self._num_committed - self.cached.length)

    @property
    def num_reused(self) -> int:
        """Prompt tokens that were found in the KV cache."""
        return self.cached.num_reused

    @property
    def num_exact(self) -> int:
        """Tokens at the front of the cache whose keys and values are exact, not approximate."""
        return self.cached.length if self.model.extends_exactly else self._num_read_exactly

    @property
    def reads_fuzzily(self) -> bool:
        """Whether committed tokens are read approximately; the tokens that the sequence was opened with never are."""
        return not (self._calibrates or self.model.extends_exactly) and self.cached.length >= self._num_opened_with

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens. Cached tokens that are exact and committed are kept; the rest is read again."""
        agreeing = self._commit(base_len, token_ids)
        kept = self.num_exact if self._calibrates else self.cached.base
        # The last token is always read again, because the next token is drawn from its logits.
        length = min(agreeing, kept, self._num_committed - 1)
        self.model.cache.truncate(self.cached, length)
        self._num_read_exactly = min(self._num_read_exactly, length)

    def fork(self, model: ForkingModel, base_len: int, token_ids: list[int]) -> "LanguageModelSequence":
        """Returns another sequence; see `ForkingStrategy.fork`. `model` is this one's."""
        fork = copy(self)
        fork.ids = self.ids[:base_len]
        fork._commit(base_len, token_ids)
        kept = self.num_exact if self._calibrates else self.cached.base
        fork.cached = model.fork(self.cached, min(base_len, kept, fork._num_committed - 1))
        fork._num_read_exactly = min(self._num_read_exactly, fork.cached.length)
        return fork

    def note_exact_read(self) -> None:
        """Marks all tokens in the cache as read exactly."""
        self._num_read_exactly = self.cached.length

    def publish(self) -> None:
        """Publishes exact committed tokens for prefix reuse, except the last one, which may be read again."""
        self.model.cache.publish(self.cached, self.ids[: min(self._num_committed - 1, self.num_exact)])

    def close(self) -> None:
        """Frees the sequence's blocks in the KV cache."""
        self.model.cache.close(self.cached)

    def unread(self, limit: int | None) -> list[int]:
        """Returns the next committed tokens to read, at most `limit`."""
        start = self.cached.length
        return self.ids[start : self._num_committed if limit is None else min(self._num_committed, start + limit)]

    def _commit(self, base_len: int, token_ids: list[int]) -> int:
        """Replaces the tokens after `base_len`; returns how many leading tokens are unchanged."""
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


@dataclass(slots=True)
class BatchMember:
    """A sequence in a step that drafts."""

    sequence: LanguageModelSequence
    request: DraftRequest
    ahead: list[int] = field(default_factory=list)
    """Tokens that were read ahead of what is drawn, and are in the cache."""
    rows: list[Tensor] = field(default_factory=list)
    """`[vocab]` logits after each of them, which are good for a token whose text they are."""

    @property
    def text(self) -> tuple[DraftRequest, list[int], Callable[[DraftRequest], TokenEdits]]:
        """Arguments of `span_of_next` for it."""
        return self.request, self.sequence.ids, self.sequence.edits.of

    def reading(self, unread: list[int], drawn: list[int]) -> Reading:
        """Returns what to read for the next token: tokens that are certain, and those ahead of it.

        Args:
            unread: tokens of the text.
            drawn: all tokens of the block, the last of which is the last of `unread`, if there are any.
        """
        cached = self.sequence.cached
        continuation, most = self.request.continuation, self.request.num_tokens - len(drawn) - 1
        can_read = most > 0 and self.sequence.model.extends_exactly
        self.ahead = continuation.may_follow(drawn)[:most] if continuation is not None and can_read else []
        return Reading(cached, [*unread, *self.ahead], 1 + len(self.ahead))

    def row_after(self, token: int) -> Tensor | None:
        """Returns the logits after a drawn token that was read ahead. Of another one there are none, nor of any after
        it: then what was read is forgotten.
        """
        if self.ahead and self.ahead[0] == token:
            del self.ahead[0]
            return self.rows.pop(0)
        self.forget_ahead()
        return None

    def forget_ahead(self) -> None:
        """Takes the tokens that were read ahead, and are not drawn, out of the cache."""
        if self.ahead:
            cached = self.sequence.cached
            self.sequence.model.cache.truncate(cached, cached.length - len(self.ahead))
        self.ahead, self.rows = [], []


class LanguageModelDrafter:
    """A causal language model as a drafting strategy."""

    def __init__(
        self,
        model: DraftModel,
        context_length: int,
        substitute_id: int = 0,
        quantization: Quantization | None = None,
        calibrates: bool = True,
    ) -> None:
        """Wraps a loaded model.

        Args:
            model: the drafter's model.
            context_length: positions that the model can attend to.
            substitute_id: read in the place of committed ids that this model's vocabulary lacks.
            quantization: applied to distributions before drawing; None is the default.
            calibrates: whether tokens that were read approximately are read again exactly, once per round.
        """
        self.model = model
        self._calibrates = calibrates
        self.context_length = context_length
        self._quantization = quantization or Quantization()
        self._substitute_id = substitute_id

    def open(self, token_ids: list[int], parameters: SessionParameters) -> LanguageModelSequence:
        """Opens a sequence whose committed tokens are `token_ids`, at least one."""
        salt = parameters.cache_salt
        return LanguageModelSequence(self.model, token_ids, salt, self._substitute_id, self._calibrates)

    @property
    def can_fork(self) -> bool:
        """Whether sequences can be forked: not those of a model that several ranks share, nor where what was read
        approximately stays, so that little can be shared.
        """
        return isinstance(self.model, ForkingModel) and (self._calibrates or self.model.extends_exactly)

    def fork(self, sequence: LanguageModelSequence, base_len: int, token_ids: list[int]) -> LanguageModelSequence:
        """Returns another sequence that shares what the model has read; see `ForkingStrategy.fork`."""
        assert isinstance(self.model, ForkingModel), "only asked of strategies that can fork"
        return sequence.fork(self.model, base_len, token_ids)

    @torch.inference_mode()
    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts for a batch: one forward pass for the tokens to read, then one for each drafted token."""
        started = time.perf_counter()
        members: dict[int, BatchMember] = {}
        parts: list[tuple[LanguageModelSequence, Reading]] = []
        num_read = 0
        for index, drafting in enumerate(draftings):
            sequence = cast(LanguageModelSequence, drafting.sequence)
            unread = sequence.unread(drafting.max_read)
            num_read += len(unread)
            if drafting.request is not None and len(unread) == sequence.num_unread:
                assert unread, "calibrate comes first"
                members[index] = BatchMember(sequence, drafting.request)
                parts.append((sequence, members[index].reading(unread, [])))
            elif unread:
                parts.append((sequence, Reading(sequence.cached, unread, 0)))
        if not parts:
            return DraftStep([None] * len(draftings))
        logits = self._read(parts)
        if logits.is_cuda and max(len(reading.token_ids) for _, reading in parts) > PROMPT_TOKENS:
            torch.cuda.current_stream(logits.device).synchronize()  # the cost of prefill is measured here
        calibrated = time.perf_counter()
        drafts_of, num_passes = self._draw(logits, list(members.values()))
        results: list[Draft | DraftwireError | None] = [None] * len(draftings)
        for (index, member), draft in zip(members.items(), drafts_of, strict=True):
            results[index] = draft
            if isinstance(draft, Draft) and draft.token_ids:
                member.sequence.publish()
        return DraftStep(results, num_read, calibrated - started, time.perf_counter() - calibrated, num_passes)

    def _read(self, parts: list[tuple[LanguageModelSequence, Reading]]) -> Tensor:
        """Returns the kept logits, `[kept, vocab]`, by one forward pass, or two if only some are read fuzzily."""
        ways = [sequence.reads_fuzzily for sequence, _ in parts]
        rows: dict[int, Tensor] = {}
        for fuzzily in sorted(set(ways)):
            places = [place for place, way in enumerate(ways) if way is fuzzily]
            readings = [parts[place][1] for place in places]
            logits = self.model.read(readings, fuzzily)
            if not fuzzily:
                for place in places:
                    parts[place][0].note_exact_read()
            if len(places) == len(parts):
                return logits
            rows.update(zip(places, logits.split([reading.keep for reading in readings]), strict=True))
        return torch.cat([rows[place] for place in range(len(parts))])

    def _draw(self, logits: Tensor, members: list[BatchMember]) -> tuple[list[Draft | DraftwireError], int]:
        """Draws blocks, position by position, and returns them with the number of forward passes.

        Drawn tokens feed the next forward pass on the device. The host waits for the device only where penalties, a
        form or a continuation need the text. A block whose next logits are not finite ends there: a failure of
        the model for that sequence alone. A block that is cut ends after its last drawn token, without a further
        forward pass.

        Args:
            logits: `[rows, vocab]`, after each member's committed tokens and what was read ahead of them.
            members: those that draft.
        """
        drawer = Drawer(
            [self._start(member.sequence, member.request) for member in members], self._quantization, self.model.device
        )
        asked = [member.request.guesses for member in members if member.request.guesses is not None]
        guesses: PlaceGuesses | None = asked[0].beside(drawer) if asked else None
        active, num_passes = list(range(len(members))), 0
        logits = _first_rows(logits, members)
        while active:
            for row, index in zip(logits, active, strict=True):
                vocab_size = members[index].request.vocab_size
                if vocab_size < len(row):
                    row[vocab_size:] = -torch.inf
            spans = [span_of_next(drawer, index, *members[index].text) for index in active]
            if guesses is not None:
                guesses.see(active, logits)
            probs = probabilities_of_spans(logits, spans).float()
            if guesses is not None:
                guesses.rank(probs)
                drawing = [row for row, index in enumerate(active) if drawer.num_left(index)]
                if len(drawing) < len(active):  # in the first place alone: the others asked for guesses and no tokens
                    active, probs = [active[row] for row in drawing], probs[upload(drawing, probs.device, torch.int64)]
                    if not active:
                        break
            tokens = drawer.draw(active, probs)
            going = [row for row, index in enumerate(active) if drawer.goes_on(index)]
            if len(going) < len(active):
                active, tokens = [active[row] for row in going], tokens[upload(going, tokens.device, torch.int64)]
            if active:
                logits, has_read = self._extend([members[index] for index in active], tokens, drawer, active)
                num_passes += has_read
        drafts = drawer.drafts() if guesses is None else guesses.added_to(drawer.drafts())
        for member in members:
            member.forget_ahead()
        for member, draft in zip(members, drafts, strict=True):
            member.sequence.ids += draft.token_ids if isinstance(draft, Draft) else []
        return drafts, num_passes

    def _extend(
        self, members: list[BatchMember], tokens: Tensor, drawer: Drawer, indices: list[int]
    ) -> tuple[Tensor, bool]:
        """Returns the logits after drawn tokens, `[members, vocab]`, and whether that took a forward pass."""
        if not self.model.extends_exactly or all(member.request.continuation is None for member in members):
            return self.model.extend([member.sequence.cached for member in members], tokens), True
        rows: list[Tensor | None] = []
        readings: dict[int, Reading] = {}
        for place, (member, index) in enumerate(zip(members, indices, strict=True)):
            drawn = drawer.token_ids(index)
            rows.append(member.row_after(drawn[-1]))
            if rows[place] is None:
                readings[place] = member.reading([drawn[-1]], drawn)
        if readings:
            read = _first_rows(self.model.read(list(readings.values())), [members[place] for place in readings])
            for place, row in zip(readings, read, strict=True):
                rows[place] = row
        return torch.stack([row for row in rows if row is not None]), bool(readings)

    def _start(self, sequence: LanguageModelSequence, request: DraftRequest) -> BlockStart:
        return BlockStart(request, min(request.vocab_size, self.model.vocab_size), len(sequence.ids))


def _first_rows(logits: Tensor, members: list[BatchMember]) -> Tensor:
    """Returns the logits for the next token of each member, and gives it those after what it has read ahead."""
    if not any(member.ahead for member in members):
        return logits
    firsts, place = [], 0
    for member in members:
        firsts.append(place)
        member.rows = list(logits[place + 1 : place + 1 + len(member.ahead)])
        place += 1 + len(member.ahead)
    return logits[upload(firsts, logits.device, torch.int64)]
