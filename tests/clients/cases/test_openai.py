"""The openai package."""

import json

import openai
import pytest
from conftest import PERSON, check_person

ASKED = [{"role": "user", "content": "Who is it?"}]
TOOLS = [{"type": "function", "function": {"name": "person", "parameters": PERSON, "strict": True}}]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url)


def test_text(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=ASKED, max_tokens=16)
    assert answer.choices[0].message.content


def test_streaming(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(model=model, messages=ASKED, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tools(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        check_person(json.loads(call.function.arguments))


def test_streamed_tools(client: openai.OpenAI, model: str) -> None:
    asked = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "person"}}}
    with client.chat.completions.stream(model=model, messages=ASKED, **asked) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    check_person(json.loads(call.function.arguments))


def test_schema(client: openai.OpenAI, model: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=ASKED, response_format=wanted)
    check_person(json.loads(answer.choices[0].message.content))


def test_responses(client: openai.OpenAI, model: str) -> None:
    flat = [{"type": "function", "name": "person", "parameters": PERSON, "strict": True}]
    answer = client.responses.create(model=model, input="Who is it?", tools=flat, tool_choice="required")
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check_person(json.loads(call.arguments))
    text = client.responses.create(model=model, input="Who is it?", max_output_tokens=16)
    assert text.output_text
