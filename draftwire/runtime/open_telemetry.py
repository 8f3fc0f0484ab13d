"""Tracing with the OpenTelemetry SDK. Imported only if tracing is on.

Spans are made on the caller's thread and wait in a bounded queue. A thread of the SDK batches and exports them. If the
collector cannot be reached, spans are lost and serving continues.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from typing_extensions import override

from draftwire import __version__

log = structlog.get_logger()

Attributes = Mapping[str, bool | int | float | str]
"""Integers must fit into signed 64 bits; session ids, which may not, are written as text."""

EXPORT_SECONDS = 10.0
"""Timeout of the export of one batch, retries included."""
FLUSH_SECONDS = 3.0
"""Timeout of the final flush, when a service ends."""
ABORT_SECONDS = 1.0
"""How long the end of a service waits, after that timeout, for the export that it broke off to fail: its spans are
counted as lost, and logged."""
WARNING_SECONDS = 60.0
"""Shortest interval of log lines about lost spans."""
QUEUE_SPANS = 8192
"""Queue length; further spans are dropped. A few seconds' worth at a thousand rounds a second."""


class WallClock:
    """Converts `time.perf_counter` to wall time. Wall time is read once, so that no span ends before it starts."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def at(self, moment: float) -> int:
        """Returns nanoseconds since the Unix epoch, of a time by `time.perf_counter` in seconds."""
        return self._offset_ns + round(moment * 1e9)

    def now(self) -> int:
        """Returns the current time, nanoseconds since the Unix epoch."""
        return self._offset_ns + time.perf_counter_ns()


class ForgivingExporter(SpanExporter):
    """Wraps an exporter: counts lost spans, and logs their number now and then instead of each failure."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        """Wraps `exporter`; `service` is the prefix of the log event."""
        self._exporter = exporter
        self._service = service
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_lost = 0
        self._warned_at: float | None = None

    def admit(self) -> bool:
        """Returns whether the queue has room for a span; counts the span as lost if not. Thread-safe."""
        with self._lock:
            if self._num_waiting < QUEUE_SPANS:
                self._num_waiting += 1
                return True
            self._lose(1)
            return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch, and counts its spans as lost if that fails. Runs on the SDK's thread."""
        with self._lock:
            self._num_waiting -= len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:  # the SDK would log its message, which may quote content
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            with self._lock:
                self._lose(len(spans))
        return result

    def _lose(self, num_spans: int) -> None:
        self._num_lost += num_spans
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= WARNING_SECONDS:
            log.warning(f"{self._service}.spans_lost", num_spans=self._num_lost)
            self._warned_at, self._num_lost = now, 0

    def shutdown(self) -> None:
        """Shuts the wrapped exporter down; ends a running export."""
        self._exporter.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Drops spans before the SDK's queue overflows, where they would be lost uncounted: docs/decisions/0015."""

    def __init__(self, exporter: ForgivingExporter) -> None:
        super().__init__(exporter, max_queue_size=QUEUE_SPANS)
        self._admit = exporter.admit

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if self._admit():
            super().on_end(span)


class OtlpSpan:
    """An open span."""

    def __init__(self, span: trace.Span, clock: WallClock) -> None:
        self._span = span
        self._clock = clock
        self.context = span.get_span_context()

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Adds an event at the current time."""
        self._span.add_event(name, attributes, self._clock.now())

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Ends the span at the current time; a non-empty `error` sets the status ERROR."""
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end(self._clock.now())


class OtlpTracer:
    """Makes spans, and exports them over OTLP. Only `close` waits for the collector, and none fails without it."""

    def __init__(self, exporter: SpanExporter, service: str, instance: str) -> None:
        """Exports through `exporter`, as an instance of a service; see `tracing.open_tracer`."""
        self._exporter = exporter
        self._clock = WallClock()
        names = {SERVICE_NAME: f"draftwire-{service}", SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: __version__}
        # Unsampled requests never reach the tracer, so all its spans are recorded.
        self._provider = TracerProvider(resource=Resource.create(names), sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(CountingProcessor(ForgivingExporter(exporter, service)))
        self._tracer = self._provider.get_tracer("draftwire", __version__)

    @classmethod
    def to(cls, endpoint: str, service: str, instance: str) -> "OtlpTracer":
        """Returns a tracer that exports to the collector at `endpoint`, without waiting for it."""
        # The SDK logs every failure: see `ForgivingExporter`.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_SECONDS)
        return cls(exporter, service, instance)

    def start(
        self, name: str, parent: trace.SpanContext | None, attributes: Attributes, *, is_entry: bool = False
    ) -> OtlpSpan:
        """Starts a span at the current time; without a parent, a trace.

        `is_entry` is whether it is a client's request (span kind SERVER).
        """
        kind = trace.SpanKind.SERVER if is_entry else trace.SpanKind.INTERNAL
        return OtlpSpan(
            self._tracer.start_span(name, _context_under(parent), kind, attributes, start_time=self._clock.now()),
            self._clock,
        )

    def record(
        self, name: str, parent: trace.SpanContext, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        """Records a completed span, whose times are by `time.perf_counter`, seconds."""
        clock = self._clock
        span = self._tracer.start_span(
            name, _context_under(parent), attributes=attributes, start_time=clock.at(started_at)
        )
        span.end(clock.at(ended_at))

    async def close(self) -> None:
        """Flushes the queue, for `FLUSH_SECONDS` at most, and shuts down; what is lost is logged."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: the flush timed out
                loop.call_soon_threadsafe(ended.set)

        # Not one of asyncio's threads: the process would wait for it at exit.
        threading.Thread(target=shut_down, name="flush spans", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await ended.wait()
        except TimeoutError:
            self._exporter.shutdown()  # ends the running export
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await ended.wait()


def _context_under(parent: trace.SpanContext | None) -> Context:
    """Returns a context with `parent` as the current span. Ignores the ambient context, which other code may set."""
    return Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
