"""Objects of schemas have declared properties alone, where that changes nothing else."""

import json
from typing import Any

import jsonschema
import pytest

from draftwire_gateway.http.declared_properties import closed

TEXT = {"type": "string"}
PET: dict[str, Any] = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
SHUT = {**PET, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PET, SHUT),
        ({"type": "array", "items": PET}, {"type": "array", "items": SHUT}),
        ({"anyOf": [PET, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"Pet": PET}, "$ref": "#/$defs/Pet"}, {"$defs": {"Pet": SHUT}, "$ref": "#/$defs/Pet"}),
        (
            {"type": "object", "properties": {"pet": {"allOf": [PET], "title": "t"}}},
            {"type": "object", "properties": {"pet": {"allOf": [SHUT], "title": "t"}}, "additionalProperties": False},
        ),
        ({"type": "object", "additionalProperties": PET}, {"type": "object", "additionalProperties": SHUT}),
    ],
)
def test_objects_that_say_nothing_of_other_properties_have_none(given: Any, expected: Any) -> None:
    assert json.loads(closed(json.dumps(given))) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**PET, "additionalProperties": True},
        {**PET, "additionalProperties": TEXT},
        {**PET, "patternProperties": {"a": TEXT}},
        {"type": "object", "properties": {"a": TEXT}, "required": ["b"]},
        {"allOf": [PET, {"properties": {"legs": {"type": "integer"}}}]},
        {**PET, "anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}}]},
        {**PET, "if": {"properties": {"name": {"const": "x"}}}, "then": {"properties": {"b": TEXT}}},
        {"$defs": {"A": PET}, "properties": {"b": TEXT}, "$ref": "#/$defs/A"},
    ],
)
def test_schema_that_may_mean_others_stays_as_it_is(schema: Any) -> None:
    assert json.loads(closed(json.dumps(schema))) == schema


def test_what_a_closed_schema_takes_the_open_one_takes_too() -> None:
    for given in ({"name": "x"}, {"name": "x", "odd": 1}, {}):
        takes = [not list(jsonschema.Draft202012Validator(one).iter_errors(given)) for one in (PET, SHUT)]
        assert takes[0] or not takes[1]
    large = json.dumps({**PET, "title": "x" * 10**6})
    assert closed(large) == large
