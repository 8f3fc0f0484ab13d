"""How given files go on after a few tokens: a suffix array over their tokens, on disk, memory-mapped.

A store is a folder of three files. `tokens.bin` has the tokens of all documents in turn, each document followed by a
separator, whose id is the size of the vocabulary. `suffixes.bin` has every place in it, in the order of the tokens from
there on. `index.json` says what they are. Tokens are big-endian, so that they compare as their bytes do.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252). Built by
`draftwire.options.model_free.store_building`.
"""

import json
import mmap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from draftwire.errors import InvalidRequestError

FORMAT_VERSION = 1
"""Version of stores. Incremented with every change that an older release would misread."""
INDEX, TOKENS, SUFFIXES = "index.json", "tokens.bin", "suffixes.bin"
"""Files of a store."""
DEPTH = 32
"""Tokens up to which suffixes are sorted. Those that are equal so far are in any order."""
MAX_MATCH = 16
"""Most tokens of a context that are compared."""
MAX_SAMPLED = 64
"""Most occurrences that a continuation is read from."""


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """Contents of a store's files."""

    format_version: int
    vocabulary_fingerprint: str
    """Fingerprint of the tokenizer, hexadecimal; see `draftwire.models.description.fingerprint`."""
    vocab_size: int
    """Ids of tokens are below it, and that of the separator is this."""
    num_tokens: int
    """Separators included."""
    depth: int
    """`DEPTH` when it was built."""
    token_dtype: str
    """numpy's name of it."""
    suffix_dtype: str

    @classmethod
    def read(cls, folder: Path) -> "StoreIndex":
        """Reads the index of a store.

        Raises:
            InvalidRequestError: there is no store, or one of a later format.
        """
        path = folder / INDEX
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InvalidRequestError(f"no retrieval store at {folder}: it has no {INDEX}") from error
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"{path} cannot be read: {error}") from error
        version = fields.get("format_version") if isinstance(fields, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise InvalidRequestError(
                f"the retrieval store at {folder} has format {version}; this release reads up to {FORMAT_VERSION}"
            )
        try:
            index = cls(**fields)
        except TypeError as error:
            raise InvalidRequestError(f"{path} is not the index of a retrieval store") from error
        token_dtypes, suffix_dtypes = (">u2", ">u4"), (np.dtype(np.uint32).str, np.dtype(np.uint64).str)
        if index.token_dtype not in token_dtypes or index.suffix_dtype not in suffix_dtypes:
            raise InvalidRequestError(f"{path} names types that this machine does not read; build the store anew")
        return index

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens and suffixes."""
        return self.num_tokens * (np.dtype(self.token_dtype).itemsize + np.dtype(self.suffix_dtype).itemsize)


@dataclass(frozen=True, slots=True)
class StoreMatch:
    """A match of the end of a context in a store."""

    start: int
    stop: int
    """The suffixes from `start` to before `stop` of the suffix array begin with it."""
    match_len: int
    """Tokens of the context that match; 0 if not even the last one is there."""


class RetrievalStore:
    """A store that is open. Takes memory only as the system caches its files, which services of a machine share.

    Never changes, so any thread may use it. A look-up that has to read from disk takes milliseconds, else some ten
    microseconds.
    """

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        """Maps the files of a store; see `open`."""
        self.index = index
        token_dtype = np.dtype(index.token_dtype)
        self._width = token_dtype.itemsize
        self._bytes = _mapped(folder / TOKENS, index.num_tokens * self._width)
        self._tokens = np.frombuffer(self._bytes, token_dtype)
        suffixes = _mapped(folder / SUFFIXES, index.num_tokens * np.dtype(index.suffix_dtype).itemsize)
        self._suffixes = np.frombuffer(suffixes, index.suffix_dtype)
        self._places: memoryview[int] = self._suffixes.data  # its items are ints, with which Python is faster

    @classmethod
    def open(cls, folder: Path, vocabulary_fingerprint: bytes) -> "RetrievalStore":
        """Opens a store. It stays usable if its folder is replaced or removed.

        Raises:
            InvalidRequestError: there is no store, or it is incomplete, of a later format, or of another tokenizer.
        """
        index = StoreIndex.read(folder)
        theirs, ours = index.vocabulary_fingerprint, vocabulary_fingerprint.hex()
        if theirs != ours:
            raise InvalidRequestError(
                f"the retrieval store at {folder} was built with another tokenizer: its vocabulary has the fingerprint "
                f"{theirs[:12]}, the target's has {ours[:12]}; build it anew with --tokenizer TARGET"
            )
        return cls(folder, index)

    def find(self, context: Sequence[int]) -> StoreMatch:
        """Returns the longest suffix of a context that is in the store, of at most `MAX_MATCH` tokens.

        What a store has, it has every suffix of, so that lengths can be bisected, and the suffix array for each.
        """
        usable = takewhile(lambda token: 0 <= token < self.index.vocab_size, reversed(context[-MAX_MATCH:]))
        ids = [token.to_bytes(self._width, "big") for token in usable]
        pattern = b"".join(reversed(ids))
        start, match_len, longest = 0, 0, len(ids)
        while match_len < longest:
            length = (match_len + longest + 1) // 2
            sought = pattern[-length * self._width :]
            place = self._bisect(bisect_left, sought)
            if place < len(self._places) and self._tokens_at(self._places[place], len(sought)) == sought:
                start, match_len = place, length
            else:
                longest = length - 1
        stop = self._bisect(bisect_right, pattern[-match_len * self._width :], start) if match_len else 0
        return StoreMatch(start, stop, match_len)

    def continuation(self, match: StoreMatch, num_tokens: int) -> list[int]:
        """Returns the likeliest tokens after a match, one by one: the most frequent next one, then the one that is most
        frequent after it, and so on. Of equally frequent ones the lowest is taken.

        Args:
            match: of `find`. If it has more than `MAX_SAMPLED` occurrences, so many are read, evenly spaced in the
                order of what follows them.
            num_tokens: how many tokens to return at most; fewer where most of the documents end.
        """
        count = match.stop - match.start
        sampled = min(count, MAX_SAMPLED)
        if not sampled:
            return []
        middles = match.start + (2 * np.arange(sampled) + 1) * count // (2 * sampled)
        places = self._suffixes[middles].astype(np.int64) + match.match_len
        within = np.minimum(places[:, None] + np.arange(num_tokens), self.index.num_tokens - 1)
        rows: list[list[int]] = self._tokens[within].tolist()
        path: list[int] = []
        for index in range(num_tokens):
            (token, votes), *_ = Counter(row[index] for row in rows).most_common(1)
            if token == self.index.vocab_size:
                break
            path.append(token)
            if votes < len(rows):
                rows = [row for row in rows if row[index] == token]
        return path

    def _bisect(self, bisect: Callable[..., int], sought: bytes, start: int = 0) -> int:
        """Returns where tokens belong among the suffixes, of which as many are compared."""
        tokens, width, length = self._bytes, self._width, len(sought)
        return bisect(self._places, sought, start, key=lambda place: tokens[place * width : place * width + length])

    def _tokens_at(self, place: int, num_bytes: int) -> bytes:
        return self._bytes[place * self._width : place * self._width + num_bytes]


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    """Maps a file to read it, which the system is asked to begin with.

    Raises:
        InvalidRequestError: the file has another size, or cannot be read.
    """
    try:
        found = path.stat().st_size if path.exists() else 0
        if found != num_bytes or not found:
            raise InvalidRequestError(f"{path} was cut short: {num_bytes:,} bytes expected, {found:,} found")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    mapped.madvise(mmap.MADV_WILLNEED)  # else the first look-ups wait for the disk, at a hundred places each
    return mapped
