"""Conversations through the three services: their text is that of their rendered ids."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import AutoTokenizer

from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2
from tests.in_process import InProcessStack

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


@pytest.fixture
def client(chat_stack: InProcessStack) -> Iterator[Client]:
    with Client(chat_stack.address) as connected:
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


def test_conversation_generates_what_its_rendered_ids_generate(client: Client, chat_pair: tuple[Path, Path]) -> None:
    how = {"max_tokens": 20, "seed": 5, "rejection_sample_method": "coupled"}
    rendered = set()
    for name, (messages, options) in CONVERSATIONS.items():
        ids = rendered_ids(chat_pair[0], messages, options)
        assert 0 not in ids, "every word counts"
        chatted, plain = client.generate(messages, **options, **how), client.generate(ids, **how)
        assert chatted.statistics.num_prompt_tokens == len(ids), name
        assert chatted.token_ids == plain.token_ids, name
        rendered.add(tuple(ids))
    assert len(rendered) == len(CONVERSATIONS), "each is another prompt"


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


def test_what_is_left_out_is_an_invalid_argument(client: Client) -> None:
    for name, (messages, options, says) in REFUSED.items():
        with pytest.raises(InvalidRequestError) as refused:
            client.generate(messages, max_tokens=5, **options)
        assert re.search(says, str(refused.value)), name


def test_field_of_a_newer_client_is_an_invalid_argument(client: Client) -> None:
    """By both methods; the status is looked at, not what the client makes of it."""
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="hello")])
    chat.messages[0].MergeFromString(b"\xf8\xff\x07\x01")
    (channel,) = client._channels
    generate = channel.unary_stream("/draftwire.v1.GatewayService/Generate")
    get_server = channel.unary_unary("/draftwire.v1.GatewayService/GetServer")
    for ask, says in (
        (lambda: list(generate(gateway_pb2.GenerateRequest(chat=chat).SerializeToString(), timeout=10)), "ChatMessage"),
        (lambda: get_server(b"\xf8\xff\x07\x01", timeout=10), "GetServerRequest"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            ask()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"field 16383 of {says} is unknown" in refused.value.details()
