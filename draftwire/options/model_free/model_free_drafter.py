"""Drafts with what guesses tokens from tokens alone, as a strategy of a drafter."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from draftwire.drafting.strategies import LoadedStrategy, StrategyContext
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding
from draftwire.models.card import ModelCard
from draftwire.options.model_free.possible import following, possible
from draftwire.options.model_free.registry import TextDrafters
from draftwire.options.model_free.text_drafter import FollowedText, Guess, TextDrafter
from draftwire.requests.session_parameters import SessionParameters


class ModelFreeSequence:
    """The text of one session."""

    num_reused = 0

    def __init__(self, drafter: TextDrafter, token_ids: list[int], parameters: SessionParameters) -> None:
        """Starts with all tokens unread."""
        self._drafter, self._salt = drafter, parameters.cache_salt if parameters.shares_text else None
        self.token_ids = list(token_ids)
        """The committed tokens."""
        self.text: FollowedText = drafter(salt=self._salt)
        """Those of them that were read."""
        self.prompt_len: int | None = None
        """Number of the first of them, which are the prompt; None before the first draft."""

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft."""
        return len(self.token_ids) - self.text.length

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens after the first `base_len`. Only committed tokens are ever read."""
        known = self.token_ids[base_len:]
        if known != token_ids[: len(known)] and base_len < self.text.length:  # never by a gateway's calibrations
            self.text = self._drafter(salt=self._salt)
        self.token_ids[base_len:] = token_ids

    def read(self, limit: int | None) -> int:
        """Reads committed tokens, at most `limit`; returns how many."""
        start = self.text.length
        unread = self.token_ids[start:] if limit is None else self.token_ids[start : start + limit]
        self.text.commit(unread)
        return len(unread)

    def guess(self, request: DraftRequest, vocab_size: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns what a request allows of a guess, once all committed tokens were read.

        Args:
            request: for a block.
            vocab_size: above every id.
            drafted: tokens of the block before the guess.
        """
        self.prompt_len = request.prompt_len
        guess = self.text.guess(request.num_tokens - len(drafted), drafted)
        token_ids = possible(
            guess.token_ids,
            len(self.token_ids) - request.prompt_len + len(drafted),
            request.sampling,
            request.stop_token_ids,
            vocab_size,
        )
        if request.automaton is not None and token_ids:
            generated = [*self.token_ids[request.prompt_len :], *drafted]
            token_ids = following(token_ids, generated, request.automaton)
        return Guess(token_ids, guess.match_len)

    def close(self) -> None:
        """Ends the text."""
        if self.prompt_len is not None:
            self.text.close(self.prompt_len)


class ModelFreeDrafter:
    """A drafting strategy without a model. A draft is one-hot: it depends on committed tokens only, and is no draw."""

    def __init__(self, drafter: TextDrafter, vocab_size: int, context_length: int) -> None:
        """Wraps what guesses. Guesses are of ids below `vocab_size`, the tokenizer's."""
        self.context_length = context_length
        self._drafter, self._vocab_size = drafter, vocab_size

    def open(self, token_ids: list[int], parameters: SessionParameters) -> ModelFreeSequence:
        """Opens a sequence whose committed tokens are `token_ids`."""
        return ModelFreeSequence(self._drafter, token_ids, parameters)

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Reads, and guesses for each sequence that has read its tokens."""
        started = time.perf_counter()
        num_read = 0
        for drafting in draftings:
            num_read += cast(ModelFreeSequence, drafting.sequence).read(drafting.max_read)
        read = time.perf_counter()
        drafts: list[Draft | DraftwireError | None] = []
        for drafting in draftings:
            sequence = cast(ModelFreeSequence, drafting.sequence)
            request = None if sequence.num_unread else drafting.request
            drafts.append(None if request is None else self._draft(sequence, request))
        return DraftStep(drafts, num_read, read - started, time.perf_counter() - read)

    def _draft(self, sequence: ModelFreeSequence, request: DraftRequest) -> Draft:
        vocab_size = min(request.vocab_size, self._vocab_size)
        guessed = sequence.guess(request, vocab_size).token_ids
        # A block has at least one token. Nothing is known of the next one: the last one again is as good as any.
        token_ids = guessed or [min(sequence.token_ids[-1], vocab_size - 1)]
        encoding = Encoding.ONE_HOT if request.needs_probs else Encoding.NONE
        return Draft(token_ids, DraftDistributions(encoding, vocab_size))


class TextContext(StrategyContext, Protocol):
    """Configuration of strategies that guess from texts."""

    def load_text_drafters(self, card: ModelCard) -> TextDrafters:
        """Returns what drafts without a model, for texts of a vocabulary.

        Raises:
            InvalidRequestError: the store to retrieve from cannot be used.
        """


def load(name: str, context: TextContext) -> LoadedStrategy:
    """Loads text drafters, joined in their name, as a strategy."""
    context.require_no_weights(f"strategy {name}")
    card = context.limited(context.load_card())
    described = replace(card.description, name=name)
    texts = context.load_text_drafters(card).named(name)
    strategy = ModelFreeDrafter(texts, described.vocab_size, described.context_length)
    return LoadedStrategy(replace(card, description=described), strategy)
