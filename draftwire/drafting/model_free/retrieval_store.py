"""How given files go on after a few tokens: a suffix array over their tokens, on disk, memory-mapped.

A store is a folder of three files. `tokens.bin` has the tokens of all documents in turn, each document followed by a
separator, whose id is the size of the vocabulary. `suffixes.bin` has every place in it, in the order of the tokens from
there on. `index.json` says what they are. Tokens are big-endian, so that they compare as their bytes do.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252); suffix arrays: Manber and Myers
1993, "Suffix arrays: a new method for on-line string searches"; prefix doubling of what is still equal, in place:
Larsson and Sadakane 2007, "Faster suffix sorting".
"""

import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT_VERSION = 1
"""Of stores. Incremented with every change that an older release would misread."""
INDEX, TOKENS, SUFFIXES = "index.json", "tokens.bin", "suffixes.bin"
"""Files of a store."""
DEPTH = 32
"""Tokens up to which suffixes are sorted. Those that are equal so far are in any order."""
MAX_MATCH = 16
"""Most tokens of a context that are compared."""
MAX_SAMPLED = 64
"""Most occurrences that a continuation is read from."""

PIECE_CHARACTERS = 2**16
"""Texts are tokenised in pieces of this length, and up to as much again to the end of the line."""
BATCH_CHARACTERS = 2**20
"""Of the pieces that are tokenised together."""
SORTED_TOGETHER = 2**20
"""Suffixes that are sorted at a time, and more only if so many begin alike."""


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What the files of a store are."""

    format_version: int
    vocabulary_fingerprint: str
    """Of the tokenizer, hexadecimal; see `draftwire.models.description.fingerprint`."""
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
    """Where a store has the end of a context."""

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

        Args:
            folder: what `build_store` made.
            vocabulary_fingerprint: of the target's tokenizer, which the store has to be built with.

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


def build_store(
    folder: Path,
    tokens: Iterable[NDArray[np.integer[Any]]],
    vocabulary_fingerprint: bytes,
    vocab_size: int,
    *,
    replace: bool = False,
    on_round: Callable[[int, int], None] | None = None,
) -> StoreIndex:
    """Builds a store beside its folder, and renames it when it is complete: one that was interrupted cannot be opened.

    Takes 18 bytes of memory for each token at its peak, or 11 and 70 more for each of those that are sorted together:
    `SORTED_TOGETHER`, or all that begin with the most frequent token if they are more. On disk it takes 6 bytes for
    each; 8 if the vocabulary has 65,536 entries or more, since the separator needs an id too; and 4 more from 4 billion
    tokens on.

    Args:
        folder: of the store. Empty, or not there.
        tokens: arrays `[num_tokens]` of ids, of any lengths; `vocab_size` follows each document. See `read_tokens`.
        vocabulary_fingerprint: of the tokenizer.
        vocab_size: above every id.
        replace: whether the folder may hold a store, which goes away. Who has that open may use it on.
        on_round: called with the rounds of sorting that are done, and how many there are.

    Raises:
        InvalidRequestError: the folder has other contents, there are no tokens, or one is beyond the vocabulary.
        OSError: the store cannot be written.
    """
    prepare_folder(folder, replace)
    folder = folder.resolve()
    token_dtype = np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)
    stored_dtype = token_dtype.newbyteorder(">")
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / "store"
        made.mkdir()  # with the permissions of a folder, which the temporary one has not
        num_tokens = _write_tokens(made / TOKENS, tokens, vocab_size, stored_dtype)
        if not num_tokens:
            raise InvalidRequestError("a retrieval store needs tokens, and the texts have none")
        native = np.fromfile(made / TOKENS, stored_dtype).astype(token_dtype)
        suffixes = sort_suffixes(native, vocab_size + 1, on_round=on_round)
        with (made / SUFFIXES).open("wb") as file:
            file.write(suffixes.data)
        index = StoreIndex(
            format_version=FORMAT_VERSION,
            vocabulary_fingerprint=vocabulary_fingerprint.hex(),
            vocab_size=vocab_size,
            num_tokens=num_tokens,
            depth=DEPTH,
            token_dtype=stored_dtype.str,
            suffix_dtype=suffixes.dtype.str,
        )
        (made / INDEX).write_text(json.dumps(asdict(index), indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(temporary) / "replaced")
        made.rename(folder)
    return index


def prepare_folder(folder: Path, replace: bool) -> None:
    """Checks that a store can be built in a folder, before minutes are spent on it, and makes the folders above it.

    Raises:
        InvalidRequestError: it cannot be written, or has other contents than a store that may be replaced.
    """
    try:
        folder.resolve().parent.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be written to: {error.strerror}") from error
    if folder.is_mount() or not os.access(folder.resolve().parent, os.W_OK):
        raise InvalidRequestError(f"{folder} cannot be written to: a store needs a folder that can be renamed")
    if names and not names <= {INDEX, TOKENS, SUFFIXES}:
        raise InvalidRequestError(f"{folder} is not empty, and is not a retrieval store")
    if names and not replace:
        raise InvalidRequestError(f"{folder} holds a retrieval store already; pass --force to replace it")


def _write_tokens(
    path: Path, tokens: Iterable[NDArray[np.integer[Any]]], separator: int, dtype: "np.dtype[Any]"
) -> int:
    """Writes tokens and a last separator, and returns how many there are; 0 if there are only separators."""
    num_tokens = num_separators = 0
    with path.open("wb") as file:
        for ids in chain(tokens, [np.array([separator], dtype)]):
            if len(ids) and ids.max() > separator:
                raise InvalidRequestError(f"token {ids.max()} is beyond the vocabulary, which has {separator} entries")
            file.write(ids.astype(dtype).data)
            num_tokens += len(ids)
            num_separators += int(np.count_nonzero(ids == separator))
    return num_tokens if num_tokens > num_separators else 0


def sort_suffixes(
    tokens: NDArray[np.integer[Any]],
    num_ids: int,
    sorted_together: int = SORTED_TOGETHER,
    on_round: Callable[[int, int], None] | None = None,
) -> NDArray[np.unsignedinteger[Any]]:
    """Returns the places of tokens in the order of the next `DEPTH` tokens from there on, `[num_tokens]` uint32, or
    uint64 for more than 4 billion. What ends earlier comes first.

    Suffixes of the same first 2^k tokens form a group, which is sorted by the ranks of what follows these tokens: so
    each round doubles the depth. A group of one is in its final place, and is not looked at again.

    Args:
        tokens: ids `[num_tokens]`.
        num_ids: above every id.
        sorted_together: suffixes that are sorted at a time, and more only where a group is larger.
        on_round: called with the rounds that are done, and how many there are.
    """
    num_tokens = len(tokens)
    dtype: type[np.unsignedinteger[Any]] = np.uint32 if num_tokens < 2**32 - 1 else np.uint64
    suffixes = np.argsort(tokens, kind="stable" if tokens.itemsize == 2 else None).astype(dtype)
    counts = np.bincount(tokens, minlength=num_ids)
    first_slots = np.cumsum(counts) - counts
    starts = np.zeros(num_tokens + 1, np.bool_)
    starts[first_slots[counts > 0]] = True
    starts[num_tokens] = True
    ranks = np.zeros(num_tokens + DEPTH, dtype)  # 0 is beyond the end
    ranks[:num_tokens] = (first_slots + 1).astype(dtype)[tokens]
    num_rounds, length, is_sorted = DEPTH.bit_length() - 1, 1, False
    for done in range(1, num_rounds + 1):
        if not is_sorted:
            is_sorted = _sort_groups(suffixes, ranks, starts, length, sorted_together)
        length *= 2
        if on_round is not None:
            on_round(done, num_rounds)
    return suffixes


def _sort_groups(
    suffixes: NDArray[np.unsignedinteger[Any]],
    ranks: NDArray[np.unsignedinteger[Any]],
    starts: NDArray[np.bool_],
    length: int,
    sorted_together: int,
) -> bool:
    """Sorts each group by what follows its first `length` tokens, in place, and returns whether none had two members.

    Ranks of groups that were sorted in this round already are finer than others. They are in the same order, so that
    what is sorted by them is right, and only deeper than it has to be.

    Args:
        suffixes: places by slot, `[num_tokens]`.
        ranks: by place, the first slot of its group and 1; zeros beyond the end. `[num_tokens + DEPTH]`.
        starts: by slot, whether a group begins there, and True beyond the end. `[num_tokens + 1]`.
        length: tokens that the members of a group begin with alike.
        sorted_together: suffixes that are sorted at a time.
    """
    num_tokens, begin, is_sorted = len(suffixes), 0, True
    rank_bits = num_tokens.bit_length()
    while begin < num_tokens:
        end = min(begin + sorted_together, num_tokens)
        end += int(starts[end:].argmax())
        slots = begin + np.flatnonzero(~(starts[begin:end] & starts[begin + 1 : end + 1]))
        begin = end
        if not len(slots):
            continue
        is_sorted = False
        places = suffixes[slots]
        keys = np.cumsum(starts[slots]) << rank_bits | ranks[places + length].astype(np.int64)
        order = np.argsort(keys)
        keys, places = keys[order], places[order]
        suffixes[slots] = places
        begins = np.concatenate(([True], keys[1:] != keys[:-1]))
        starts[slots[begins]] = True
        ranks[places] = slots[begins][np.cumsum(begins) - 1] + 1
    return is_sorted


def check_files(files: Sequence[Path]) -> int:
    """Returns the bytes of files, all of which it reads: that takes a hundredth of the time of tokenising them.

    Raises:
        InvalidRequestError: one cannot be read, or is not UTF-8 text.
    """
    return sum(len(piece.encode()) for path in files for piece in _pieces(path))


def read_tokens(
    files: Sequence[Path], tokenizer: "Tokenizer", vocab_size: int, on_read: Callable[[int], None] | None = None
) -> Iterator[NDArray[np.uint32]]:
    """Yields the tokens of texts, and `vocab_size` after each text, in arrays of any length.

    No special tokens are added. A text is read in pieces that end with a line, as far as a line has at most
    `PIECE_CHARACTERS`, so that memory does not grow with it. Around a cut, once in so many characters, tokens may be
    others than in one go: where the tokenizer has tokens with a line's end and what follows it, or begins a text with a
    space. A guess is a few tokens worse there, and a look-up a few tokens shorter.

    Args:
        files: UTF-8 text.
        tokenizer: of the target. Truncation and padding that it may be set to do not apply.
        vocab_size: above every id.
        on_read: called with the bytes of each few pieces that were tokenised.

    Raises:
        InvalidRequestError: a file cannot be read, or is not UTF-8 text.
    """
    plain = copy(tokenizer)
    plain.no_truncation()
    plain.no_padding()

    def encoded(pieces: Sequence[str]) -> NDArray[np.uint32]:
        ids: list[int] = []
        for piece, encoding in zip(pieces, plain.encode_batch_fast(pieces, add_special_tokens=False), strict=True):
            ids += encoding.ids if piece else [vocab_size]
        if on_read is not None:
            on_read(sum(len(piece.encode()) for piece in pieces))
        return np.array(ids, np.uint32)

    pieces: list[str] = []
    num_characters = 0
    for piece in chain.from_iterable(chain(_pieces(path), [""]) for path in files):  # an empty one ends the document
        pieces.append(piece)
        num_characters += len(piece)
        if num_characters >= BATCH_CHARACTERS:
            yield encoded(pieces)
            pieces, num_characters = [], 0
    yield encoded(pieces)


def _pieces(path: Path) -> Iterator[str]:
    """Yields a text in pieces that end with a line, none of them empty. Line ends are as they are in the file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS):
                yield piece
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
