"""Guesses from the longest suffix of a text that it had before.

A suffix automaton of the text grows with it: each token is added in constant amortized time, and at each time the
automaton knows the longest suffix that occurs at an earlier place.

Texts may also share what they generated: then a text goes on as another one did, if that matches more of its end.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; drafting by suffixes: Oliaro et
al. 2024, "SuffixDecoding" (arXiv 2411.04975), whose trees hold frequencies. Here it is the latest place.
"""

from collections.abc import Sequence

from draftwire.options.model_free.shared_texts import SharedTexts, TextFollower
from draftwire.options.model_free.suffix_index import SuffixIndex
from draftwire.options.model_free.text_drafter import NOTHING, Guess, continued


class SuffixText:
    """A text that is continued as the longest of its repeated suffixes was before."""

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        salt: str | None = None,
        *,
        least_match: int = 2,
        shared: SharedTexts | None = None,
    ) -> None:
        """Indexes a text, a `TextDrafter`.

        Args:
            token_ids: its first tokens.
            salt: of the texts that it shares with; None shares nothing.
            least_match: shorter matches are no ground for a guess, at least 1.
            shared: generated texts of others; None shares nothing.
        """
        self._index = SuffixIndex()
        self._least_match = least_match
        self._others = None if salt is None or shared is None else TextFollower(shared, salt)
        self.commit(token_ids)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._index.text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token in token_ids:
            self._index.append(token)
        if self._others is not None:
            self._others.commit(token_ids)

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns what followed the longest suffix that this text had before, or another one if that matches more."""
        index = self._index
        match_len, end = index.match_after(drafted) if drafted else (index.match_len, index.match_end)
        other = self._others.guess(num_tokens, drafted) if self._others is not None else NOTHING
        if max(match_len, other.match_len) < self._least_match:
            return NOTHING
        if other.match_len > match_len:
            return other
        return Guess(continued(index.text, end, num_tokens, drafted), match_len)

    def close(self, num_prompt_tokens: int) -> None:
        """Ends the text: what was generated after so many tokens is shared, if anything is."""
        if self._others is not None:
            self._others.close(self._index.text[num_prompt_tokens:])
