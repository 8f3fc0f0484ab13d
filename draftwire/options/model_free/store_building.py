"""Builds a `RetrievalStore`: tokenises files, and sorts their suffixes.

Source: suffix arrays: Manber and Myers 1993, "Suffix arrays: a new method for on-line string searches"; prefix doubling
of what is still equal, in place: Larsson and Sadakane 2007, "Faster suffix sorting".
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import InvalidRequestError
from draftwire.options.model_free.retrieval_store import DEPTH, FORMAT_VERSION, INDEX, SUFFIXES, TOKENS, StoreIndex

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARACTERS = 2**16
"""Texts are tokenised in pieces of this length, and up to as much again to the end of the line."""
BATCH_CHARACTERS = 2**20
"""Characters of the pieces that are tokenised together."""
SORTED_TOGETHER = 2**20
"""Suffixes that are sorted at a time, and more only if so many begin alike."""


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
