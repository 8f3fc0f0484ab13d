"""What meets in one string is counted, wherever in the schema it stands."""

import json
from math import prod
from typing import Any

from cases import every
from hypothesis import given
from hypothesis import strategies as st

from draftwire.options.structured_output.schema_intersections import (
    FORMAT_LENGTH,
    MAX_INTERSECTION,
    _Sizes,
    intersection_size,
)

P = {"pattern": "12345"}
Q = {"pattern": "123"}
TOO_LARGE = MAX_INTERSECTION + 1


def properties(**given: Any) -> dict[str, Any]:
    return {"type": "object", "properties": given}


def listed(*one: Any) -> dict[str, Any]:
    return {"allOf": list(one)}


TO_A, TO_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
MUTUAL = {"a": {**P, **properties(x=TO_B)}, "b": properties(y=TO_A)}
TREE = {**properties(left=TO_A, name=P), "$defs": {"a": properties(left=TO_A, right=TO_A, name=P)}}


@every(
    ("schema", "size"),
    [
        (True, 1),
        ({"type": "integer", "multipleOf": 3}, 1),
        (P, 5),
        (P | {"minLength": 3, "maxLength": 10}, 5),
        (P | {"format": "date"}, 5 * FORMAT_LENGTH),
        (properties(a=P, b=Q), 5),
        ({"items": P, "prefixItems": [Q, P]}, 5),
        ({"anyOf": [P, Q]}, 5),
        (listed(P, Q), 15),
        (P | listed(Q), 15),
        (listed(P, {"anyOf": [Q, {"oneOf": [P, Q]}]}), 25),
        (listed(properties(a=P), properties(a=Q)), 15),
        ({"patternProperties": {"a": P, "b": Q}, **properties(a=P)}, 75),
        (listed(TO_A, Q) | {"$defs": {"a": P}}, 15),
        (TO_A | Q | {"$defs": {"a": P}}, 15),
        (listed(TO_A) | {"$defs": {"a": P}}, 5),
        (listed({"$ref": "#/allOf/1"}, P), 25),
        ({"$ref": "#/$defs/a~1%25"} | Q | {"$defs": {"a/%": P}}, 15),
        ({"$ref": "#there"} | {"x": [P, {"y": Q}]}, 15),
        (listed(*[{"pattern": f".*{one:03}.*"} for one in range(40)]), TOO_LARGE),
        # recursion: of a tree, of what a tree is extended by, and where each level adds a pattern
        (TREE, 5),
        (listed(TREE, properties(name=Q)), 15),
        ({"$ref": "#"}, 1),
        ({**properties(x=listed(TO_A, TO_B)), "$defs": {"a": properties(x=listed(TO_A, TO_B)), "b": P}}, TOO_LARGE),
        ({**TO_A, "$defs": {"a": properties(x=TO_B), "b": listed(TO_A, P)}}, TOO_LARGE),
        ({**TO_B, "$defs": {"a": properties(x=TO_B), "b": listed(TO_A, P)}}, TOO_LARGE),
        # two that lead to each other, of which one is reached by way of the other before it is combined with something
        ({**properties(first=TO_A, second=listed(TO_B, properties(y=Q))), "$defs": MUTUAL}, 15),
        ({**properties(second=listed(TO_B, properties(y=Q)), first=TO_A), "$defs": MUTUAL}, 15),
        ({**properties(first=TO_B, second=listed(TO_A, properties(y=Q))), "$defs": MUTUAL}, 15),
        ({**properties(second=listed(TO_A, properties(y=Q)), first=TO_B), "$defs": MUTUAL}, 15),
    ],
)
def test_size_is_the_product_of_what_meets(schema: Any, size: int) -> None:
    assert intersection_size(schema) == size


def test_every_subschema_is_looked_at_once_for_each_reference() -> None:
    """References that double at each level do not double the work."""
    names = [f"a{level}" for level in range(61)]
    pointers = [{"$ref": f"#/$defs/{name}"} for name in names]
    definitions = {
        name: properties(x=next_one, y=next_one) for name, next_one in zip(names, pointers[1:], strict=False)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**definitions, "a60": P}}
    assert intersection_size(json.loads(json.dumps(schema))) == 5


def test_references_of_everything_to_everything_are_followed_once() -> None:
    names = [f"a{number}" for number in range(40)]
    everything = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    schema = {**everything["a0"], "$defs": {name: properties(**everything) for name in names} | {"a39": P}}
    sizes = _Sizes(schema)
    assert sizes.of_root() == 5
    num_objects = 1 + 39 * (1 + 40) + 1
    assert sizes._num_reached <= 2 * num_objects, "each as a subschema and for its properties"


LARGE = 10**12
NAMES = ("a", "b", "c")


def expanded(schema: Any, of_references: dict[str, int]) -> int:
    """Returns the size of a schema, of those kinds that are drawn below, if those of the references are given."""
    places = [len(schema.get("pattern", "1")), expanded(schema["items"], of_references) if "items" in schema else 1]
    named = [expanded(one, of_references) for one in schema.get("properties", {}).values()]
    patterns = [expanded(one, of_references) for one in schema.get("patternProperties", {}).values()]
    places.append(max(named, default=1) * prod(patterns))
    either = max([expanded(one, of_references) for one in schema.get("anyOf", [])], default=1)
    together = prod(expanded(one, of_references) for one in schema.get("allOf", []))
    referred = of_references[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else 1
    return min(LARGE, max(places) * either * together * referred)


def expansion(schema: Any, least: int) -> int:
    """Returns the size of a schema expanded without end, with references of size `least` at the end."""
    sizes, larger = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, least)
    while sizes != larger:
        sizes = larger
        larger = {name: max(least, expanded(one, sizes)) for name, one in schema["$defs"].items()}
    return expanded(schema, sizes)


def subschemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.sampled_from([{}, P, Q, *({"$ref": f"#/$defs/{name}"} for name in NAMES)])

    def containing(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        some = st.lists(inner, min_size=1, max_size=2)
        named = st.dictionaries(st.sampled_from("xy"), inner, min_size=1)
        parts = {"properties": named, "patternProperties": named, "anyOf": some, "allOf": some, "items": inner}
        return st.fixed_dictionaries({}, optional={**parts, **{name: st.just(P[name]) for name in P}})

    return st.recursive(leaves, containing, max_leaves=4)


@given(subschemas(), st.fixed_dictionaries(dict.fromkeys(NAMES, subschemas())))
def test_size_is_that_of_the_expansion(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Or it counts as too large, where recursion meets something even if neither has a pattern."""
    schema = {**schema, "$defs": definitions}
    size, truth = intersection_size(schema), expansion(schema, 1)
    assert size == min(truth, TOO_LARGE) or (size == TOO_LARGE and expansion(schema, 2) == LARGE)
