"""Tables that convert dataclasses to messages: what they copy, what they leave out, and what they refuse to guess."""

from dataclasses import dataclass, replace
from enum import Enum

import pytest

from draftwire.errors import InvalidRequestError
from draftwire.runtime.codec import Codec, Conversion, enumeration, members_of
from draftwire.v1 import session_pb2, verifier_pb2


@dataclass(frozen=True)
class Waste:
    next_is_held: bool = False
    held_bytes: int = 0


NO_WASTE = Waste()


@dataclass(frozen=True)
class Known:
    waste: Waste = NO_WASTE


@dataclass(frozen=True)
class Sources:
    token_ids: tuple[int, ...]
    verify_us: int = 0
    waste: Waste | None = None

    @property
    def num_draft_tokens(self) -> int:
        return 7


@dataclass(frozen=True)
class Wanted:
    temperature: float = 1.0
    top_k: int | None = None


class Kind(Enum):
    PLAIN = "plain"
    NO_SUCH = "none"


SOURCES = Codec(Sources, session_pb2.Verdict)
WANTED = Codec(Wanted, session_pb2.SamplingParameters)


def test_fields_are_those_of_the_same_name_and_durations_are_named_longer() -> None:
    message = SOURCES.encode(Sources((1, 300), 5))
    assert message == session_pb2.Verdict(token_ids=[1, 300], verify_duration_us=5, num_draft_tokens=7)
    assert SOURCES.decode(message) == Sources((1, 300), 5), "a property is written, and not read"


@pytest.mark.parametrize("waste", [Waste(held_bytes=3), Waste(True), Waste(True, 3)])
def test_part_is_there_if_any_of_its_fields_is_set(waste: Waste) -> None:
    whole = Sources((1,), waste=waste)
    message = SOURCES.encode(whole)
    assert (message.next_is_held, message.held_bytes) == (waste.next_is_held, waste.held_bytes)
    assert SOURCES.decode(message) == whole
    assert SOURCES.decode(SOURCES.encode(replace(whole, waste=Waste()))).waste is None
    assert SOURCES.encode(replace(whole, waste=Waste())) == SOURCES.encode(replace(whole, waste=None))


def test_part_that_is_its_default_is_left_out_of_the_message() -> None:
    given = Conversion(lambda size: size + 1, lambda size: size - 1)
    codec = Codec(Known, session_pb2.Verdict, {"held_bytes": "queue_duration_us"}, held_bytes=given)
    assert codec.encode(Known(Waste())) == session_pb2.Verdict()
    assert codec.decode(session_pb2.Verdict()).waste is NO_WASTE
    known = Known(Waste(True, 3))
    assert codec.encode(known) == session_pb2.Verdict(next_is_held=True, queue_duration_us=4)
    assert codec.decode(codec.encode(known)) == known


def test_dataclass_is_a_part_where_the_message_has_a_number_of_its_name() -> None:
    part = dataclass(type("Part", (), {"__annotations__": {"num_draft_tokens": int, "is_ahead": bool}}))
    whole = dataclass(type("Whole", (), {"__annotations__": {"num_draft_tokens": part}}))
    codec = Codec(whole, session_pb2.Verdict)
    message = session_pb2.Verdict(num_draft_tokens=2, is_ahead=True)
    assert codec.encode(whole(part(2, True))) == message
    assert codec.decode(message) == whole(part(2, True))


def test_absent_field_is_none_or_has_the_dataclass_default() -> None:
    assert WANTED.decode(session_pb2.SamplingParameters()) == Wanted()
    assert WANTED.decode(session_pb2.SamplingParameters(temperature=0.0, top_k=0)) == Wanted(0.0, 0)
    message = WANTED.encode(Wanted(0.0))
    assert (message.HasField("temperature"), message.HasField("top_k")) == (True, False)


def test_check_sees_what_is_read_and_own_conversion_both_ways() -> None:
    def few(values: tuple[int, ...]) -> tuple[int, ...]:
        if len(values) > 1:
            raise InvalidRequestError("too many")
        return values

    codec = Codec(
        Sources,
        session_pb2.Verdict,
        checks={"token_ids": few},
        verify_us=Conversion(lambda value: value + 1, lambda value: value - 1),
    )
    assert codec.encode(Sources((1, 2), 5)).verify_duration_us == 6, "what is written is ours"
    assert codec.decode(codec.encode(Sources((1,), 5))) == Sources((1,), 5)
    with pytest.raises(InvalidRequestError, match="too many"):
        codec.decode(codec.encode(Sources((1, 2), 5)))


def test_enumeration_goes_by_names_and_refuses_other_numbers() -> None:
    members = members_of(Kind, session_pb2.ExtraTokenKind)
    assert members == {session_pb2.EXTRA_TOKEN_KIND_PLAIN: Kind.PLAIN}
    conversion = enumeration(members, "no kind {}")
    assert conversion.decode(conversion.encode(Kind.PLAIN)) is Kind.PLAIN
    for number in (0, 99):
        with pytest.raises(InvalidRequestError, match=f"^no kind {number}$"):
            conversion.decode(number)


def test_field_that_nothing_determines_is_an_error_when_the_table_is_made() -> None:
    with pytest.raises(TypeError, match="Fence has no field"):
        Codec(Sources, session_pb2.Fence)
    with pytest.raises(TypeError, match="nothing says how"):
        Codec(dataclass(type("Odd", (), {"__annotations__": {"fence": complex}})), verifier_pb2.PlainRun)
