"""The guess of several drafters that matches most of a text."""

from collections.abc import Sequence

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
