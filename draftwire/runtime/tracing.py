"""Spans of requests: whether there are any, and what they have in common. See docs/tracing.md.

If tracing is off, the tracer is None: callers check for that, and OpenTelemetry's SDK is not imported. Spans carry
numbers and names, never prompts, texts or token ids.
"""

from __future__ import annotations  # OpenTelemetry's types are imported for the type checker only

import os
from typing import TYPE_CHECKING

from draftwire.runtime.traceparent import parse_own_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from draftwire.runtime.open_telemetry import OtlpTracer
    from draftwire.runtime.settings import TracingSettings

PREFIX = "draftwire."
"""Prefix of attribute names."""


def sampled(traceparent: str) -> SpanContext | None:
    """Returns the parent span of a session; None if its trace is not sampled."""
    span = parse_own_traceparent(traceparent)
    return span if span is not None and span.trace_flags.sampled else None


def open_tracer(settings: TracingSettings, service: str, instance: str) -> OtlpTracer | None:
    """Returns the tracer of a process, whose id is `instance` among those of the service; None if tracing is off, by
    setting or by OpenTelemetry's variable `OTEL_SDK_DISABLED`.
    """
    if settings.otlp_endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from draftwire.runtime.open_telemetry import OtlpTracer

    return OtlpTracer.to(settings.otlp_endpoint, service, instance)
