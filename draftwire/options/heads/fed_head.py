"""A head as a drafting strategy, away from the target: it receives the target's features.

A sequence begins with the features of the last tokens of its text, and receives those of each round. It drafts once
those of all committed tokens but the last have arrived.
"""

import time
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from draftwire.drafting.strategies import LoadedStrategy, StrategyContext
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.method.quantization import Quantization
from draftwire.models.card import ModelCard
from draftwire.models.sequence_model import FeatureSpan
from draftwire.options.heads.draft_head import DraftHead
from draftwire.options.heads.feature_encoding import decode_rows
from draftwire.options.heads.features import FeatureNeed, SessionFeatures
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.requests.session_parameters import SessionParameters


class ReceivedFeatures:
    """The features of one text that the head may still read: consecutive rows."""

    def __init__(self, first: int, like: Tensor, head: HeadSequence) -> None:
        """Starts without rows, at a position; `like` is `[0, size]`, of the head's type and on its device. `head` reads
        them.
        """
        self.head = head
        self.start = first
        """Position of the first row."""
        self._rows = like

    @property
    def stop(self) -> int:
        """Position behind the last row."""
        return self.start + len(self._rows)

    def add(self, rows: Tensor) -> None:
        """Adds `[count, size]` rows behind the last one."""
        self._rows = torch.cat([self._rows, rows.to(self._rows.device, self._rows.dtype)])

    def between(self, start: int, stop: int) -> Tensor:
        """Returns the rows of some positions, all of them there."""
        assert self.start <= start <= stop <= self.stop, "the head reads received features only"
        return self._rows[start - self.start : stop - self.start]

    def forget_before(self, position: int) -> None:
        """Drops the rows before a position."""
        dropped = max(0, min(position, self.stop) - self.start)
        self._rows, self.start = self._rows[dropped:], self.start + dropped


class FeatureTexts:
    """A `FeatureReader` of received features."""

    def features(self, spans: Sequence[FeatureSpan[ReceivedFeatures]]) -> Tensor:
        """Returns the rows of all spans, `[sum of stop - start, size]`."""
        return torch.cat([span.sequence.between(span.start, span.stop) for span in spans])


class FedSequence:
    """One session of a `FedHeadDrafter`."""

    num_unread = num_reused = 0
    """Nothing is read before its features are there."""

    def __init__(self, drafter: HeadDrafter[ReceivedFeatures], like: Tensor, token_ids: list[int]) -> None:
        """Starts without features, from the head's drafter, an empty tensor like the rows, and the prompt."""
        self._drafter = drafter
        self._like = like
        self.ids = self._readable(token_ids)
        self.received: ReceivedFeatures | None = None
        """None until the first features arrive."""

    @property
    def can_draft(self) -> bool:
        """Whether the features of all committed tokens but the last have arrived."""
        return self.received is not None and self.received.stop >= len(self.ids) - 1 > 0

    def drafting(self, request: DraftRequest) -> HeadDrafting[ReceivedFeatures]:
        """Returns its part in a step. It must be able to draft."""
        assert self.received is not None, "its features have arrived"
        return HeadDrafting(self.received.head, self.received, self.ids, request)

    def feed(self, first_position: int, rows: Tensor) -> None:
        """Adds `[count, size]` features from a position on. Skips those that it has; behind a gap the sequence begins
        anew.
        """
        if self.received is None or first_position > self.received.stop:
            self.close()
            self.received = ReceivedFeatures(first_position, self._like, self._drafter.open(first_position))
        self.received.add(rows[self.received.stop - first_position :])

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Sets the committed tokens; see `DraftSequence`. Ids beyond the head's vocabulary are read as token 0."""
        self.ids[base_len:] = self._readable(token_ids)

    def _readable(self, token_ids: list[int]) -> list[int]:
        size = self._drafter.head.config.vocab_size
        return [token if token < size else 0 for token in token_ids]

    def close(self) -> None:
        """Frees the head's sequence and the features."""
        if self.received is not None:
            self._drafter.close(self.received.head)
        self.received = None


class FedHeadDrafter:
    """A head that receives features. Used on the torch thread."""

    def __init__(
        self, head: DraftHead, context_length: int, need: FeatureNeed, quantization: Quantization | None = None
    ) -> None:
        """Wraps a loaded head.

        Args:
            head: a head whose cache has room for all sequences.
            context_length: positions of a text.
            need: the features that it reads, and their encoding.
            quantization: applied to distributions before drawing; None is the default.
        """
        self.context_length = context_length
        self.need = need
        self._drafter = HeadDrafter(head, FeatureTexts(), quantization)
        self._like = torch.empty(0, head.config.hidden_size, dtype=head.dtype, device=head.device)

    def open(self, token_ids: list[int], parameters: SessionParameters) -> FedSequence:
        """Opens a sequence without features. Nothing is shared between sequences."""
        return FedSequence(self._drafter, self._like, token_ids)

    def feed(self, sequence: FedSequence, features: SessionFeatures) -> None:
        """Adds features to a sequence."""
        encoding = self.need.encoding
        rows = decode_rows(features.rows, features.scales, features.num_positions, encoding)
        sequence.feed(features.first_position, rows)

    def rehearse(self, sequence: FedSequence) -> None:
        """Feeds a sequence with features of its whole text that are all 0."""
        sequence.feed(0, torch.zeros(len(sequence.ids) - 1, self.need.size))

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts for the sequences whose features have arrived."""
        started = time.perf_counter()
        drafts: list[Draft | DraftwireError | None] = [None] * len(draftings)
        members: dict[int, HeadDrafting[ReceivedFeatures]] = {}
        for index, drafting in enumerate(draftings):
            sequence = cast(FedSequence, drafting.sequence)
            if drafting.request is not None and sequence.can_draft:
                members[index] = sequence.drafting(drafting.request)
        if not members:
            return DraftStep(drafts)
        before = sum(member.sequence.num_read for member in members.values())
        for index, draft in zip(members, self._drafter.draft(list(members.values())), strict=True):
            drafts[index] = draft
        num_read = sum(member.sequence.num_read for member in members.values()) - before
        for member in members.values():
            member.target.forget_before(member.sequence.num_read - 1)  # the last pair may be read again
        num_passes = max((len(draft.token_ids) for draft in drafts if isinstance(draft, Draft)), default=0)
        return DraftStep(drafts, max(0, num_read), 0.0, time.perf_counter() - started, num_passes)


class HeadContext(StrategyContext, Protocol):
    """Configuration of heads."""

    def load_head(self) -> tuple[ModelCard, DraftHead, FeatureNeed]:
        """Loads a head with what it shares with its target, which the option `model` names, and says what it has to be
        fed with.

        Raises:
            InvalidRequestError: the head cannot be served, or is for another target.
        """


def load(name: str, context: HeadContext) -> LoadedStrategy:
    """Loads a head of a kind as a strategy."""
    card, head, need = context.load_head()
    if head.config.kind.value != name:
        raise InvalidRequestError(
            f"strategy {name} takes a head of that kind, and this one is {head.config.kind.value}"
        )
    return LoadedStrategy(card, FedHeadDrafter(head, card.description.context_length, need, context.quantization))
