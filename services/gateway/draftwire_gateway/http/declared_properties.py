"""Schemas of tools and answers, closed: objects have the properties that they declare, and no others.

JSON Schema allows any further property where `additionalProperties` is left out, as pydantic and most people leave it,
and a small model then invents some. OpenAI's strict mode wants it to be false everywhere; here it is taken as false
where it is left out and that changes nothing but this. `structured_output` takes a schema to the letter.
"""

import json
from typing import Any

from draftwire.requests.structured_output import MAX_FORM_BYTES

COMBINING = frozenset({"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties"})
"""Keywords with which an object's properties may be declared at several places: a schema with one stays as it is."""
BRANCHES = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
"""Keywords of which that holds beside properties."""
STATED = frozenset({"additionalProperties", "patternProperties"})
WITH_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
WITH_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")


def closed(text: str) -> str:
    """Returns a schema, as JSON, whose objects have declared properties alone; as it is one that is no object, or so
    large that it is refused.
    """
    if len(text) > MAX_FORM_BYTES:
        return text
    schema = json.loads(text)
    if not isinstance(schema, dict) or _combines(schema):
        return text
    _close(schema)
    return json.dumps(schema, ensure_ascii=False)


def _combines(value: Any) -> bool:
    """Whether a keyword of `COMBINING` is anywhere in it; a property of such a name counts too."""
    if isinstance(value, list):
        return any(map(_combines, value))
    if not isinstance(value, dict):
        return False
    names, branches = value.keys() & COMBINING, value.keys() & BRANCHES
    if isinstance(value.get("allOf"), list) and len(value["allOf"]) == 1:  # as pydantic writes a reference with a title
        names -= {"allOf"}
    return bool(names or ("properties" in value and branches)) or any(map(_combines, value.values()))


def _close(schema: Any) -> None:
    """Closes a schema and those within it, in place."""
    if not isinstance(schema, dict):
        return
    declared, required = schema.get("properties"), schema.get("required", [])
    can_be = isinstance(declared, dict) and isinstance(required, list) and all(name in declared for name in required)
    if can_be and not STATED & schema.keys():
        schema["additionalProperties"] = False
    for name in WITH_SCHEMAS_BY_NAME:
        of_names = schema.get(name)
        for one in of_names.values() if isinstance(of_names, dict) else ():
            _close(one)
    for name in WITH_SCHEMAS:
        listed = schema.get(name)
        for one in listed if isinstance(listed, list) else ():
            _close(one)
    for name in ("items", "additionalProperties"):
        _close(schema.get(name))
