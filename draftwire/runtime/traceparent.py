"""Parsing and formatting of the header `traceparent`, which names a trace and a span.

OpenTelemetry is imported only if there is a header; without tracing there is none.

Source: W3C Trace Context, level 1, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MAX_HEADER_LENGTH = 256
"""Characters; longer headers are ignored. Those of version 00 have 55; later ones may be longer."""


def parse_traceparent(header: str) -> SpanContext | None:
    """Parses a header of a client; None if it is malformed.

    Of versions after 00, the parts that 00 has are parsed, as the standard demands. Surrounding blanks and long headers
    are refused here, because the library would accept the former and log the latter.
    """
    if not header or len(header) > MAX_HEADER_LENGTH or header != header.strip():
        return None
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    span = get_current_span(context).get_span_context()
    return span if span.is_valid else None


def parse_own_traceparent(header: str) -> SpanContext | None:
    """Parses a header of another service: only version 00 is accepted; None otherwise."""
    return parse_traceparent(header) if header.startswith("00-") else None


def traceparent_of(span: SpanContext) -> str:
    """Formats the header for a span; empty for a span that is not recorded, which has no ids."""
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(NonRecordingSpan(span)))
    return headers.get("traceparent", "")
