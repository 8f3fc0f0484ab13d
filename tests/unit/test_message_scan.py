"""Fields of a message are counted on its bytes, in one pass that ends at the limit."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from draftwire.errors import InvalidRequestError
from draftwire.runtime import message_scan
from draftwire.runtime.message_scan import MAX_FIELDS, SCANNED_BYTES, check_num_fields
from draftwire.v1 import gateway_pb2, session_pb2

REQUEST: Descriptor = gateway_pb2.GenerateRequest.DESCRIPTOR
EMPTY_CHOICE = b"\xb2\x01\x00"
"""A `generated_choices` without content."""


def num_fields(message: Message) -> int:
    """Counts as the scan does, on the decoded message: a packed list is one field."""
    found = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            found += len(value) if field.is_repeated and not field.is_packed else 1
        elif field.message_type.GetOptions().map_entry:
            found += 3 * len(value)  # an entry, its key and its value
        else:
            inner = value if field.is_repeated else [value]
            found += sum(1 + num_fields(one) for one in inner)
    return found


def largest() -> gateway_pb2.GenerateRequest:
    """Returns a request with something in every kind of field."""
    calls = [gateway_pb2.ToolCall(id="a", name="b", arguments="{}")] * 3
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="x", tool_calls=calls)] * 5)
    prompts = [gateway_pb2.Prompt(chat=chat), gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=range(500)))]
    sampling = session_pb2.SamplingParameters(temperature=0.5, logit_bias={1: 1.0, 2: -1.0}, allowed_token_ids=[1, 2])
    return gateway_pb2.GenerateRequest(
        prompts=gateway_pb2.PromptList(prompts=prompts), sampling=sampling, stop=["a", "b"], seed=2**63, num_choices=2
    )


def test_fields_are_counted_at_every_depth() -> None:
    request = largest()
    assert num_fields(request) > 60
    assert message_scan._count(request.SerializeToString(), REQUEST) == num_fields(request)


@pytest.mark.parametrize("too_many", [0, 1])
def test_large_message_is_refused_above_the_limit_and_not_at_it(too_many: int) -> None:
    data = EMPTY_CHOICE * (MAX_FIELDS + too_many)
    assert len(data) >= SCANNED_BYTES
    if too_many:
        with pytest.raises(InvalidRequestError, match=f"at most {MAX_FIELDS} fields"):
            check_num_fields(data, REQUEST)
    else:
        check_num_fields(data, REQUEST)


def test_scan_ends_at_the_limit_however_large_the_message_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in numbers that are read: twice the message takes no more of them."""
    read, num_read = message_scan._varint, 0

    def counted(data: bytes, at: int) -> tuple[int, int]:
        nonlocal num_read
        num_read += 1
        return read(data, at)

    monkeypatch.setattr(message_scan, "_varint", counted)
    monkeypatch.setattr(message_scan, "MAX_FIELDS", 1000)
    costs = []
    for size in (SCANNED_BYTES, 2 * SCANNED_BYTES):
        num_read = 0
        with pytest.raises(InvalidRequestError, match="fields"):
            check_num_fields(EMPTY_CHOICE * size, REQUEST)
        costs.append(num_read)
    assert costs == [2000, 2000]


def test_long_lists_and_texts_are_one_field_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_scan, "MAX_FIELDS", 4)
    ids = gateway_pb2.TokenIds(ids=range(SCANNED_BYTES))
    for request in (
        gateway_pb2.GenerateRequest(token_ids=ids, seed=1),
        gateway_pb2.GenerateRequest(text="x" * SCANNED_BYTES),
    ):
        check_num_fields(request.SerializeToString(), REQUEST)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0b" + bytes(SCANNED_BYTES),  # a group
        b"\x0a\xff\xff\xff\x7f" + bytes(SCANNED_BYTES),  # a text beyond the end
        b"\xff" * SCANNED_BYTES,  # a number without end
        EMPTY_CHOICE * SCANNED_BYTES + b"\x0a",
        b"\x12\x02\x0a\x7f" + b"\x48\x01" * SCANNED_BYTES,  # ids that are longer than what holds them
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_scan, "MAX_FIELDS", 10**9)
    with pytest.raises(InvalidRequestError, match="the bytes are not those of a message"):
        check_num_fields(data, REQUEST)


@given(st.binary(max_size=60))
def test_whatever_the_decoder_takes_the_scan_takes_too_but_for_groups(data: bytes) -> None:
    try:
        gateway_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        message_scan._count(data, REQUEST)
    except IndexError:
        assert _has_group(data)


def _has_group(data: bytes) -> bool:
    """Whether a byte could begin a group; groups are of no use to anybody."""
    return any(byte & 7 in (3, 4) for byte in data)


def test_small_message_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such are those of every round."""

    def fail(*_: Any) -> int:
        raise AssertionError

    monkeypatch.setattr(message_scan, "_count", fail)
    check_num_fields(EMPTY_CHOICE * (SCANNED_BYTES // len(EMPTY_CHOICE) - 1), REQUEST)
