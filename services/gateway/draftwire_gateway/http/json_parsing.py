"""Parses JSON bodies with limits on size and depth, without duplicate keys or numbers beyond 64 bits.

pydantic validates what comes out (`body`). Its own parser would take the last of two equal keys, and has no hook to
count objects and lists before they are made.
"""

import json
import math
import re
from collections import Counter
from itertools import islice
from typing import Any

from draftwire_gateway.http.refusal import RefusedError

MAX_OBJECTS = 65_536
"""Most objects in one body, and most lists; gRPC requests have the same limit of messages."""
MAX_DEPTH = 128
"""Deepest nesting of objects and lists."""
LEAST_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
"""Range of signed and unsigned 64-bit integers."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Valid parameter names. Other keys may be user data, and are not quoted."""

_MAX_DIGITS = len(str(LEAST_INTEGER))
_TEXT_OR_LIST = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|\[', re.DOTALL)
"""A text, ended or not, or the begin of a list. Each byte is looked at once, whatever the body is."""


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """Parses a body. A large one takes time, during which other threads can run.

    Raises:
        RefusedError: the body is not a JSON object, has a duplicate key, too many or too deeply nested objects or
            lists, a number out of range, or text that UTF-8 cannot encode. Only the first fault is reported, without
            its value.
    """
    _refuse_many_lists(data)
    try:
        given = json.loads(
            data.decode(), object_pairs_hook=_Objects(), parse_int=_integer, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # its message gives fault and position, and quotes at most one byte
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise RefusedError(400, "the body has to be a JSON object")
    for key, value in given.items():
        _check(value, key if NAME.fullmatch(key) else None, 1)
    return given


def _refuse_many_lists(data: bytes | bytearray) -> None:
    """Refuses too many lists before they are made: the parser says nothing of them, and an empty one takes 64 bytes."""
    if data.count(b"[") <= MAX_OBJECTS:  # those within texts included, which may be code
        return
    begins = (found for found in _TEXT_OR_LIST.finditer(data) if data[found.start()] == ord("["))
    if sum(1 for _ in islice(begins, MAX_OBJECTS + 1)) > MAX_OBJECTS:
        raise RefusedError(400, f"the body holds at most {MAX_OBJECTS} lists")


class _Objects:
    """Builds the objects of one body: counts them, and refuses duplicate keys."""

    def __init__(self) -> None:
        self._num_objects = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._num_objects += 1
        if self._num_objects > MAX_OBJECTS:
            raise RefusedError(400, f"the body holds at most {MAX_OBJECTS} objects")
        made = dict(pairs)
        if len(made) < len(pairs):
            raise _duplicate_key([key for key, _ in pairs])
        return made


def _duplicate_key(keys: list[str]) -> RefusedError:
    key, _ = Counter(keys).most_common(1)[0]
    if NAME.fullmatch(key) is None:
        return RefusedError(400, "an object in the body has a key twice")
    return RefusedError(400, f"an object in the body has the key {key} twice", param=key)


def _integer(digits: str) -> int:
    """Parses an integer. Very long ones become another number out of range, since parsing them is slow."""
    return int(digits) if len(digits) <= _MAX_DIGITS else MAX_INTEGER + 1


def _refuse_constant(_name: str) -> float:
    raise ValueError("NaN and Infinity are no numbers in it")


def _too_deep() -> RefusedError:
    return RefusedError(400, f"the body holds objects and lists more than {MAX_DEPTH} deep")


def _check(value: Any, param: str | None, depth: int) -> None:
    """Refuses values that are nested too deeply, out of range or not UTF-8. `param` names the parameter, if valid."""
    if type(value) is int:
        if not LEAST_INTEGER <= value <= MAX_INTEGER:
            raise RefusedError(400, f"{param or 'the body'} holds a whole number beyond 64 bits", param=param)
    elif type(value) is float:
        if not math.isfinite(value):
            raise RefusedError(400, f"{param or 'the body'} holds a number that is too large", param=param)
    elif type(value) is str:
        _check_text(value, param)
    elif isinstance(value, list | dict):
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, dict):
            for key in value:
                _check_text(key, param)
        for inner in value.values() if isinstance(value, dict) else value:
            _check(inner, param, depth + 1)


def _check_text(text: str, param: str | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate from an escape; the message would quote the text
        raise RefusedError(
            400, f"{param or 'the body'} holds characters that UTF-8 cannot encode", param=param
        ) from None
