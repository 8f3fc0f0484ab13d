"""A model and a text drafter: where the text goes on as it did before, several tokens for nothing, or for one pass.

Before each token of a block is drawn, what was kept so far is looked up: the committed tokens and the drawn ones. If so
many of them match an earlier place that the text probably goes on like there, the rest of the block is guessed, and the
model's passes for it are saved. A guess is certain of its tokens; a token that the model has drawn is never compared
with one, since keeping it for being equal would change what it was drawn from.

Where fewer match, the model draws as it would without a guess, but reads the guessed tokens beside the last one, since
several take it as long as one. What it draws does not depend on them; those that it draws need no pass of their own.

Source: the horizontal cascade, and the vertical one, of Chen et al. 2024, "Cascade Speculative Drafting" (arXiv
2312.11462); phrases after tokens of the model: Zhao et al. 2024, "Ouroboros" (arXiv 2402.13720).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from draftwire.drafting.language_model import LanguageModelSequence
from draftwire.drafting.model_strategy import load_drafter
from draftwire.drafting.strategies import JOINT, MODEL, LoadedStrategy
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.method.encoding import DENSE_FORMATS, DraftDistributions
from draftwire.method.quantization import Encoding, id_width
from draftwire.options.model_free.continued_chains import ContinuedDrafter
from draftwire.options.model_free.model_free_drafter import ModelFreeSequence, TextContext
from draftwire.options.model_free.text_drafter import READ_AT_ONCE, Guess, TextDrafter
from draftwire.requests.session_parameters import SessionParameters

LEAST_MATCH = 8
"""Tokens that have to match before a guess takes over: then half of eight guessed tokens and more are accepted, as
docs/model-free.md has it."""


LEAST_READ_AHEAD = 2
"""Tokens that have to match before a guess is read beside the last token."""


class CascadeSequence:
    """The tokens of one session, as the model and as the text drafter has them."""

    def __init__(self, model: LanguageModelSequence, text: ModelFreeSequence) -> None:
        """Joins a session's sequences, which have the same committed tokens."""
        self.model, self.text = model, text
        self._last: tuple[DraftRequest, int, Guess] | None = None
        """The last guess, of which request, and after how many drawn tokens of its block."""

    @property
    def num_unread(self) -> int:
        """Committed tokens that the model has to read before the next draft."""
        return self.model.num_unread

    @property
    def num_reused(self) -> int:
        """Prompt tokens that were found in the model's cache."""
        return self.model.num_reused

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens after the first `base_len`."""
        self.model.calibrate(base_len, token_ids)
        self.text.calibrate(base_len, token_ids)
        self._last = None

    def close(self) -> None:
        """Frees what both hold."""
        self.model.close()
        self.text.close()

    def guess(
        self, request: DraftRequest, vocab_size: int, drafted: Sequence[int] = (), least_match: int = LEAST_MATCH
    ) -> list[int]:
        """Returns the rest of a block, or nothing if too few tokens match: by default, if no guess takes over."""
        if self.text.num_unread or len(drafted) >= request.num_tokens:
            return []
        if self._last is None or self._last[0] is not request or self._last[1] != len(drafted):
            self._last = request, len(drafted), self.text.guess(request, vocab_size, drafted)
        guess = self._last[2]
        return guess.token_ids if guess.match_len >= least_match else []


@dataclass(frozen=True, slots=True)
class TextBeside:
    """The `Continuation` of a block that the model draws."""

    sequence: CascadeSequence
    request: DraftRequest
    vocab_size: int

    def takes_over(self, drawn: list[int]) -> bool:
        """Whether a guess takes over."""
        return bool(self.sequence.guess(self.request, self.vocab_size, drawn))

    def may_follow(self, drawn: list[int]) -> list[int]:
        """Returns tokens that the model may draw next."""
        return self.sequence.guess(self.request, self.vocab_size, drawn, LEAST_READ_AHEAD)


class CascadeDrafter:
    """A language model and a text drafter, as one strategy."""

    def __init__(self, model: ContinuedDrafter, texts: TextDrafter) -> None:
        self.context_length = model.context_length
        self._model, self._texts = model, texts

    def open(self, token_ids: list[int], parameters: SessionParameters) -> CascadeSequence:
        """Opens a sequence whose committed tokens are `token_ids`, at least one."""
        text = ModelFreeSequence(self._texts, token_ids, parameters)
        return CascadeSequence(self._model.open(token_ids, parameters), text)

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts for a batch; the model reads the committed tokens of all."""
        guessed: dict[int, Draft] = {}
        inner: list[Drafting] = []
        for index, drafting in enumerate(draftings):
            sequence, request = cast(CascadeSequence, drafting.sequence), drafting.request
            sequence.text.read(READ_AT_ONCE)
            is_ready = drafting.max_read is None or sequence.num_unread <= drafting.max_read
            if request is not None and is_ready:
                token_ids = sequence.guess(request, self._vocab_size(request))
                if token_ids:
                    encoding = Encoding.ONE_HOT if request.needs_probs else Encoding.NONE
                    guessed[index] = Draft(token_ids, DraftDistributions(encoding, self._vocab_size(request)))
                    request = None
                else:
                    beside = TextBeside(sequence, request, self._vocab_size(request))
                    request = replace(request, continuation=beside)
            inner.append(Drafting(sequence.model, request, drafting.max_read))
        step = self._model.step(inner)
        drafts: list[Draft | DraftwireError | None] = []
        for index, (drafting, draft) in enumerate(zip(draftings, step.drafts, strict=True)):
            if index in guessed:
                cast(CascadeSequence, drafting.sequence).model.publish()  # as the model does where it drafts
            if isinstance(draft, Draft) and drafting.request is not None:
                draft = self._continued(cast(CascadeSequence, drafting.sequence), drafting.request, draft)
            drafts.append(guessed.get(index, draft))
        return replace(step, drafts=drafts)

    def _continued(self, sequence: CascadeSequence, request: DraftRequest, draft: Draft) -> Draft:
        token_ids = sequence.guess(request, draft.distributions.vocab_size, draft.token_ids)
        if not token_ids:
            return draft
        # Whole, even if it was cut: uncut, it would have ended at the same token, for this guess.
        return Draft([*draft.token_ids, *token_ids], with_certain(draft.distributions, token_ids))

    def _vocab_size(self, request: DraftRequest) -> int:
        return min(request.vocab_size, self._model.model.vocab_size)


def with_certain(distributions: DraftDistributions, token_ids: Sequence[int]) -> DraftDistributions:
    """Returns the distributions of a block with rows added behind, in each of which one token, below the vocabulary's
    size, is certain.
    """
    size = distributions.vocab_size
    match distributions.encoding:
        case Encoding.NONE | Encoding.ONE_HOT:
            return distributions
        case Encoding.SPARSE_UINT16:
            num_entries, num_added = sum(distributions.support_sizes), len(token_ids)
            ids_end = num_entries * id_width(size)
            low_end = ids_end + num_entries
            data = distributions.data
            added = np.array(token_ids, "<u4").view(np.uint8).reshape(-1, 4)[:, : id_width(size)].tobytes()
            whole = b"\xff" * num_added  # of weight TOTAL_WEIGHT, less one
            return DraftDistributions(
                distributions.encoding,
                size,
                data[:ids_end] + added + data[ids_end:low_end] + whole + data[low_end:] + whole,
                (*distributions.support_sizes, *[1] * num_added),
                (*distributions.wide_sizes, *[1] * num_added),
            )
    rows = np.zeros((len(token_ids), size), DENSE_FORMATS[distributions.encoding])
    rows[np.arange(len(token_ids)), token_ids] = 1.0
    return DraftDistributions(distributions.encoding, size, distributions.data + rows.tobytes())


def load(name: str, context: TextContext) -> LoadedStrategy:
    """Loads a language model with text drafters, which follow it in the name, as a strategy."""
    card, model = load_drafter(context, ContinuedDrafter)
    texts = name.removeprefix(MODEL + JOINT)
    strategy = CascadeDrafter(model, context.load_text_drafters(card).named(texts))
    described = replace(card.description, name=f"{card.description.name}{JOINT}{texts}")
    return LoadedStrategy(replace(card, description=described), strategy)
