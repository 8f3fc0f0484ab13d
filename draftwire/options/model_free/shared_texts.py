"""Generated texts that later texts may go on like: by salt, so that nobody's guesses reveal another's texts.

Source: the global trees of Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import takewhile

from draftwire.options.model_free.suffix_index import SuffixIndex, SuffixMatch
from draftwire.options.model_free.text_drafter import NOTHING, Guess

SEPARATOR = -1
"""Separator of texts: the id of no token."""
COMPARED_TOKENS = 32
"""Tokens of a text's end that are compared where it is looked up anew."""
INDEXED_AT_ONCE = 16
"""Tokens of ended texts that each guess adds to an index: more than a round commits, so none wait for long."""


class SaltedTexts:
    """Texts of one salt. The older half is forgotten at once, since an index cannot forget single ones."""

    def __init__(self) -> None:
        self.indexes: tuple[SuffixIndex, ...] = (SuffixIndex(),)
        """The one that grows, then the full one if there is one."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all indexes."""
        return sum(len(index.text) for index in self.indexes)

    def append(self, token: int, most: int) -> int:
        """Adds a token, and forgets what is older than so many of them; returns how many more there are."""
        before = self.num_tokens
        if 2 * len(self.indexes[0].text) >= most:
            self.indexes = (SuffixIndex(), self.indexes[0])
        self.indexes[0].append(token)
        return self.num_tokens - before


class SharedTexts:
    """Texts by salt. Of salts, those are forgotten that were used longest ago."""

    def __init__(self, max_tokens: int) -> None:
        """Knows no text, and will keep so many tokens of all together, at least 2; each takes some 500 bytes."""
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, SaltedTexts] = OrderedDict()
        self._waiting: deque[tuple[str, deque[int]]] = deque()
        self._num_waiting = 0
        self.num_tokens = 0
        """Tokens that are kept, of all salts."""

    def of(self, salt: str) -> SaltedTexts | None:
        """Returns the texts of a salt, which counts as use; None without any. Adds some of those that wait."""
        self._index_some()
        texts = self._by_salt.get(salt)
        if texts is not None:
            self._by_salt.move_to_end(salt)
        return texts

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Adds a text that has ended, little by little."""
        if not token_ids or self._num_waiting + len(token_ids) >= self._max_tokens:
            return
        self._waiting.append((salt, deque([SEPARATOR, *token_ids])))
        self._num_waiting += 1 + len(token_ids)

    def _index_some(self) -> None:
        for _ in range(min(INDEXED_AT_ONCE, self._num_waiting)):
            salt, token_ids = self._waiting[0]
            texts = self._by_salt.get(salt)
            if texts is None:
                texts = self._by_salt[salt] = SaltedTexts()
            self.num_tokens += texts.append(token_ids.popleft(), self._max_tokens)
            self._num_waiting -= 1
            if not token_ids:
                self._waiting.popleft()
        while len(self._by_salt) > 1 and self.num_tokens > self._max_tokens:
            _, forgotten = self._by_salt.popitem(last=False)
            self.num_tokens -= forgotten.num_tokens


class TextFollower:
    """One text, looked up in those of its salt that have ended."""

    def __init__(self, shared: SharedTexts, salt: str) -> None:
        """Follows a new text that shares with those of its salt."""
        self._shared, self._salt = shared, salt
        self._end: deque[int] = deque(maxlen=COMPARED_TOKENS)
        self._indexes: tuple[SuffixIndex, ...] = ()
        self._matches: tuple[SuffixMatch, ...] = ()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the text."""
        self._end.extend(token_ids)
        for match in self._matches:
            match.extend(token_ids)

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns what followed the longest suffix of the text in another one; none if nothing did."""
        texts = self._shared.of(self._salt)
        if texts is None:
            self._indexes, self._matches = (), ()
            return NOTHING
        if self._indexes is not texts.indexes:
            self._indexes = texts.indexes
            self._matches = tuple(map(SuffixMatch, texts.indexes))
            for match in self._matches:
                match.extend(self._end)
        matches = [match.after(drafted) for match in self._matches]
        longest = max(range(len(matches)), key=lambda index: matches[index][0])
        match_len, end = matches[longest]
        following = self._indexes[longest].text[end : end + num_tokens]
        token_ids = list(takewhile(lambda token: token != SEPARATOR, following))
        return Guess(token_ids, match_len) if match_len and token_ids else NOTHING

    def close(self, generated_ids: Sequence[int]) -> None:
        """Ends the text, whose generated tokens others may now read."""
        self._shared.add(self._salt, generated_ids)
