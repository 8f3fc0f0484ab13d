"""Drafts with a small language model, token by token, for many sequences at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from draftwire.drafting.drawing import BlockStart, Drawer
from draftwire.drafting.places import KeptEdits, span_of_next
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.method.quantization import Quantization
from draftwire.method.sampling import probabilities_of_spans
from draftwire.models.sequence_model import DraftModel, Reading
from draftwire.requests.session_parameters import SessionParameters

PROMPT_TOKENS = 32
"""A step that reads more tokens than this for one sequence counts as prefill."""


class LanguageModelSequence:
    """One session's tokens in the drafter's KV cache.

    The cache holds at least all committed tokens but the last: reading the last one gives the logits for the next.
    Drafted tokens may have been read approximately, by a model that does not extend exactly. Unless calibration is
    switched off, the next round reads them again exactly, accepted or not, so that approximations never add up.

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
    def num_kept(self) -> int:
        """Tokens at the front of the cache that are not read again, as far as they are committed."""
        return self.num_exact if self._calibrates else self.cached.base

    @property
    def reads_fuzzily(self) -> bool:
        """Whether committed tokens are read approximately; the tokens that the sequence was opened with never are."""
        return not (self._calibrates or self.model.extends_exactly) and self.cached.length >= self._num_opened_with

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens. Cached tokens that are exact and committed are kept; the rest is read again."""
        agreeing = self._commit(base_len, token_ids)
        # The last token is always read again, because the next token is drawn from its logits.
        length = min(agreeing, self.num_kept, self._num_committed - 1)
        self.model.cache.truncate(self.cached, length)
        self._num_read_exactly = min(self._num_read_exactly, length)

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

    def reading(self, unread: list[int], request: DraftRequest) -> Reading:
        """Returns what to read before a block is drawn, the last committed tokens, and which logits to keep."""
        return Reading(self.cached, unread, 1)

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


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A sequence in a step that drafts."""

    sequence: LanguageModelSequence
    request: DraftRequest


class Chains:
    """The chains of a step, which are drawn together, token by token.

    Drawn tokens feed the next forward pass on the device. The host waits for the device only where penalties or a form
    need the text.
    """

    def __init__(self, model: DraftModel, members: Sequence[BatchMember], quantization: Quantization) -> None:
        """Starts before the first token of each member's chain. The model has read what is committed of all."""
        self.model, self.members = model, members
        self.drawer = Drawer([_start(member, model.vocab_size) for member in members], quantization, model.device)
        self.active = list(range(len(members)))
        """Indices of the members whose chains go on."""
        self.num_passes = 0
        """Forward passes so far."""

    def draw(self, logits: Tensor) -> list[Draft | DraftwireError]:
        """Returns the drafts of all members, and adds them to their sequences.

        A chain whose next logits are not finite ends there: a failure of the model for that sequence alone. One that is
        cut ends after its last drawn token, without a further forward pass.

        Args:
            logits: `[active, vocab]`, after the committed tokens of each. Overwritten.
        """
        while self.active:
            probs = self.probabilities(self.masked(logits))
            tokens = self.drawer.draw(self.active, probs)
            going = [row for row, index in enumerate(self.active) if self.goes_on(index)]
            if len(going) < len(self.active):
                self.active = [self.active[row] for row in going]
                tokens = tokens[upload(going, tokens.device, torch.int64)]
            if self.active:
                logits = self.extend(tokens)
        drafts = self.drawer.drafts()
        for member, draft in zip(self.members, drafts, strict=True):
            member.sequence.ids += draft.token_ids if isinstance(draft, Draft) else []
        return drafts

    def masked(self, logits: Tensor) -> Tensor:
        """Returns the logits of the next places, `[active, vocab]`, without ids beyond the target's vocabulary."""
        for row, index in zip(logits, self.active, strict=True):
            vocab_size = self.members[index].request.vocab_size
            if vocab_size < len(row):
                row[vocab_size:] = -torch.inf
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the distributions of the next places, `[active, vocab] float32`. The logits are overwritten."""
        spans = []
        for index in self.active:
            sequence, request = self.members[index].sequence, self.members[index].request
            spans.append(span_of_next(self.drawer, index, request, sequence.ids, sequence.edits.of))
        return probabilities_of_spans(logits, spans).float()

    def goes_on(self, index: int) -> bool:
        """Whether another token of a member's chain is to be drawn; see `Drawer.goes_on`."""
        return self.drawer.goes_on(index)

    def extend(self, tokens: Tensor) -> Tensor:
        """Returns the logits after drawn tokens, one for each active member: `[active, vocab]`."""
        self.num_passes += 1
        return self.model.extend([self.members[index].sequence.cached for index in self.active], tokens)


def _start(member: BatchMember, vocab_size: int) -> BlockStart:
    """Returns the start of a member's chain, drawn by a model with a vocabulary of some size."""
    return BlockStart(member.request, min(member.request.vocab_size, vocab_size), len(member.sequence.ids))


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
            request = drafting.request
            if request is not None and len(unread) == sequence.num_unread:
                assert unread, "calibrate comes first"
                members[index] = BatchMember(sequence, request)
                parts.append((sequence, sequence.reading(unread, request)))
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
        """Draws blocks, and returns them with the number of forward passes.

        Args:
            logits: `[rows, vocab]`, those that the members' readings kept.
            members: those that draft.
        """
        chains = self._chains(members)
        return chains.draw(logits), chains.num_passes

    def _chains(self, members: list[BatchMember]) -> Chains:
        """Returns the chains of members, before their first tokens."""
        return Chains(self.model, members, self._quantization)
