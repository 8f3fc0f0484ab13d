"""The header `traceparent`: which trace and which span something belongs to. OpenTelemetry reads and writes it.

It is imported where there is a header, and without tracing there is none.

Source: W3C Trace Context, level 1, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MAX_HEADER_LENGTH = 256
"""Characters of a header that is looked at, at most. Those of version 00 have 55; later ones may be longer."""


def parse_traceparent(header: str) -> SpanContext | None:
    """Returns the span that a header names; None if it says nothing that can be understood.

    Of versions after 00 the parts that 00 has are read, as the standard wants it. The library would take blanks at both
    ends, too, and log what is too long.
    """
    if not header or len(header) > MAX_HEADER_LENGTH or header != header.strip():
        return None
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    span = get_current_span(context).get_span_context()
    return span if span.is_valid else None


def parse_own_traceparent(header: str) -> SpanContext | None:
    """Returns the span that a header of version 00 names, which services take from each other; None of all others."""
    return parse_traceparent(header) if header.startswith("00-") else None


def traceparent_of(span: SpanContext) -> str:
    """Returns the header that names a span; an empty one of a span that nobody records, which has no ids."""
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(NonRecordingSpan(span)))
    return headers.get("traceparent", "")
