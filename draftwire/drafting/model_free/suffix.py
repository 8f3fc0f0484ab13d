"""Guesses from the longest suffix of a text that it had before.

A suffix automaton of the text grows with it: each token is added in constant amortized time, and at each time the
automaton knows the longest suffix that occurs at an earlier place.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; drafting by suffixes: Oliaro et
al. 2024, "SuffixDecoding" (arXiv 2411.04975), whose trees hold many texts, with frequencies. Here it is one text, and
the latest place.
"""

from array import array
from collections.abc import Sequence

from draftwire.drafting.model_free.text_drafter import Guess, continued

NO_STATE = -1


class SuffixIndex:
    """Suffix automaton of a growing text. A state stands for all substrings that end at the same places.

    It takes some 500 bytes for each token.
    """

    def __init__(self) -> None:
        """Indexes an empty text."""
        self.text = array("l")
        self.match_len = 0
        """Length of the longest suffix that ends at an earlier place too."""
        self.match_end = 0
        """Place after it there: of the latest one that is known."""
        self._next: list[dict[int, int]] = [{}]
        """By state: the state of its substrings with one more token."""
        self._link = array("l", [NO_STATE])
        """By state: the state of the longest of its suffixes that ends at more places."""
        self._longest = array("l", [0])
        """By state: length of its longest substring."""
        self._end = array("l", [0])
        """By state: a place after it."""
        self._last = 0

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        self.text.append(token)
        state, before = self._add({}, self._longest[self._last] + 1, len(self.text)), self._last
        self._last = state
        while before != NO_STATE and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        suffix = 0 if before == NO_STATE else self._exactly(before, token)
        self._link[state] = suffix
        self.match_len, self.match_end = self._longest[suffix], self._end[suffix]
        self._end[suffix] = len(self.text)

    def _exactly(self, before: int, token: int) -> int:
        """Returns the state whose longest substring is that of `before` and a token; splits one with longer ones."""
        after = self._next[before][token]
        length = self._longest[before] + 1
        if self._longest[after] == length:
            return after
        split = self._add(dict(self._next[after]), length, self._end[after])
        self._link[split] = self._link[after]
        self._link[after] = split
        while before != NO_STATE and self._next[before].get(token) == after:
            self._next[before][token] = split
            before = self._link[before]
        return split

    def _add(self, following: dict[int, int], longest: int, end: int) -> int:
        self._next.append(following)
        self._link.append(NO_STATE)
        self._longest.append(longest)
        self._end.append(end)
        return len(self._next) - 1


class SuffixText:
    """A text that is continued as the longest of its repeated suffixes was before."""

    def __init__(self, token_ids: Sequence[int], least_match: int) -> None:
        """Indexes a text.

        Args:
            token_ids: its first tokens.
            least_match: shorter matches are no ground for a guess, at least 1.
        """
        self._index = SuffixIndex()
        self._least_match = least_match
        self.commit(token_ids)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._index.text)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token in token_ids:
            self._index.append(token)

    def guess(self, num_tokens: int) -> Guess:
        """Returns what followed the longest suffix that the text had before."""
        index = self._index
        if index.match_len < self._least_match:
            return Guess([], 0)
        return Guess(continued(index.text, index.match_end, num_tokens), index.match_len)


class SuffixDrafter:
    """Guesses from suffixes of each text by itself."""

    def __init__(self, least_match: int = 2) -> None:
        """Takes the least number of tokens that have to match, at least 1."""
        self._least_match = least_match

    def open(self, token_ids: Sequence[int], salt: str = "") -> SuffixText:
        """Starts a text."""
        return SuffixText(token_ids, self._least_match)
