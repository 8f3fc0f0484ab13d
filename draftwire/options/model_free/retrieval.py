"""Guesses from files: what follows the end of a text in a `RetrievalStore`.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252), which verifies a tree of what
followed. Here it is one path of it, the likeliest.
"""

from collections import deque
from collections.abc import Sequence

from draftwire.options.model_free.retrieval_store import MAX_MATCH, RetrievalStore
from draftwire.options.model_free.text_drafter import NOTHING, FollowedText, Guess


class RetrievalText(FollowedText):
    """A text that is continued as the files of a store go on. Only its last `MAX_MATCH` tokens are kept. All texts read
    the store, and none changes it: nothing of one shows in another's guesses.

    They are looked up when a guess is asked for and not before: a guess depends on nothing else, and a prompt costs one
    look-up.
    """

    def __init__(
        self, store: RetrievalStore, token_ids: Sequence[int] = (), salt: str | None = None, *, least_match: int = 2
    ) -> None:
        """Starts a text, a `TextDrafter` of a store of the target's tokens, which is the same for every salt. At least
        `least_match` tokens have to match, from 1.
        """
        self._store = store
        self._least_match = least_match
        self._last_tokens: deque[int] = deque(maxlen=MAX_MATCH)
        self._length = 0
        self.commit(token_ids)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        self._length += len(token_ids)
        self._last_tokens.extend(token_ids[-MAX_MATCH:])

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns how most of the places go on that the text's end is at."""
        match = self._store.find([*self._last_tokens, *drafted])
        if match.match_len < self._least_match:
            return NOTHING
        token_ids = self._store.continuation(match, num_tokens)
        return Guess(token_ids, match.match_len) if token_ids else NOTHING
