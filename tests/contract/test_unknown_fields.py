"""A request of a newer client is refused, whichever of its messages says what this version does not know."""

from contextlib import nullcontext
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from draftwire.errors import InvalidRequestError
from draftwire.runtime.unknown_fields import MAX_MESSAGES, refuse_unknown_fields
from draftwire.v1 import gateway_pb2, session_pb2

UNKNOWN = b"\xf8\xff\x07\x01"
"""Field 16383, of the value 1."""


def paths(descriptor: Descriptor, seen: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns how to come to each message within a message, by names of fields."""
    found: list[tuple[str, ...]] = [()]
    if descriptor.name in seen:
        return found
    for field in descriptor.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            found += [(field.name, *path) for path in paths(field.message_type, (*seen, descriptor.name))]
    return found


def made(kind: type[Message], path: tuple[str, ...]) -> Any:
    """Returns a message with an unknown field at the end of the path; repeated fields have a good message before it."""
    message: Any = kind()
    inner = message
    for name in path:
        field = getattr(inner, name)
        if inner.DESCRIPTOR.fields_by_name[name].is_repeated:
            field.add()
            field = field.add()
        field.SetInParent()
        inner = field
    inner.MergeFromString(UNKNOWN)
    return kind.FromString(message.SerializeToString())


PATHS = paths(gateway_pb2.GenerateRequest.DESCRIPTOR)


def test_paths_lead_to_every_nested_message() -> None:
    assert {".".join(path) for path in PATHS} >= {
        "",
        "sampling",
        "chat.messages.tool_calls",
        "prompts.prompts.chat.tools",
    }


@pytest.mark.parametrize(
    ("kind", "path"), [(gateway_pb2.GetServerRequest, ()), *((gateway_pb2.GenerateRequest, path) for path in PATHS)]
)
def test_unknown_field_is_refused_wherever_it_is(kind: type[Message], path: tuple[str, ...]) -> None:
    request = made(kind, path)
    inner: Any = request
    for name in path:
        field = getattr(inner, name)
        inner = field[-1] if inner.DESCRIPTOR.fields_by_name[name].is_repeated else field
    with pytest.raises(InvalidRequestError, match=f"field 16383 of {inner.DESCRIPTOR.name} is unknown"):
        refuse_unknown_fields(request)


def test_what_is_known_passes() -> None:
    sampling = session_pb2.SamplingParameters(logit_bias={1: 1.0}, allowed_token_ids=[1], temperature=0.5)
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage()] * 4096, tools=[gateway_pb2.Tool()])
    refuse_unknown_fields(gateway_pb2.GenerateRequest(chat=chat, sampling=sampling, seed=1, stop=["a"]))


@pytest.mark.parametrize("too_many", [0, 1])
def test_messages_that_are_looked_at_are_limited(too_many: int) -> None:
    """The request, its conversation and the messages of that."""
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage()] * (MAX_MESSAGES - 2 + too_many))
    with pytest.raises(InvalidRequestError, match="messages") if too_many else nullcontext():
        refuse_unknown_fields(gateway_pb2.GenerateRequest(chat=chat))
