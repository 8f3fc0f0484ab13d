"""Reads tool calls in a text while it is generated.

What is no call of one of the functions stays text. A call that may turn out to be none is held back until it is whole;
one that a form has made certain is passed on as it is written.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from draftwire.requests.tool_calls import FUNCTION_NAME, ToolSyntax
from draftwire_gateway.text.text import overlap

_NAME = FUNCTION_NAME.pattern
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
"""A call whose arguments come next."""
_NAMED = re.compile(rf"\s*({_NAME})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)")
"""A call of later models of Mistral, whose arguments come next."""
MAX_NAMED = 200
"""Most characters before the arguments of such a call."""
MAX_SPACE = 256
"""Most white space that is held back, or that stands within what begins a call."""
MAX_DEPTH = 64
"""Most objects and lists within each other in a call; so a text of many markers is not looked through for each."""
MARKS_IN_CALLS = ("[ARGS]", "[CALL_ID]")
"""Tokens within them."""


@dataclass(slots=True)
class CallDelta:
    """A tool call, or the next part of its arguments."""

    index: int
    """Index of the call in the answer."""
    id: str
    """Empty where the call has begun before."""
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class ReadText:
    """Text and calls that a part of the text was read as."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _State(Enum):
    TEXT = auto()
    """Outside calls."""
    BEFORE = auto()
    """Position after a marker, or at the start of an answer that may be calls as a whole."""
    CALL = auto()
    """Position at or in a call."""
    AFTER = auto()
    """Position after a call."""
    PLAIN = auto()
    """Position in what can have no more calls."""


class ToolCallReader:
    """Splits the text of one answer into text and calls. What it makes of a text does not depend on its parts."""

    def __init__(
        self,
        syntax: ToolSyntax,
        names: Collection[str],
        make_id: Callable[[], str],
        *,
        is_certain: bool,
        must_call: bool = False,
    ) -> None:
        """Starts before the text. `make_id` returns the id of a new call. `is_certain`: a form sees to it that whatever
        begins like a call is one; `must_call`: that form has nothing but calls.
        """
        self._must_call = must_call
        self._syntax = syntax
        self._names = names
        self._make_id = make_id
        self._is_certain = is_certain
        self._state = _State.TEXT if syntax.opening else _State.BEFORE
        self._buffer = ""
        """Text that is not read yet."""
        self._raw = ""
        """Text that was read as the beginning of a call, in case that it is none."""
        self._value: _JsonEnd | None = None
        """End of the JSON value that is being read, which starts the buffer."""
        self._begun: CallDelta | None = None
        """The call whose arguments are being passed on."""
        self._num_sent = 0
        """Characters of these arguments that were passed on."""
        self.num_calls = 0

    @property
    def is_within_call(self) -> bool:
        """Whether the last call has begun and is not whole."""
        return self._begun is not None

    def push(self, text: str) -> ReadText:
        """Adds text, and returns what is certain now."""
        self._buffer += text
        read = ReadText()
        steps = {
            _State.TEXT: self._read_text,
            _State.BEFORE: self._read_beginning,
            _State.CALL: self._read_call,
            _State.AFTER: self._read_end,
            _State.PLAIN: self._read_rest,
        }
        while steps[self._state](read):
            pass
        return read

    def finish(self) -> ReadText:
        """Returns what is left at the end of the text."""
        left = self._raw + self._buffer
        is_end_of_calls = self._state is _State.AFTER or (self.num_calls > 0 and not left.strip())
        is_marked = self._state is _State.CALL or (self._state is _State.BEFORE and bool(self._raw))
        is_cut_call = self._must_call or (self._is_certain and is_marked)
        return ReadText("" if is_end_of_calls or is_cut_call else left)

    def _read_text(self, read: ReadText) -> bool:
        """Passes on text up to a marker, without the space before it. Returns whether there is more to read."""
        start = self._buffer.find(self._syntax.opening)
        held = overlap(self._buffer, self._syntax.opening)
        end = start if start >= 0 else len(self._buffer) - held
        text = self._buffer[:end]
        num_kept = min(len(text) - len(text.rstrip()), MAX_SPACE)
        kept = text[len(text) - num_kept :]
        read.text += text[: len(text) - num_kept]
        if start < 0:
            self._buffer = kept + self._buffer[end:]
            return False
        self._take(kept + self._syntax.opening, self._buffer[end + len(self._syntax.opening) :], _State.BEFORE)
        return True

    def _take(self, raw: str, rest: str, state: _State) -> None:
        self._raw, self._buffer, self._state = raw, rest, state

    def _read_beginning(self, read: ReadText) -> bool:
        """Looks at what follows a marker."""
        syntax, given = self._syntax, self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(given)]
        if not given:
            return self._give_up(read) if len(space) > MAX_SPACE else False
        if not syntax.opening and syntax.prefix and not self._raw.strip():
            if given.startswith(syntax.prefix):
                self._take(self._raw + space + syntax.prefix, given[len(syntax.prefix) :], _State.BEFORE)
                return True
            if syntax.prefix.startswith(given):
                return False
        if syntax.is_list and given[0] == "[":
            self._take(self._raw + space + "[", given[1:], _State.CALL)
            return True
        if given[0] == "{" and not syntax.is_list:
            self._state = _State.CALL
            return True
        if syntax.is_list and syntax.opening:
            return self._read_named(read)
        return self._give_up(read)

    def _read_named(self, read: ReadText) -> bool:
        """Reads a call that begins with the name."""
        head = _NAMED.match(self._buffer)
        if head is None:
            if "{" not in self._buffer and len(self._buffer) <= MAX_NAMED:
                return False
            return self._give_up(read)
        if head.end() > MAX_NAMED:
            return self._give_up(read)
        end = self._end_of_value(head.end())
        if end is None:
            return self._give_up(read) if self._is_too_deep else False
        arguments = self._buffer[head.end() : end]
        if head.group(1) not in self._names or not _is_object(_parsed(arguments)):
            return self._give_up(read)
        self._add(read, head.group(1), arguments)
        self._take("", self._buffer[end:], _State.TEXT)
        return True

    def _read_call(self, read: ReadText) -> bool:
        """Reads a call, whose braces begin it."""
        given = self._buffer.lstrip()
        if not given:
            return self._give_up(read) if len(self._buffer) > MAX_SPACE else False
        if given[0] != "{":
            return self._give_up(read)
        if len(given) < len(self._buffer):
            self._raw += self._buffer[: len(self._buffer) - len(given)]
            self._buffer = given
        if self._is_certain:
            return self._pass_on(read)
        end = self._end_of_value(0)
        if end is None:
            return self._give_up(read) if self._is_too_deep else False
        call = _call_in(self._buffer[:end])
        if call is None or call[0] not in self._names:
            return self._give_up(read)
        self._add(read, *call)
        self._take("", self._buffer[end:], _State.AFTER)
        return True

    def _pass_on(self, read: ReadText) -> bool:
        """Passes on the arguments of a call as they come."""
        head = _HEAD.match(self._buffer)
        if head is None:
            return False
        if self._begun is None:
            self._begun = self._add(read, head.group(1), "")
        end = self._end_of_value(head.end())
        arguments = self._buffer[head.end() : end]
        new, self._num_sent = arguments[self._num_sent :], len(arguments)
        if read.calls and read.calls[-1] is self._begun:  # clients take one part of a call at a time
            self._begun.arguments += new
        elif new:
            read.calls.append(CallDelta(self._begun.index, "", "", new))
        brace = -1 if end is None else self._buffer.find("}", end)
        if brace < 0:
            return False
        self._begun, self._num_sent = None, 0
        self._take("", self._buffer[brace + 1 :], _State.AFTER)
        self._value = None
        return True

    def _read_end(self, read: ReadText) -> bool:
        """Reads what stands between calls, or after the last."""
        syntax, given = self._syntax, self._buffer.lstrip()
        if not given:
            self._buffer = self._buffer[:MAX_SPACE]
            return False
        space = self._buffer[: len(self._buffer) - len(given)]
        if not syntax.is_list and syntax.closing:
            if syntax.closing.startswith(given) and given != syntax.closing:
                return False
            is_closed = given.startswith(syntax.closing)
            self._take("", given.removeprefix(syntax.closing) if is_closed else self._buffer, _State.TEXT)
            return True
        if given[0] == syntax.separator.strip():
            self._take(space + given[0], given[1:], _State.CALL)
            return True
        is_end = syntax.is_list and given[0] == "]"
        self._take("", given[1:] if is_end else self._buffer, _State.TEXT if syntax.opening else _State.PLAIN)
        return True

    def _read_rest(self, read: ReadText) -> bool:
        read.text += self._buffer
        self._buffer = ""
        return False

    def _give_up(self, read: ReadText) -> bool:
        """Makes text of what looked like a call. Its marker is not looked for again, but what follows it is."""
        read.text += self._raw
        self._value = None
        self._take("", self._buffer, _State.TEXT if self._syntax.opening else _State.PLAIN)
        return True

    @property
    def _is_too_deep(self) -> bool:
        return self._value is not None and self._value.is_too_deep

    def _end_of_value(self, start: int) -> int | None:
        """Returns where the JSON object ends that starts there; None if it is not whole yet."""
        if self._value is None:
            self._value = _JsonEnd(start, math.inf if self._is_certain else MAX_DEPTH)
        end = self._value.find(self._buffer)
        if end is not None and not self._is_certain:
            self._value = None
        return end

    def _add(self, read: ReadText, name: str, arguments: str) -> CallDelta:
        call = CallDelta(self.num_calls, self._make_id(), name, arguments)
        self.num_calls += 1
        read.calls.append(call)
        return call


class _JsonEnd:
    """Finds the end of a JSON object in a growing text, and looks at each character once."""

    _NEXT = re.compile(r'[{}\[\]"]')
    _NEXT_IN_TEXT = re.compile(r'["\\]')

    def __init__(self, start: int, max_depth: float) -> None:
        self._place = start
        self._max_depth = max_depth
        self._depth = 0
        self._in_text = False
        self._end: int | None = None

    @property
    def is_too_deep(self) -> bool:
        """Whether more objects and lists are within each other than may be; then the end is not looked for."""
        return self._depth > self._max_depth

    def find(self, text: str) -> int | None:
        """Returns the place after the object; None if it does not end in this text."""
        while self._end is None and not self.is_too_deep:
            found = (self._NEXT_IN_TEXT if self._in_text else self._NEXT).search(text, self._place)
            if found is None:
                self._place = len(text)
                return None
            sign = found.group()
            if sign == "\\":
                if found.end() == len(text):
                    self._place = found.start()
                    return None
                self._place = found.end() + 1
                continue
            self._place = found.end()
            if sign == '"':
                self._in_text = not self._in_text
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self._end = self._place
        return self._end


def _call_in(text: str) -> tuple[str, str] | None:
    """Returns name and arguments of a call; None if the text is none."""
    members = _members(text)
    if members is None or not members.keys() <= {"name", "arguments", "parameters", "id", "type"}:
        return None
    name, _ = members.get("name", (None, ""))
    arguments, raw = members.get("arguments", members.get("parameters", ({}, "{}")))
    if isinstance(arguments, str):  # JSON in a text
        arguments, raw = _parsed(arguments), arguments
    return (name, raw) if isinstance(name, str) and _is_object(arguments) else None


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """Returns the members of a JSON object, each with its text; None if the text is no object or has a key twice."""
    members: dict[str, tuple[Any, str]] = {}
    place = _after_space(text, 1)
    try:
        while text[place] != "}":
            key, place = _DECODER.raw_decode(text, place)
            place = _after_space(text, place)
            if not isinstance(key, str) or key in members or text[place] != ":":
                return None
            start = _after_space(text, place + 1)
            value, place = _DECODER.raw_decode(text, start)
            members[key] = value, text[start:place]
            place = _after_space(text, place)
            if text[place] == ",":
                place = _after_space(text, place + 1)
                if text[place] == "}":
                    return None
            elif text[place] != "}":
                return None
    except (IndexError, RecursionError, ValueError):
        return None
    return members


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (RecursionError, ValueError):
        return None


def _refuse_constant(_: str) -> None:
    raise ValueError("NaN and infinity are no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
