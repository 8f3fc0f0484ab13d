"""How many constraints of a JSON schema meet in one string: what following a text costs is their product.

The library's limits are checked between the derivatives of an expression. One derivative of an intersection combines
each character class of each expression with all of the others, and nothing interrupts that: twelve short patterns take
half a second, forty never end. It may happen at any place of a text, long after the schema was compiled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_INTERSECTION = 10_000
"""Upper bound of the product of the lengths of the patterns and formats that one string has to match at once."""

FORMAT_LENGTH = 100
"""Counted for a format, which the library writes as an expression."""

_CHILDREN = ("additionalItems", "additionalProperties", "items", "prefixItems")


class _Factor(NamedTuple):
    """One factor of a subschema, which a string has to match beside the others: a pattern, or one of several
    subschemas.
    """

    length: int
    choices: "list[_Node]"


@dataclass(slots=True, eq=False)
class _Node:
    """A subschema, or the properties of one."""

    schema: dict[str, Any]
    is_properties: bool
    number: int = 0
    """Number in the order in which they are reached; 0 before that."""
    lowest: int = 0
    """Least number of a node that it is known to lead back to."""
    factors: list[_Factor] = field(default_factory=list)
    size: int = 0
    """0 while it is not known."""


def intersection_size(schema: Any) -> int:
    """Returns the largest product of lengths of patterns and formats that may meet in a string; 1 if none do.

    An upper bound: whatever is at different places below one subschema counts as if it were at one. Recursion that
    makes an intersection larger at each level counts as too large.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    return _Sizes(schema).of_root()


class _Sizes:
    """Sizes of the subschemas of one schema, each of which is visited once.

    Source: Tarjan 1972, "Depth-first search and linear graph algorithms", section 4: subschemas that lead to each other
    are found together, when the first of them that was reached has been visited. Where none of them combines another
    one of them with anything, all have the size of the largest that they lead to.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes: dict[tuple[int, bool], _Node] = {}
        """Nodes by the identity of the subschema, and whether its properties are meant."""
        self._num_reached = 0
        self._open: list[_Node] = []
        """Nodes that were reached and whose size is not known, in that order."""
        self._of_all = 0

    def of_root(self) -> int:
        """Returns the size of the whole schema."""
        found = self._found([self._root])
        for node in found:
            self._visit(node)
        return max((node.size for node in found), default=1)

    def _visit(self, node: _Node) -> None:
        self._num_reached += 1
        node.number = node.lowest = self._num_reached
        node.factors = self._factors(node)
        self._open.append(node)
        for choice in [choice for factor in node.factors for choice in factor.choices]:
            if not choice.number:
                self._visit(choice)
            if not choice.size:
                node.lowest = min(node.lowest, choice.lowest)
        if node.lowest == node.number:
            cycle = [self._open.pop()]
            while cycle[-1] is not node:
                cycle.append(self._open.pop())
            size = max(map(_product, cycle))
            for one in cycle:
                one.size = size

    def _factors(self, node: _Node) -> list[_Factor]:
        schema = node.schema
        if node.is_properties:  # each may match all of the patterns for names
            named, patterns = schema.get("properties"), schema.get("patternProperties")
            properties = _Factor(1, self._found(named.values() if isinstance(named, dict) else ()))
            return [properties, *self._each(patterns.values() if isinstance(patterns, dict) else ())]
        inner = self._found(one for name in _CHILDREN for one in _list(schema.get(name)))
        here = _Factor(_length(schema), [*inner, self._node(schema, is_properties=True)])
        alternatives = [_Factor(1, self._found(_list(schema.get(name)))) for name in ("anyOf", "oneOf")]
        together = self._each(_list(schema.get("allOf")))
        return [here, *alternatives, *together, *self._of_reference(schema.get("$ref"))]

    def _each(self, schemas: Iterable[Any]) -> list[_Factor]:
        return [_Factor(1, [one]) for one in self._found(schemas)]

    def _found(self, schemas: Iterable[Any]) -> list[_Node]:
        """Returns the nodes of those that are objects; others allow anything or nothing."""
        return [self._node(one, is_properties=False) for one in schemas if isinstance(one, dict)]

    def _node(self, schema: dict[str, Any], *, is_properties: bool) -> _Node:
        key = id(schema), is_properties
        if key not in self._nodes:
            self._nodes[key] = _Node(schema, is_properties)
        return self._nodes[key]

    def _of_reference(self, reference: Any) -> list[_Factor]:
        if not isinstance(reference, str):
            return []
        if reference == "#" or reference.startswith("#/"):
            return self._each([_resolved(self._root, reference)])
        self._of_all = self._of_all or _limited(prod(map(_length, _objects(self._root))))
        return [_Factor(self._of_all, [])]  # by $id or $anchor: to any of them


def _product(node: _Node) -> int:
    """Returns the size of a node. Of a choice whose size is not known, the node is a part itself."""
    factors = [(_largest(one), any(not choice.size for choice in one.choices)) for one in node.factors]
    found = [(size, is_recursive) for size, is_recursive in factors if size > 1 or is_recursive]
    grows = len(found) > 1 and any(is_recursive for _, is_recursive in found)
    return MAX_INTERSECTION + 1 if grows else _limited(prod(size for size, _ in found))


def _largest(factor: _Factor) -> int:
    return max([factor.length, *(choice.size for choice in factor.choices)])


def _limited(size: int) -> int:
    return min(size, MAX_INTERSECTION + 1)


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
