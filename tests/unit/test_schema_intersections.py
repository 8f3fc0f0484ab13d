"""What meets in one string is counted, wherever in the schema it stands."""

import json
from typing import Any

from cases import every

from draftwire.requests.schema_intersections import FORMAT_LENGTH, MAX_INTERSECTION, intersection_size

P = {"pattern": "12345"}
Q = {"pattern": "123"}
TOO_LARGE = MAX_INTERSECTION + 1


def properties(**given: Any) -> dict[str, Any]:
    return {"type": "object", "properties": given}


def listed(*one: Any) -> dict[str, Any]:
    return {"allOf": list(one)}


TO_A, TO_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
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
