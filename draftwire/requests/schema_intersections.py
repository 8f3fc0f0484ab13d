"""How many constraints of a JSON schema meet in one string: what following a text costs is their product.

The library's limits are checked between the derivatives of an expression. One derivative of an intersection combines
each character class of each expression with all of the others, and nothing interrupts that: twelve short patterns take
half a second, forty never end. It may happen at any place of a text, long after the schema was compiled.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_INTERSECTION = 10_000
"""Upper bound of the product of the lengths of the patterns and formats that one string has to match at once."""

FORMAT_LENGTH = 100
"""Counted for a format, which the library writes as an expression."""

_CHILDREN = ("additionalItems", "additionalProperties", "items", "prefixItems")


class _Size(NamedTuple):
    size: int = 1
    recursions: frozenset[str] = frozenset()
    """References that it leads back to, of those that are being followed."""


def intersection_size(schema: Any) -> int:
    """Returns the largest product of lengths of patterns and formats that may meet in a string; 1 if none do.

    An upper bound: whatever is at different places below one subschema counts as if it were at one. Recursion that
    makes an intersection larger at each level counts as too large.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    return _Sizes(schema).of(schema).size


class _Sizes:
    """Sizes of the subschemas of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, _Size] = {}
        """By reference."""
        self._followed: set[str] = set()
        """References that are being followed."""

    def of(self, schema: Any) -> _Size:
        """Returns the size of a subschema."""
        if not isinstance(schema, dict):
            return _Size()
        here = _largest([_Size(_length(schema)), *map(self.of, self._children(schema)), self._of_properties(schema)])
        alternatives = [_largest(map(self.of, _list(schema.get(name)))) for name in ("anyOf", "oneOf")]
        together = [self.of(one) for one in _list(schema.get("allOf"))]
        referred = self._of_reference(schema["$ref"]) if isinstance(schema.get("$ref"), str) else _Size()
        return _product([here, *alternatives, *together, referred])

    def _children(self, schema: dict[str, Any]) -> Iterable[Any]:
        for name in _CHILDREN:
            yield from _list(schema.get(name))

    def _of_properties(self, schema: dict[str, Any]) -> _Size:
        """Returns the size of the properties, each of which may match all of the patterns for names."""
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        properties = _largest(map(self.of, named.values() if isinstance(named, dict) else ()))
        return _product([properties, *map(self.of, patterns.values() if isinstance(patterns, dict) else ())])

    def _of_reference(self, reference: str) -> _Size:
        if reference != "#" and not reference.startswith("#/"):  # by $id or $anchor: to any of them
            return _Size(min(prod(map(_length, _objects(self._root))), MAX_INTERSECTION + 1))
        if reference in self._followed:
            return _Size(recursions=frozenset({reference}))
        if reference not in self._known:
            self._followed.add(reference)
            self._known[reference] = self.of(_resolved(self._root, reference))
            self._followed.remove(reference)
        known = self._known[reference]
        return known._replace(recursions=known.recursions & self._followed)


def _largest(sizes: Iterable[_Size]) -> _Size:
    found = [_Size(), *sizes]
    return _Size(max(one.size for one in found), _recursions(found))


def _product(sizes: Iterable[_Size]) -> _Size:
    found = [one for one in sizes if one.size > 1 or one.recursions]
    grows = len(found) > 1 and any(one.recursions for one in found)
    size = MAX_INTERSECTION + 1 if grows else prod(one.size for one in found)
    return _Size(min(size, MAX_INTERSECTION + 1), _recursions(found))


def _recursions(sizes: Iterable[_Size]) -> frozenset[str]:
    return frozenset[str]().union(*(one.recursions for one in sizes))


def _length(schema: dict[str, Any]) -> int:
    """Returns the length of a subschema's own pattern and format."""
    return max(1, len(str(schema.get("pattern", "")))) * (FORMAT_LENGTH if "format" in schema else 1)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolved(root: Any, reference: str) -> Any:
    """Returns what a JSON pointer refers to; None if that is not there, which the library refuses."""
    found = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and len(part) < 7 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found
