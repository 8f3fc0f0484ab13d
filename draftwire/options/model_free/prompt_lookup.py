"""Guesses from the latest place at which a text had its last few tokens before.

Source: Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding); vLLM's method "ngram".
"""

from array import array
from collections.abc import Sequence

from draftwire.options.model_free.text_drafter import NOTHING, FollowedText, Guess, continued


class LookupText(FollowedText):
    """A text, with the latest place after each run of a few tokens."""

    def __init__(
        self, token_ids: Sequence[int] = (), salt: str | None = None, *, least_match: int = 2, most_match: int = 4
    ) -> None:
        """Indexes a text, a `TextDrafter`. At least `least_match` tokens have to match, from 1, and at most
        `most_match` are compared.
        """
        self._text = array("l")
        self._lengths = range(least_match, most_match + 1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._match_len = self._match_end = 0
        self.commit(token_ids)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token in token_ids:
            self._text.append(token)
            self._match_len = 0
            for length in self._lengths:
                if length > len(self._text):
                    break
                run = tuple(self._text[-length:])
                end = self._ends.get(run)
                if end is not None:
                    self._match_len, self._match_end = length, end
                self._ends[run] = len(self._text)

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns what followed the longest run that the text had before."""
        match_len, match_end = self._match_after(drafted) if drafted else (self._match_len, self._match_end)
        if not match_len:
            return NOTHING
        return Guess(continued(self._text, match_end, num_tokens, drafted), match_len)

    def _match_after(self, drafted: Sequence[int]) -> tuple[int, int]:
        most = self._lengths[-1]
        last = (*self._text[-most:], *drafted)
        for length in reversed(self._lengths):
            end = self._ends.get(last[-length:]) if length <= len(last) else None
            if end is not None:
                return length, end
        return 0, 0
