"""Converts dataclasses to messages and back: fields of the same name and type, by a table for each pair.

A field has the same name in the message, but durations: `verify_us` is `verify_duration_us` there. A dataclass within
the dataclass that the message has no message for is a *part*: its fields are the message's own, and stand in the same
table. A part with a default is not written where it is just that, and is read where any of its fields is set.

Messages of every round are converted. So each table is compiled once, to functions such as one would write by hand; a
loop over the table takes half as long again.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from draftwire.errors import InvalidRequestError

Value = TypeVar("Value")
Proto = TypeVar("Proto", bound=Message)


def _copy(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a field is converted; by default it is copied."""

    encode: Callable[[Any], Any] = _copy
    """Returns what the constructor of the message takes: of a message within it the fields by name. Not called with
    None."""
    decode: Callable[[Any], Any] = _copy
    is_optional: bool = False
    """Whether the field may be None, and is absent then."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """How several fields of a message are converted as one of the dataclass."""

    encode: Callable[[Any], dict[str, Any]]
    """Returns fields by name."""
    decode: Callable[[Any], Any]
    """Takes the whole message."""


FieldCheck = Callable[[Any], Any]
"""Returns a value, or raises if it is refused."""

_COPIED = Conversion()
_OF_KIND: dict[Any, Conversion] = dict.fromkeys((int, bool, float, str, bytes), _COPIED)
"""Conversions by type: messages within others are added by `converters`."""
_COLLECTIONS: dict[Any, Conversion] = {
    list: Conversion(decode=list),
    tuple: Conversion(decode=tuple),
    frozenset: Conversion(sorted, frozenset),
}
_NONE: Mapping[str, Any] = MappingProxyType({})


class Codec(Generic[Value, Proto]):
    """Converts a dataclass to a message and back."""

    def __init__(
        self,
        kind: type[Value],
        message: type[Proto],
        names: Mapping[str, str] = _NONE,
        checks: Mapping[str, FieldCheck] = _NONE,
        **own: Conversion | MessagePart,
    ) -> None:
        """Compiles the table.

        Args:
            kind: the dataclass. Its properties are written, and not read.
            message: the type of the message.
            names: names of fields in the message, where they differ. Like the other two also of the fields of parts.
            checks: of fields that are read.
            own: conversions of fields that their types do not determine.

        Raises:
            TypeError: a field has no place in the message, or nothing determines its conversion.
        """
        source = _Source(message, names, checks, own, {})
        source.add(kind, "value")
        keywords = ", ".join(f"{name}={value}" if name else f"**{value}" for name, value in source.written)
        self.encode: Callable[[Value], Proto] = source.compiled("value", f"{source.name_of(message)}({keywords})")
        """Returns the message."""
        self.fields_of: Callable[[Value], dict[str, Any]] = source.compiled("value", _literal(source.written))
        """Returns the fields of the message by name."""
        self.decode: Callable[[Proto], Value] = source.compiled(
            "message", f"{source.name_of(kind)}({', '.join(source.read)})"
        )
        """Returns the dataclass. Raises InvalidRequestError: a value is refused."""


class _Source:
    """Source of the functions of a table, and what they call; or of a part's share in them."""

    def __init__(
        self,
        message: type[Message],
        names: Mapping[str, str],
        checks: Mapping[str, FieldCheck],
        own: Mapping[str, Conversion | MessagePart],
        scope: dict[str, Any],
    ) -> None:
        self._message, self._names, self._checks, self._own, self._scope = message, names, checks, own, scope
        self._on_wire = message.DESCRIPTOR.fields_by_name
        self.written: list[tuple[str, str]] = []
        """Name and value of the message's fields; without a name, several of them."""
        self.read: list[str] = []
        """Arguments of the dataclass, by position: faster than by name."""
        self.set: list[str] = []
        """Conditions, for each field that it is set."""

    def add(self, kind: type, root: str) -> None:
        """Adds the fields of a dataclass, which is `root` in the source."""
        hints = get_type_hints(kind)
        for field in fields(kind):
            name, value, conversion = field.name, f"{root}.{field.name}", self._own.get(field.name)
            place, within = self._place_of(name), _without_none(hints[name])[0]
            if isinstance(conversion, MessagePart):
                self.written.append(("", f"{self.name_of(conversion.encode)}({value})"))
                read = f"{self.name_of(conversion.decode)}(message)"
            elif conversion is None and is_dataclass(within) and (place is None or place.message_type is None):
                read = self._part(field, within, value)
            elif place is not None:
                read = self._field(field, place, conversion or _conversion(hints[name]), value)
            else:
                raise TypeError(f"{self._message.DESCRIPTOR.name} has no field {value}")
            self.read.append(f"{self.name_of(self._checks[name])}({read})" if name in self._checks else read)
        properties = (name for name, member in vars(kind).items() if isinstance(member, property))
        self.written += [(name, f"{root}.{name}") for name in properties if name in self._on_wire]

    def _field(self, field: "Field[Any]", place: Any, conversion: Conversion, value: str) -> str:
        """Adds a field of the message, and returns what is read of it."""
        encoded = value if conversion.encode is _copy else f"{self.name_of(conversion.encode)}({value})"
        is_checked = conversion.is_optional and encoded != value
        self.written.append((place.name, f"({encoded} if {value} is not None else None)" if is_checked else encoded))
        raw, is_set = f"message.{place.name}", f"message.HasField('{place.name}')"
        self.set.append(is_set if place.has_presence else raw)
        decoded = raw if conversion.decode is _copy else f"{self.name_of(conversion.decode)}({raw})"
        if conversion.is_optional:
            return f"({decoded} if {is_set} else None)"
        if place.has_presence and field.default is not MISSING:
            return f"({decoded} if {is_set} else {self.name_of(field.default)})"
        return decoded

    def _part(self, field: "Field[Any]", kind: Any, value: str) -> str:
        """Adds a dataclass whose fields are the message's own, and returns what is read of it."""
        part = _Source(self._message, self._names, self._checks, self._own, self._scope)
        part.add(kind, value)
        self.set += part.set
        read = f"{self.name_of(kind)}({', '.join(part.read)})"
        if field.default is MISSING:
            self.written += part.written
            return read
        absent = self.name_of(field.default)
        is_there = f"{value} is not None" if field.default is None else f"{value} != {absent}"
        self.written.append(("", f"({_literal(part.written)} if {is_there} else {{}})"))
        return f"({read} if {' or '.join(part.set)} else {absent})"

    def _place_of(self, name: str) -> Any:
        """Returns the descriptor of a field in the message; None if there is none."""
        longer = name.removesuffix("_us") + "_duration_us" if name.endswith("_us") else name
        names = (self._names.get(name, name), longer)
        return next((self._on_wire[one] for one in names if one in self._on_wire), None)

    def name_of(self, value: Any) -> str:
        """Returns a name of a value in the source."""
        name = f"_{len(self._scope)}"
        self._scope[name] = value
        return name

    def compiled(self, argument: str, expression: str) -> Any:
        """Returns a function of one argument."""
        return eval(f"lambda {argument}: {expression}", self._scope)


def converters(
    kind: type[Value],
    message: type[Proto],
    names: Mapping[str, str] = _NONE,
    checks: Mapping[str, FieldCheck] = _NONE,
    **own: Conversion | MessagePart,
) -> tuple[Callable[[Value], Proto], Callable[[Proto], Value]]:
    """Returns what encodes and decodes a dataclass, which may be within later ones from now on; see `Codec`."""
    codec = Codec(kind, message, names, checks, **own)
    _OF_KIND[kind] = Conversion(codec.fields_of, codec.decode)
    return codec.encode, codec.decode


def members_of(kind: type[Enum], wrapper: Any) -> dict[int, Any]:
    """Returns the members of an enumeration by their numbers in messages, where their names have a prefix."""
    prefix, numbers = wrapper.Name(0).removesuffix("UNSPECIFIED"), dict(wrapper.items())
    return {numbers[prefix + one.name]: one for one in kind if prefix + one.name in numbers}


def enumeration(members: Mapping[int, Any], refusal: str) -> Conversion:
    """Returns the conversion of an enumeration by number; `refusal`, with a place for one, refuses others."""

    def decode(number: int) -> Any:
        if number not in members:
            raise InvalidRequestError(refusal.format(number))
        return members[number]

    return Conversion({member: number for number, member in members.items()}.__getitem__, decode)


def _literal(written: list[tuple[str, str]]) -> str:
    """Returns the source of fields by name."""
    return f"{{{', '.join(f'{name!r}: {value}' if name else f'**{value}' for name, value in written)}}}"


def _conversion(hint: Any) -> Conversion:
    """Returns the conversion of a type."""
    kind, is_optional = _without_none(hint)
    if is_optional:
        return replace(_conversion(kind), is_optional=True)
    if kind in _OF_KIND:
        return _OF_KIND[kind]
    collection, of = get_origin(kind), _conversion(get_args(kind)[0]) if get_args(kind) else None
    if collection not in _COLLECTIONS or of is None:
        raise TypeError(f"nothing says how {hint} is converted")
    if of is _COPIED:
        return _COLLECTIONS[collection]
    return Conversion(lambda values: list(map(of.encode, values)), lambda values: collection(map(of.decode, values)))


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it had it."""
    if not isinstance(hint, UnionType):
        return hint, False
    (kind,) = (one for one in get_args(hint) if one is not NoneType)
    return kind, True
