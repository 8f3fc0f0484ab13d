"""The header of a GGUF file: metadata and the table of tensors, checked against the file's size before anything is
allocated. Imports neither torch nor numpy.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SPLIT_COUNT, SPLIT_NUMBER = "split.count", "split.no"
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
MOST_HEADER_BYTES = 64 * 2**20
MOST_VALUES = 2**21
"""Strings and numbers of all metadata: tokens, their scores and kinds, and merges."""
MOST_DIMENSIONS = 4
LONGEST_NAME = 2**10
"""Bytes of a key, or of a tensor's name."""
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` of the types of numbers."""


@dataclass(frozen=True, slots=True)
class StoredType:
    """How entries of a tensor are stored: in blocks of a fixed length."""

    name: str
    block_entries: int
    block_bytes: int

    @property
    def is_quantised(self) -> bool:
        """Whether entries share scales."""
        return self.block_entries > 1


STORED_TYPES = {
    0: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    8: StoredType("Q8_0", 32, 34),
    10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    20: StoredType("IQ4_NL", 32, 18),
    23: StoredType("IQ4_XS", 256, 136),
    30: StoredType("BF16", 1, 2),
}
"""Types by number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in its file."""

    shape: tuple[int, ...]
    """Shape as torch has it: entries of the last dimension lie side by side."""
    type_number: int
    """A key of `STORED_TYPES`."""
    start: int
    """First byte in the file."""
    num_bytes: int

    @property
    def stored_type(self) -> StoredType:
        """How its entries are stored."""
        return STORED_TYPES[self.type_number]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a file: all that it says of itself."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    digest: str
    """SHA-256 of all that lies before the tensors' entries, hexadecimal."""

    @property
    def quantised_types(self) -> list[str]:
        """Names of the types that are not plain numbers, those of most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            kind = tensor.stored_type
            if kind.is_quantised:
                sizes[kind.name] = sizes.get(kind.name, 0) + tensor.num_bytes
        return sorted(sizes, key=lambda name: -sizes[name])


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file; its tensors are not looked at.

    Raises:
        InvalidRequestError: the file is no GGUF file, broken, one of several, or has something that is not known.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if not file.read(1):
            raise InvalidRequestError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content, path).header()


class _Reader:
    """Reads a file from its start, and never beyond its end."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content = content
        self._path = path
        self._end = min(len(content), MOST_HEADER_BYTES)
        self._place = 0
        self._num_values = 0

    def header(self) -> GgufHeader:
        """Reads all of it."""
        if self._content[: len(MAGIC)] != MAGIC:
            raise InvalidRequestError(f"{self._path} is no GGUF file")
        self._place = len(MAGIC)
        version = self._number("I")
        if version not in VERSIONS:
            other = "in the byte order of other machines" if version % 2**16 == 0 else f"of version {version}"
            raise InvalidRequestError(f"{self._path} is {other}; known: version {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self._check_count(num_tensors, 32, "tensors")
        self._check_count(num_entries, 13, "entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string(LONGEST_NAME)
            if key in metadata:
                raise self._broken(f"it has {key!r} twice")
            metadata[key] = self._value(self._number("I"), key)
        self._check_whole(metadata)
        table = self._table(num_tensors)
        return self._with_places(metadata, table)

    def _table(self, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Returns shape, type and offset of each tensor."""
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string(LONGEST_NAME)
            num_dimensions = self._number("I")
            if not 1 <= num_dimensions <= MOST_DIMENSIONS:
                raise self._broken(f"tensor {name!r} has {num_dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(num_dimensions))
            type_number = self._number("I")
            if type_number not in STORED_TYPES:
                known = ", ".join(kind.name for kind in STORED_TYPES.values())
                raise InvalidRequestError(
                    f"{self._path} stores {name!r} as type {type_number}, which cannot be read; known: {known}"
                )
            if name in table:
                raise self._broken(f"it has tensor {name!r} twice")
            table[name] = (shape[::-1], type_number, self._number("Q"))
        return table

    def _with_places(self, metadata: dict[str, Any], table: dict[str, tuple[tuple[int, ...], int, int]]) -> GgufHeader:
        """Returns the header, with each tensor's place in the file."""
        digest = hashlib.sha256(memoryview(self._content)[: self._place]).hexdigest()
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**16 or alignment % 8:
            raise self._broken(f"{ALIGNMENT} is {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        tensors, size = {}, len(self._content)
        for name, (shape, type_number, offset) in table.items():
            kind = STORED_TYPES[type_number]
            num_bytes = prod(shape) // kind.block_entries * kind.block_bytes
            if shape[-1] % kind.block_entries or not num_bytes:
                raise self._broken(f"tensor {name!r} is of shape {list(shape)}, of blocks of {kind.block_entries}")
            if offset % alignment or begin + offset + num_bytes > size:
                needed = f"{begin + offset + num_bytes:,} of {size:,} bytes"
                raise InvalidRequestError(f"{self._path} is broken or cut short: tensor {name!r} ends at {needed}")
            tensors[name] = StoredTensor(shape, type_number, begin + offset, num_bytes)
        self._check_apart(tensors)
        return GgufHeader(self._path, metadata, tensors, digest)

    def _check_apart(self, tensors: dict[str, StoredTensor]) -> None:
        """Checks that no two tensors share bytes: else a small file could have many large ones."""
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self._broken(f"tensor {name!r} begins within another")
            end = tensor.start + tensor.num_bytes

    def _check_whole(self, metadata: dict[str, Any]) -> None:
        count = metadata.get(SPLIT_COUNT, 1)
        if count not in (0, 1):
            number = metadata.get(SPLIT_NUMBER, 0)
            raise InvalidRequestError(
                f"{self._path} is part {number + 1 if isinstance(number, int) else '?'} of {count}: join them with "
                "llama-gguf-split --merge, and name the whole file"
            )

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            self._num_values += 1
            return self._string()
        if kind != ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind, count = self._number("I"), self._number("Q")
        self._num_values += count
        if self._num_values > MOST_VALUES:
            raise self._broken(f"{key!r} has {count:,} values, {self._num_values:,} with those before")
        if kind != STRING:
            return list(self._numbers(kind, count, key))
        self._check_count(count, 8, f"strings of {key!r}")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int, key: str) -> tuple[Any, ...]:
        if kind not in NUMBERS:
            raise self._broken(f"{key!r} has values of type {kind}")
        pattern = f"<{count}{NUMBERS[kind]}"
        return struct.unpack_from(pattern, self._content, self._take(struct.calcsize(pattern)))

    def _number(self, code: str) -> int:
        values: tuple[int, ...] = struct.unpack_from(f"<{code}", self._content, self._take(struct.calcsize(f"<{code}")))
        return values[0]

    def _string(self, longest: int = MOST_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > longest:
            raise self._broken(f"a string has {length:,} bytes")
        start = self._take(length)
        try:
            return self._content[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"the string at byte {start} is no UTF-8") from error

    def _take(self, num_bytes: int) -> int:
        """Goes on by so many bytes, and returns the first one's place."""
        start = self._place
        if num_bytes > self._end - start:
            where = f"its header ends beyond {self._end:,} bytes"
            raise InvalidRequestError(f"{self._path} is broken or cut short: {where}")
        self._place = start + num_bytes
        return start

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._end - self._place:
            raise self._broken(f"it has {count:,} {what} in {len(self._content):,} bytes")

    def _broken(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._path} is a broken GGUF file: {why}")
