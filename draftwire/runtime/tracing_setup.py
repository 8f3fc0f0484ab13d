"""Set-up of a process's tracer."""

import os

from draftwire.runtime.settings import TracingSettings
from draftwire.runtime.tracing import Tracer


def open_tracer(settings: TracingSettings, service: str, instance: str) -> Tracer | None:
    """Returns a tracer; None if tracing is off, by setting or by OpenTelemetry's variable `OTEL_SDK_DISABLED`.

    Args:
        settings: endpoint of the collector.
        service: gateway, verifier or drafter.
        instance: id of this process among those of the service.
    """
    if settings.otlp_endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from draftwire.runtime.open_telemetry import OtlpTracer

    return OtlpTracer.to(settings.otlp_endpoint, service, instance)
