"""Drafters that guess tokens from tokens alone, by name: for drafters, and for verifiers that draft by themselves."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from draftwire.errors import InvalidRequestError
from draftwire.options.model_free.names import LOOKUP, RETRIEVAL, SUFFIX, parts_of
from draftwire.options.model_free.prompt_lookup import LookupText
from draftwire.options.model_free.retrieval import RetrievalText
from draftwire.options.model_free.retrieval_store import RetrievalStore
from draftwire.options.model_free.shared_texts import SharedTexts
from draftwire.options.model_free.suffix import SuffixText
from draftwire.options.model_free.text_drafter import NOTHING, Guess, TextDrafter

CERTAIN_MATCH = 16
"""Length of a match, in tokens, after which the drafters named later are not asked."""


class LongestMatchText:
    """A text that several follow."""

    def __init__(self, drafters: Sequence[TextDrafter], token_ids: Sequence[int] = (), salt: str | None = None) -> None:
        """Starts a text, a `TextDrafter` of at least one: those whose guesses are preferred come first."""
        self._texts = [start(token_ids, salt) for start in drafters]

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._texts[0].length

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for text in self._texts:
            text.commit(token_ids)

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns the guess of the longest match, of equal ones the first."""
        longest = NOTHING
        for text in self._texts:
            if longest.match_len >= CERTAIN_MATCH:
                break
            guess = text.guess(num_tokens, drafted)
            if guess.match_len > longest.match_len:
                longest = guess
        return longest

    def close(self, num_prompt_tokens: int) -> None:
        """Ends the text."""
        for text in self._texts:
            text.close(num_prompt_tokens)


class TextDrafters:
    """The text drafters of one process, with what their texts share."""

    def __init__(self, store: RetrievalStore | None = None, max_shared_tokens: int = 0) -> None:
        """Makes all that can be.

        Args:
            store: to retrieve from; None if there is none.
            max_shared_tokens: of the texts that "suffix" shares among sessions, see `SharedTexts`; 0 shares none.
        """
        shared = SharedTexts(max_shared_tokens) if max_shared_tokens else None
        self._by_name: dict[str, TextDrafter] = {SUFFIX: partial(SuffixText, shared=shared), LOOKUP: LookupText}
        if store is not None:
            self._by_name[RETRIEVAL] = partial(RetrievalText, store)

    @classmethod
    def load(cls, retrieval_store: Path | None, max_shared_tokens: int, fingerprint: bytes) -> "TextDrafters":
        """Opens a store, if there is one.

        Raises:
            InvalidRequestError: the store cannot be opened, or is of another vocabulary.
        """
        store = None if retrieval_store is None else RetrievalStore.open(retrieval_store, fingerprint)
        return cls(store, max_shared_tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of those that there are."""
        return tuple(self._by_name)

    def named(self, name: str) -> TextDrafter:
        """Returns a text drafter, or of several joined names that of the longest match.

        Raises:
            InvalidRequestError: there is none of such a name here.
        """
        parts = parts_of(name)
        for part in parts:
            if part == RETRIEVAL and part not in self._by_name:
                raise InvalidRequestError("retrieval needs a store: set retrieval_store")
            if part not in self._by_name:
                raise InvalidRequestError(f"nothing drafts by the name {part!r}; known: {', '.join(self.names)}")
        if len(parts) == 1:
            return self._by_name[name]
        return partial(LongestMatchText, [self._by_name[part] for part in parts])
