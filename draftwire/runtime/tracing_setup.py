"""Opens the tracer of a process, where tracing is on."""

import os

from draftwire.runtime.settings import TracingSettings
from draftwire.runtime.tracing import Tracer


def open_tracer(settings: TracingSettings, service: str, instance: str) -> Tracer | None:
    """Returns a tracer; None if tracing is off, be it by OpenTelemetry's own switch `OTEL_SDK_DISABLED`.

    Args:
        settings: where spans go.
        service: gateway, verifier or drafter.
        instance: names this process among those of the service.
    """
    if settings.otlp_endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from draftwire.runtime.open_telemetry import OtlpTracer

    return OtlpTracer.to(settings.otlp_endpoint, service, instance)
