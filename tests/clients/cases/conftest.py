"""What all clients are asked. Runs in the clients' own environment."""

import os

import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["DRAFTWIRE_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return "target"


def check_person(found: dict) -> None:
    """Checks arguments against `PERSON`."""
    assert found.keys() == {"name", "age"}
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert 0 <= found["age"] <= 120
