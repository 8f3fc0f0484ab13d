"""Drafts with a head that reads the target's hidden states, token by token, for many sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch

from draftwire.drafting.drawing import BlockStart, Drawer
from draftwire.drafting.places import KeptEdits, span_of_next
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError, NoRoomError
from draftwire.method.devices import upload
from draftwire.method.quantization import Quantization
from draftwire.method.sampling import probabilities_of_spans
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import FeatureSpan, Text
from draftwire.options.heads.draft_head import DraftHead, HeadState, PairReading
from draftwire.options.heads.taps import FeatureReader

READ_AT_ONCE = 512
"""Pairs that a head reads in a step, of all sequences together, and one more of each. A sequence for which that is not
enough drafts in a later step; those with the least to read go first."""


class HeadSequence:
    """One session's pairs in the cache of a head: those with true features alone, from one block to the next."""

    def __init__(self, cached: CachedSequence, first: int = 0) -> None:
        """Wraps a sequence that the head has opened.

        Args:
            cached: without pairs.
            first: position of the first token whose pair is read: the head does not see the text before it.
        """
        self.cached = cached
        self.first = first
        self.num_read = first
        """Tokens whose pairs need no reading: those read with true features, and those before `first`."""
        self.edits = KeptEdits()


@dataclass(frozen=True, slots=True)
class HeadDrafting(Generic[Text]):
    """One sequence's part in a step."""

    sequence: HeadSequence
    target: Text
    """The text, with features of all committed tokens but the last, from the sequence's `first` on."""
    committed: Sequence[int]
    """All committed tokens, at least 2."""
    request: DraftRequest
    """The block to draft, once all pairs are read."""


class HeadDrafter(Generic[Text]):
    """A head beside the features that it reads. All methods run on the torch thread."""

    def __init__(
        self, head: DraftHead, features: FeatureReader[Text], quantization: Quantization | None = None
    ) -> None:
        """Wraps a loaded head.

        Args:
            head: a head whose cache has room for all sequences.
            features: reader of the fused features of the target's tokens.
            quantization: applied to distributions before drawing; None is the default.
        """
        self.head = head
        self._features = features
        self._quantization = quantization or Quantization()

    def open(self, first: int = 0) -> HeadSequence:
        """Opens a sequence that has read nothing; see `HeadSequence` for `first`."""
        return HeadSequence(self.head.open(), first)

    def close(self, sequence: HeadSequence) -> None:
        """Frees a sequence."""
        self.head.close(sequence.cached)

    @torch.inference_mode()
    def draft(self, draftings: Sequence[HeadDrafting[Text]]) -> list[Draft | DraftwireError | None]:
        """Drafts for a batch of different sequences: one pass for the pairs to read, then one for each drafted token.

        Whether there is a draft, and where it ends, never depends on a drawn token: a cut block keeps all its tokens.

        Returns:
            One for each; None if there was more to read than fits into a step, NoRoomError if the head's cache is full,
            UnavailableError if the head returned no finite logits.
        """
        if not draftings:
            return []
        readings = self._readings(draftings)
        members = [index for index, reading in enumerate(readings) if reading.keep]
        try:
            state = self.head.read(readings)
        except NoRoomError as error:
            return [error] * len(draftings)
        drafts: list[Draft | DraftwireError | None] = [None] * len(draftings)
        try:
            for drafting, reading in zip(draftings, readings, strict=True):
                drafting.sequence.num_read += len(reading.token_ids)
            if members:
                drawn = self._draw(state, [draftings[index] for index in members])
                for index, draft in zip(members, drawn, strict=True):
                    drafts[index] = draft
        finally:
            for drafting in draftings:
                self._rewind(drafting.sequence)
        return drafts

    def _readings(self, draftings: Sequence[HeadDrafting[Text]]) -> list[PairReading]:
        """Returns the pairs to read of each sequence."""
        wanted = []
        for drafting in draftings:
            sequence, stop = drafting.sequence, len(drafting.committed) - 1
            # The last pair may be read again, and of heads without a history it alone matters.
            sequence.num_read = min(sequence.num_read, stop - 1) if self.head.config.reads_history else stop - 1
            self._rewind(sequence)
            wanted.append(stop - sequence.num_read)
        granted = _granted(wanted)
        spans = [
            FeatureSpan(drafting.target, drafting.sequence.num_read, drafting.sequence.num_read + count)
            for drafting, count in zip(draftings, granted, strict=True)
        ]
        features = self._features.features(spans).split(granted)
        return [
            PairReading(
                drafting.sequence.cached,
                list(drafting.committed[span.start + 1 : span.stop + 1]),
                own,
                keep=span.stop == len(drafting.committed) - 1,
                begins_text=drafting.sequence.first == 0,
            )
            for drafting, span, own in zip(draftings, spans, features, strict=True)
        ]

    def _draw(self, state: HeadState, draftings: Sequence[HeadDrafting[Text]]) -> list[Draft | DraftwireError]:
        """Draws blocks, position by position. Only penalties and forms make the host wait for the device."""
        config = self.head.config
        most = config.most_tokens
        requests = [
            each.request if most is None else replace(each.request, num_tokens=min(each.request.num_tokens, most))
            for each in draftings
        ]
        starts = [
            BlockStart(request, min(request.vocab_size, config.vocab_size), len(each.committed))
            for request, each in zip(requests, draftings, strict=True)
        ]
        drawer = Drawer(starts, self._quantization, self.head.device)
        active = list(range(len(draftings)))
        while True:
            logits = state.logits
            for row, index in enumerate(active):
                if starts[index].vocab_size < logits.shape[1]:
                    logits[row, starts[index].vocab_size :] = -torch.inf
            spans = [
                span_of_next(
                    drawer, index, requests[index], draftings[index].committed, draftings[index].sequence.edits.of
                )
                for index in active
            ]
            tokens = drawer.draw(active, probabilities_of_spans(logits, spans).float())
            going = [row for row, index in enumerate(active) if drawer.goes_on(index)]
            if not going:
                return drawer.drafts()
            if len(going) < len(active):
                state, tokens = state.select(going), tokens[upload(going, tokens.device, torch.int64)]
                active = [active[row] for row in going]
            try:
                state = self.head.extend(state, tokens)
            except NoRoomError:  # the blocks end here, whatever was drawn
                return drawer.drafts()

    def _rewind(self, sequence: HeadSequence) -> None:
        """Keeps the pairs with true features in the head's cache, as far as the head reads them again."""
        kept = sequence.num_read - sequence.first if self.head.config.reads_history else 0
        self.head.truncate(sequence.cached, min(kept, sequence.cached.length))


def _granted(wanted: Sequence[int]) -> list[int]:
    """Returns how many pairs to read of each sequence, of those that it has to read, at least 1."""
    granted, left = [0] * len(wanted), READ_AT_ONCE
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        granted[index] = max(1, min(wanted[index], left))
        left = max(0, left - granted[index])
    return granted
