"""The header `traceparent`: what is understood is what W3C Trace Context says, and all else is nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from draftwire.runtime.traceparent import (
    MAX_HEADER_LENGTH,
    parse_own_traceparent,
    parse_traceparent,
    traceparent_of,
)
from draftwire.runtime.tracing import sampled
from tests.trace_collector import span_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXTS = st.builds(span_context, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(CONTEXTS)
def test_what_is_written_is_read(context: SpanContext) -> None:
    header = traceparent_of(context)
    assert (len(header), parse_traceparent(header)) == (55, context)
    assert parse_own_traceparent(header) == context


def test_span_that_nobody_records_has_no_header() -> None:
    assert traceparent_of(INVALID_SPAN_CONTEXT) == ""


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("fe", False), ("ff", True)]
)
def test_last_bit_says_whether_spans_are_recorded(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert (context.trace_id, context.span_id) == (int(TRACE, 16), int(SPAN, 16))  # type: ignore[union-attr]
    assert context.trace_flags.sampled is is_sampled  # type: ignore[union-attr]


@pytest.mark.parametrize("rest", ["", "-", "-what-comes-later"])
def test_later_versions_are_read_as_far_as_they_are_known(rest: str) -> None:
    header = f"01-{TRACE}-{SPAN}-01{rest}"
    assert parse_traceparent(header) == span_context(int(TRACE, 16), int(SPAN, 16))
    assert parse_own_traceparent(header) is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-011",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-" + "x" * MAX_HEADER_LENGTH,
    ],
)
def test_header_that_cannot_be_understood_says_nothing(header: str) -> None:
    assert parse_traceparent(header) is None
    assert parse_own_traceparent(header) is None


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}-?.*"))
def test_no_header_raises(header: str) -> None:
    context = parse_traceparent(header)
    assert context is None or (context.trace_id and context.span_id)


def test_session_is_traced_if_its_span_is_recorded() -> None:
    assert sampled(f"00-{TRACE}-{SPAN}-01") == span_context(int(TRACE, 16), int(SPAN, 16))
    assert sampled(f"00-{TRACE}-{SPAN}-00") is None
    assert sampled("") is None
