"""`/openapi.json`: every route and every parameter is described, and what is described is what is taken."""

import asyncio
import json
import time
from typing import Any

import jsonschema
import pytest
from http_fakes import Gate, client_of
from pydantic import BaseModel

from draftwire.errors import NoRoomError
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http import app as app_module
from draftwire_gateway.http.app import make_app
from draftwire_gateway.http.body import ChatBody, CompletionBody, read
from draftwire_gateway.http.error_bodies import body_of
from draftwire_gateway.http.openapi_document import openapi_document
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.response_models import ErrorBody

NOT_DESCRIBED = {"/metrics", "/openapi.json"}
USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMPLETIONS: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": "a"}, True),
    ({"prompt": [1, 2]}, True),
    ({"prompt": ["a", "b"], "stop": "x"}, True),
    ({"prompt": [[1], [2]], "stop": ["x", "y"], "logit_bias": {"3": 1.5}}, True),
    ({"prompt": "a", "structured_output": {"json": {"type": "object"}}, "seed": 2**63, "temperature": 0}, True),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}, True),
    ({"prompt": {"a": 1}}, False),
    ({"prompt": "a", "temperture": 1.0}, False),
    ({"prompt": "a", "temperature": "0.5"}, False),
    ({"prompt": "a", "n": 1.5}, False),
    ({"prompt": "a", "logit_bias": [1]}, False),
    ({"prompt": "a", "structured_output": {"json": "text"}}, False),
    ({"prompt": "a", "structured_output": {"regexp": "a"}}, False),
    ({}, False),
]
CHATS: list[tuple[dict[str, Any], bool]] = [
    ({"messages": [USER]}, True),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [TOOL]}, True),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}], "chat_template_kwargs": {"quiet": True}}, True),
    ({"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, True),
    ({"messages": "hello"}, False),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ({"messages": [{**USER, "colour": "red", "audio": None}]}, True),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, False),
    ({"messages": [USER], "tool_choice": "sometimes"}, False),
]


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    return {**openapi_document(), "$ref": f"#/components/schemas/{kind.__name__}"}


async def test_document_is_served_to_everybody_and_describes_every_route() -> None:
    app = make_app(GatewayCore(GatewayConfig(), None), list, Access(None), Gate(), {})  # type: ignore[arg-type]
    async with client_of(app, "http://localhost") as client:
        answer = await client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    document = answer.json()
    assert document == openapi_document()
    assert document["openapi"].startswith("3.1")
    served = {getattr(route, "path", "").replace(":path", "") for route in app.routes}
    assert set(document["paths"]) == served - NOT_DESCRIBED


async def test_document_is_made_once_for_requests_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first of them is not waited for."""
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        time.sleep(0.05)
        return {"openapi": "3.1"}

    monkeypatch.setattr(app_module, "openapi_document", make)
    app = make_app(GatewayCore(GatewayConfig(), None), list, Access(None), Gate(), {})  # type: ignore[arg-type]
    async with client_of(app, "http://localhost") as client:
        first = asyncio.create_task(client.get("/openapi.json"))
        while not made:
            await asyncio.sleep(0.001)
        first.cancel()
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(8)))
    assert [answer.json() for answer in answers] == [{"openapi": "3.1"}] * 8
    assert len(made) == 1


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_parameter_is_described(kind: type[BaseModel]) -> None:
    described = openapi_document()["components"]["schemas"][kind.__name__]
    assert set(described["properties"]) == {field.alias or name for name, field in kind.model_fields.items()}
    assert described["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "said", "is_good"),
    [*((CompletionBody, *case) for case in COMPLETIONS), *((ChatBody, *case) for case in CHATS)],
)
def test_what_is_described_is_what_is_taken(kind: Any, said: dict[str, Any], is_good: bool) -> None:
    body = {"model": "m", **said}
    assert jsonschema.Draft202012Validator(schema_of(kind)).is_valid(body) == is_good
    try:
        read(kind, json.dumps(body).encode())
    except RefusedError:
        assert not is_good
    else:
        assert is_good


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document()
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])
    assert {"ChatCompletionChunk", "CompletionChunk", "ErrorBody"} <= names


@pytest.mark.parametrize("error", [NoRoomError("full"), RefusedError(400, "no", code="x", param="n"), KeyError("x")])
def test_errors_are_as_they_are_described(error: Exception) -> None:
    ErrorBody.model_validate_json(body_of(error), strict=True)
