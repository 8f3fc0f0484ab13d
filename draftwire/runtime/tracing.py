"""Spans of requests, for a collector of traces. See docs/tracing.md.

Where tracing is off there is no tracer, and whoever would record asks for `None` and does nothing else:
OpenTelemetry's SDK is not imported then. Spans carry numbers and names, never prompts, texts or token ids.
"""

from __future__ import annotations  # so is its interface

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from draftwire.runtime.traceparent import parse_own_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

Attributes = Mapping[str, bool | int | float | str]
"""Integers must fit into 64 bits with a sign: ids of sessions are written as text."""

PREFIX = "draftwire."
"""Of the names of attributes."""


class TraceSpan(Protocol):
    """A span under way."""

    @property
    def context(self) -> SpanContext:
        """Names the span; its children are made with this."""

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Notes that something happened now."""

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Ends the span now.

        Args:
            attributes: what is known of it at the end.
            error: why it failed; empty if it did not.
        """


class Tracer(Protocol):
    """Makes spans. No method blocks, and none fails because nobody takes the spans."""

    def start(
        self, name: str, parent: SpanContext | None, attributes: Attributes, *, is_entry: bool = False
    ) -> TraceSpan:
        """Begins a span now.

        Args:
            name: of what is done.
            parent: the span that it is part of; None begins a trace.
            attributes: what is known of it.
            is_entry: whether it is what a client asked for.
        """

    def record(
        self, name: str, parent: SpanContext, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        """Makes a span of something that is over.

        Args:
            name: of what was done.
            parent: the span that it was part of.
            started_at: by `time.perf_counter`, seconds.
            ended_at: the same.
            attributes: what is known of it.
        """

    async def close(self) -> None:
        """Sends what is left, for a few seconds at most, and ends."""


def sampled(traceparent: str) -> SpanContext | None:
    """Returns the span that a session belongs to; None if nothing of it is to be recorded."""
    span = parse_own_traceparent(traceparent)
    return span if span is not None and span.trace_flags.sampled else None
