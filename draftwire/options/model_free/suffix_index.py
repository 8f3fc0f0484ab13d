"""Suffix automaton of a growing text, and the longest suffix of another text in it.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; matching statistics of another
text: Chang and Lawler 1994, "Sublinear approximate string matching and biological applications".
"""

from array import array
from collections.abc import Iterable

NO_STATE = -1


class SuffixIndex:
    """Suffix automaton of a growing text. A state stands for all substrings that end at the same places.

    It takes some 500 bytes for each token.
    """

    def __init__(self) -> None:
        self.text = array("l")
        self.match_len = 0
        """Length of the longest suffix that ends at an earlier place too."""
        self.match_end = 0
        """Place after it there: of the latest one that is known."""
        self._next: list[dict[int, int]] = [{}]
        """States with one more token of each state's substrings, by state."""
        self._link = array("l", [NO_STATE])
        """State of the longest of each state's suffixes that ends at more places, by state."""
        self._longest = array("l", [0])
        """Length of the longest substring, by state."""
        self._end = array("l", [0])
        """Place after the state's substrings, by state."""
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

    def match_after(self, token_ids: Iterable[int]) -> tuple[int, int]:
        """Returns the length of the longest suffix of the text and further tokens that the text has, and a place after
        it there. Nothing is added.
        """
        state, length = self.longest_match(max(0, self._link[self._last]), self.match_len, token_ids)
        return length, self._end[state]

    def end_of(self, state: int) -> int:
        """Returns a place after the substrings of a state: the latest one that is known."""
        return self._end[state]

    def longest_match(self, state: int, length: int, token_ids: Iterable[int]) -> tuple[int, int]:
        """Returns state and length of the longest suffix of a text and further tokens that this text has.

        Args:
            state: of the longest suffix before, when it was found; 0 for an empty one.
            length: of it.
            token_ids: the next ones.
        """
        link, longest = self._link, self._longest
        for token in token_ids:
            while state and length <= longest[link[state]]:  # the state was split since
                state = link[state]
            while state and token not in self._next[state]:
                state = link[state]
                length = longest[state]
            following = self._next[state].get(token)
            state, length = (0, 0) if following is None else (following, length + 1)
        return state, length

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


class SuffixMatch:
    """Longest suffix of some text that an index has. The index may grow meanwhile."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._state = 0
        self.length = 0
        """Length of the suffix, tokens."""

    def after(self, token_ids: Iterable[int]) -> tuple[int, int]:
        """Returns the length of the suffix with further tokens, and a place after it. Nothing is added."""
        state, length = self._index.longest_match(self._state, self.length, token_ids)
        return length, self._index.end_of(state)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens to the text, each in constant amortized time."""
        self._state, self.length = self._index.longest_match(self._state, self.length, token_ids)
