"""Fields of a message are counted on its bytes, in one pass that ends at the limit."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from draftwire.errors import InvalidRequestError
from draftwire.runtime import message_scan
from draftwire.runtime.message_scan import MAX_FIELDS, SCANNED_BYTES, check_num_fields
from draftwire.v1 import gateway_pb2, session_pb2

REQUEST: Descriptor = gateway_pb2.GenerateRequest.DESCRIPTOR
EMPTY_CHOICE = b"\xb2\x01\x00"
"""A `generated_choices` without content."""
GROUP = 3
"""Wire type of its begin."""


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


VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.just(True),
    FieldDescriptor.CPPTYPE_FLOAT: st.just(0.5),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(0.1, 9.0),
    FieldDescriptor.CPPTYPE_ENUM: st.just(1),
    **dict.fromkeys((FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32), st.integers(1, 2**31 - 1)),
    **dict.fromkeys((FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64), st.integers(1, 2**63 - 1)),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Returns values of a field that is no message; none of them is left out of the encoded message."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(min_size=1, max_size=4)
    return VALUES.get(field.cpp_type, st.text("a\u0100", min_size=1, max_size=4))


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor = REQUEST, depth: int = 4) -> Message:
    """Draws messages of a type, with others within them."""
    made: Any = GetMessageClass(kind)()
    for field in draw(st.lists(st.sampled_from(list(kind.fields)), max_size=4)) if kind.fields else []:
        of_message, count = field.message_type, draw(st.integers(1, 3)) if field.is_repeated else 1
        held = getattr(made, field.name)
        if of_message is not None and of_message.GetOptions().map_entry:
            key, value = of_message.fields
            held.update(draw(st.dictionaries(values(key), values(value), max_size=3)))
        elif of_message is None and field.is_repeated:
            held.extend(draw(st.lists(values(field), min_size=count, max_size=count)))
        elif of_message is None:
            setattr(made, field.name, draw(values(field)))
        elif depth:
            for _ in range(count):
                inner = held.add() if field.is_repeated else held
                inner.SetInParent()
                inner.CopyFrom(draw(messages(of_message, depth - 1)))
    return made  # type: ignore[no-any-return]


@given(messages())
def test_fields_of_any_message_are_counted(message: Message) -> None:
    assert message_scan._count(message.SerializeToString(), REQUEST) == num_fields(message)


@given(messages(), st.binary(max_size=30))
def test_whatever_the_decoder_takes_the_scan_takes_too_but_for_groups(message: Message, more: bytes) -> None:
    data = message.SerializeToString() + more
    try:
        decoded = gateway_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        assert message_scan._count(data, REQUEST) >= num_fields(message)
    except IndexError:
        assert _has_group(decoded)


def _has_group(message: Message) -> bool:
    """Whether a message holds a group, which is of no use to anybody."""
    unknown: Any = UnknownFieldSet(message)
    if any(field.wire_type == GROUP for field in unknown):
        return True
    inner = [value for field, value in message.ListFields() if field.message_type is not None]
    held = [one for value in inner for one in ([value] if isinstance(value, Message) else value)]
    return any(_has_group(one) for one in held if isinstance(one, Message))


def test_small_message_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such are those of every round."""

    def fail(*_: Any) -> int:
        raise AssertionError

    monkeypatch.setattr(message_scan, "_count", fail)
    check_num_fields(EMPTY_CHOICE * (SCANNED_BYTES // len(EMPTY_CHOICE) - 1), REQUEST)
