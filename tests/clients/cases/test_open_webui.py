"""Requests as Open WebUI makes them of an OpenAI-compatible connection; the page, of 1 GB, is not installed."""

import json

import openai
import pytest

KEY = "none"
ASKED = {"role": "user", "content": "Who is it?"}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY)


def test_text(client: openai.OpenAI, model: str) -> None:
    """The list of models, and the title that is asked for after the first answer."""
    assert model in [one.id for one in client.models.list()]
    messages = [{"role": "user", "content": "### Task:\nGenerate a concise title for the chat history."}]
    title = client.chat.completions.create(model=model, messages=messages, stream=False, max_completion_tokens=50)
    assert title.choices[0].message.content is not None


def test_streaming(client: openai.OpenAI, model: str) -> None:
    """With the usage, and what a user may set in the page's advanced parameters; then a second turn."""
    chosen = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 42}
    chosen |= {"stop": ["\n\n\n"], "max_tokens": 64, "logit_bias": {"5": -100}}
    extended = {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    asked = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **chosen}
    messages = [{"role": "system", "content": "Be short."}, ASKED]
    for _ in range(2):
        chunks = list(client.chat.completions.create(**asked, messages=messages, extra_body=extended))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens > 0
        parts = [{"type": "text", "text": "And then?"}]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": parts}]


def test_streamed_tools(client: openai.OpenAI, model: str) -> None:
    """Native function calling: a call, and the answer to its result."""
    properties = {"name": {"type": "string", "maxLength": 12}}
    schema = {"type": "object", "properties": properties, "required": ["name"]}
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": schema}}]
    asked = {"model": model, "stream": True, "tools": tools, "max_tokens": 200}
    name = arguments = ident = ""
    for chunk in client.chat.completions.create(**asked, messages=[ASKED], tool_choice="required"):
        for call in (chunk.choices[0].delta.tool_calls or [])[:1] if chunk.choices else []:
            name, ident = name or call.function.name, ident or call.id
            arguments += (call.function.arguments or "") * (call.index == 0)
    assert name == "look_up"
    assert json.loads(arguments).keys() == {"name"}
    call = {"id": ident, "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}
    answered = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": ident, "content": "nobody"},
    ]
    assert list(client.chat.completions.create(**asked, messages=answered, tool_choice="none"))
