"""Interface for the spans of requests. See docs/tracing.md.

If tracing is off, the tracer is None: callers check for that, and OpenTelemetry's SDK is not imported. Spans carry
numbers and names, never prompts, texts or token ids.
"""

from __future__ import annotations  # OpenTelemetry's types are imported for the type checker only

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from draftwire.runtime.traceparent import parse_own_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

Attributes = Mapping[str, bool | int | float | str]
"""Integers must fit into signed 64 bits; session ids, which may not, are written as text."""

PREFIX = "draftwire."
"""Prefix of attribute names."""


class TraceSpan(Protocol):
    """An open span."""

    @property
    def context(self) -> SpanContext:
        """Context of the span: the parent for its children."""

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Adds an event at the current time."""

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Ends the span at the current time.

        Args:
            attributes: added to those of the start.
            error: reason of a failure; empty on success.
        """


class Tracer(Protocol):
    """Makes spans. No method but `close` waits for the collector, and none fails if it is unreachable."""

    def start(
        self, name: str, parent: SpanContext | None, attributes: Attributes, *, is_entry: bool = False
    ) -> TraceSpan:
        """Starts a span at the current time.

        Args:
            name: of the operation.
            parent: parent span; None starts a trace.
            attributes: of the span.
            is_entry: whether the span is a client's request (span kind SERVER).
        """

    def record(
        self, name: str, parent: SpanContext, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        """Records a completed span.

        Args:
            name: of the operation.
            parent: parent span.
            started_at: by `time.perf_counter`, seconds.
            ended_at: the same.
            attributes: of the span.
        """

    async def close(self) -> None:
        """Flushes the queued spans, for a few seconds at most, and shuts down."""


def sampled(traceparent: str) -> SpanContext | None:
    """Returns the parent span of a session; None if its trace is not sampled."""
    span = parse_own_traceparent(traceparent)
    return span if span is not None and span.trace_flags.sampled else None
