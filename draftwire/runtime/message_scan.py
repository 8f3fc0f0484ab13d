"""Counts the fields of an encoded message before anything is made of it.

An empty message within a message takes two bytes on the wire and a hundred in memory, so that a limit of bytes limits
nothing.
"""

from functools import cache

from google.protobuf.descriptor import Descriptor

from draftwire.errors import InvalidRequestError

SCANNED_BYTES = 2**18
"""Smaller messages cannot hold so many fields that it matters."""

MAX_FIELDS = 2**18
"""Most fields of a larger message, those of messages within it included. A list of numbers is one field."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types. The others are groups, which no message has."""
_WIDTH = {_FIXED64: 8, _FIXED32: 4}

MALFORMED = "the bytes are not those of a message"


def check_num_fields(data: bytes, descriptor: Descriptor) -> None:
    """Checks how many fields a large encoded message has. Takes time in proportion to their number, up to `MAX_FIELDS`.

    Raises:
        InvalidRequestError: there are too many, or the bytes are not those of a message.
    """
    if len(data) < SCANNED_BYTES:
        return
    try:
        num_fields = _count(data, descriptor)
    except IndexError:
        raise InvalidRequestError(MALFORMED) from None
    if num_fields > MAX_FIELDS:
        raise InvalidRequestError(f"a message of {len(data)} bytes holds at most {MAX_FIELDS} fields")


def _count(data: bytes, descriptor: Descriptor) -> int:
    """Returns the number of fields, or a number above `MAX_FIELDS`.

    Raises:
        IndexError: the bytes are not those of a message.
    """
    num_fields, waiting = 0, [(0, len(data), descriptor)]
    while waiting:
        at, end, kind = waiting.pop()
        inner = _messages_within(kind)
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                return num_fields
            tag, at = _varint(data, at)
            wire_type = tag & 7
            if wire_type == _BYTES:
                size, at = _varint(data, at)
                child = inner.get(tag >> 3)
                if child is not None and size:
                    waiting.append((at, at + size, child))
                at += size
            elif wire_type == _VARINT:
                _, at = _varint(data, at)
            elif wire_type in _WIDTH:
                at += _WIDTH[wire_type]
            else:
                raise IndexError
        if at > end:
            raise IndexError
    return num_fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


@cache
def _messages_within(descriptor: Descriptor) -> dict[int, Descriptor]:
    """Returns the types of the fields that are messages, by field number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
