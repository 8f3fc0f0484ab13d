"""Conversations through the three services: their text is that of their rendered ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import AutoTokenizer

from benchmarks.law import stack_options
from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2
from tests.in_process import InProcessStack
from tests.tiny_models import save_tiny_model

WORDS = [
    "<unk>",
    *[
        "system",
        "user",
        "assistant",
        "tool",
        "tools",
        "call",
        "weather",
        "Bonn",
        "Paris",
        "hello",
        "sun",
        "rain",
        "</s>",
        "quiet",
    ],
]
"""The vocabulary. A text of other words would be lost on the models."""
TEMPLATE = (
    "{% for tool in tools or [] %} tools {{ tool.function.name }} {{ tool.function.description }} {% endfor %}"
    "{% for message in messages %} {{ message.role }} {{ message.content }} "
    "{% for call in message.tool_calls or [] %} call {{ call.function.name }} {{ call.function.arguments.city }} "
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} assistant {{ 'quiet' if quiet else '' }} {% endif %}"
)
USER = {"role": "user", "content": "hello Bonn"}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "sun rain"}}


def calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


ANSWER = {"role": "tool", "content": "rain", "tool_call_id": "c1"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one message": ([USER], {}),
    "turns": ([{"role": "system", "content": "sun"}, USER, {"role": "assistant", "content": "rain"}, USER], {}),
    "tools": ([USER], {"tools": [WEATHER]}),
    "tool calls": ([USER, calling('{"city": "Paris"}'), ANSWER], {"tools": [WEATHER]}),
    "variable": ([USER], {"template_arguments": {"quiet": True}}),
    "continued": ([USER, {"role": "assistant", "content": "sun </s> rain"}], {"continue_final_message": True}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chat")
    target, drafter = (
        save_tiny_model(folder / name, len(WORDS), seed, tokens=WORDS) for name, seed in (("target", 6), ("drafter", 9))
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    return target, drafter


@pytest.fixture(scope="module")
def client(pair: tuple[Path, Path]) -> Iterator[Client]:
    with InProcessStack(stack_options(*pair)) as stack, Client(stack.address) as connected:
        yield connected


def rendered_ids(target: Path, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """Returns what transformers makes of a conversation."""
    continues = options.get("continue_final_message", False)
    parsed = [calling({"city": "Paris"}) if message.get("tool_calls") else message for message in messages]
    tokenizer = AutoTokenizer.from_pretrained(target)
    return list(
        tokenizer.apply_chat_template(
            [{**message, "content": message["content"] or ""} for message in parsed],
            tools=options.get("tools"),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            return_dict=False,
            **options.get("template_arguments", {}),
        )
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversation_generates_what_its_rendered_ids_generate(
    client: Client, pair: tuple[Path, Path], name: str
) -> None:
    messages, options = CONVERSATIONS[name]
    ids = rendered_ids(pair[0], messages, options)
    assert 0 not in ids, "every word counts"
    how = {"max_tokens": 20, "seed": 5, "rejection_sample_method": "coupled"}
    chatted, plain = client.generate(messages, **options, **how), client.generate(ids, **how)
    assert chatted.statistics.num_prompt_tokens == len(ids)
    assert chatted.token_ids == plain.token_ids


def test_each_conversation_is_another_prompt(pair: tuple[Path, Path]) -> None:
    assert len({tuple(rendered_ids(pair[0], *conversation)) for conversation in CONVERSATIONS.values()}) == len(
        CONVERSATIONS
    )


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a name": ([{**USER, "name": "Paris"}], {}, r"messages\[0\].name"),
    "parameters": (
        [USER],
        {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]},
        "parameters of tools",
    ),
    "answer to no call": ([USER, ANSWER], {}, r"messages\[1\].tool_call_id"),
    "unknown variable": ([USER], {"template_arguments": {"loud": True}}, "variables of the chat template are: quiet"),
    "too many messages": ([USER] * 4097, {}, "messages takes at most 4096"),
    "too many tools": ([USER], {"tools": [WEATHER] * 1025}, "tools takes at most 1024"),
    "too many calls": (
        [USER, *[calling("{}")] * 4090, {**calling("{}"), "tool_calls": calling("{}")["tool_calls"] * 7}],
        {},
        "tool_calls takes at most 4096",
    ),
    "more than 4,000,000 characters": ([{"role": "user", "content": "hello " * 700_000}], {}, "4000000 characters"),
    "a name of 4,000,000 characters": ([{**USER, "name": "x" * 4_000_000}], {}, "4000000 characters"),
    "arguments of 4,000,000 characters": ([USER, calling({"city": "x" * 4_000_000})], {}, "4000000 characters"),
    "tools without a conversation": ("hello", {"tools": [WEATHER]}, "need chat messages"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_out_is_an_invalid_argument(client: Client, name: str) -> None:
    messages, options, says = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=says):
        client.generate(messages, max_tokens=5, **options)


def test_field_of_a_newer_client_is_an_invalid_argument(client: Client) -> None:
    """By both methods; the status is looked at, not what the client makes of it."""
    generate = client._channels[0].unary_stream("/draftwire.v1.GatewayService/Generate")
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="hello")])
    chat.messages[0].MergeFromString(b"\xf8\xff\x07\x01")
    with pytest.raises(grpc.RpcError) as refused:
        list(generate(gateway_pb2.GenerateRequest(chat=chat).SerializeToString(), timeout=10))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "field 16383 of ChatMessage is unknown" in refused.value.details()
    get_server = client._channels[0].unary_unary("/draftwire.v1.GatewayService/GetServer")
    with pytest.raises(grpc.RpcError) as refused:
        get_server(b"\xf8\xff\x07\x01", timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
