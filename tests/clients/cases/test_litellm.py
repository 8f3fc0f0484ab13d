"""litellm."""

import json

import litellm
import pytest
from conftest import PERSON, check_person

ASKED = [{"role": "user", "content": "Who is it?"}]
TOOLS = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]


@pytest.fixture(scope="module")
def asked(url: str, model: str) -> dict:
    return {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": ASKED, "max_tokens": 200}


def test_text(asked: dict) -> None:
    assert litellm.completion(**asked).choices[0].message.content
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "max_tokens": 10**6})


def test_streaming(asked: dict) -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))


def test_tools(asked: dict) -> None:
    answer = litellm.completion(**asked, tools=TOOLS, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        check_person(json.loads(call.function.arguments))


def test_streamed_tools(asked: dict) -> None:
    choice = {"type": "function", "function": {"name": "person"}}
    chunks = list(litellm.completion(**asked, tools=TOOLS, tool_choice=choice, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    check_person(json.loads(call.function.arguments))


def test_schema(asked: dict) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    check_person(json.loads(litellm.completion(**asked, response_format=wanted).choices[0].message.content))
