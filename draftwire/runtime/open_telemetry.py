"""Tracing by the SDK of OpenTelemetry. Imported only where tracing is on.

Spans are made on the caller's thread and wait in a bounded queue. A thread of the SDK packs and sends them. When the
collector cannot be reached, spans are lost and serving goes on.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
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
from draftwire.runtime.tracing import Attributes

log = structlog.get_logger()

EXPORT_SECONDS = 10.0
"""How long the collector may take for one batch, its retries included."""
FLUSH_SECONDS = 3.0
"""How long the end of a service may wait for the collector."""
WARNING_SECONDS = 60.0
"""Between two log lines about lost spans."""
QUEUE_SPANS = 8192
"""Spans that wait at most; those that come then are lost. Some seconds' worth at a thousand rounds a second."""


class WallClock:
    """Turns times by `time.perf_counter` into wall time. Read once, so that a span never ends before it starts."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def at(self, moment: float) -> int:
        """Returns nanoseconds since 1970.

        Args:
            moment: by `time.perf_counter`, seconds.
        """
        return self._offset_ns + round(moment * 1e9)

    def now(self) -> int:
        """Returns the same of this moment."""
        return self._offset_ns + time.perf_counter_ns()


class ForgivingExporter(SpanExporter):
    """Exports, and says now and then how many spans were lost, in place of a line for each failure."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        """Takes what does the work."""
        self._exporter = exporter
        self._service = service
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_lost = 0
        self._warned_at: float | None = None

    def admit(self) -> bool:
        """Returns whether one more span may wait to be exported; counts it as lost if not. On any thread."""
        with self._lock:
            if self._num_waiting < QUEUE_SPANS:
                self._num_waiting += 1
                return True
            self._lose(1)
            return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports, and counts what is lost. On the SDK's thread."""
        with self._lock:
            self._num_waiting -= len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:  # the SDK would log it with all that it quotes
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
        """Ends what is under way."""
        self._exporter.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Keeps the queue from overflowing, where the SDK would lose spans that nobody counts: docs/decisions/0015."""

    def __init__(self, exporter: ForgivingExporter) -> None:
        """Takes what counts the spans."""
        super().__init__(exporter, max_queue_size=QUEUE_SPANS)
        self._admit = exporter.admit

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if self._admit():
            super().on_end(span)


class OtlpSpan:
    """A span under way."""

    def __init__(self, span: trace.Span, clock: WallClock) -> None:
        """Takes a span that has begun."""
        self._span = span
        self._clock = clock
        self.context = span.get_span_context()

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Notes that something happened now."""
        self._span.add_event(name, attributes, self._clock.now())

    def end(self, attributes: Attributes, error: str = "") -> None:
        """Ends the span now, with an error if there is one."""
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end(self._clock.now())


class OtlpTracer:
    """A `Tracer`."""

    def __init__(self, exporter: SpanExporter, service: str, instance: str) -> None:
        """Takes what sends the spans, and who makes them; see `open_tracer`."""
        self._exporter = exporter
        self._clock = WallClock()
        names = {SERVICE_NAME: f"draftwire-{service}", SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: __version__}
        # Who is not to be recorded has no tracer's span at all, so all of these are.
        self._provider = TracerProvider(resource=Resource.create(names), sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(CountingProcessor(ForgivingExporter(exporter, service)))
        self._tracer = self._provider.get_tracer("draftwire", __version__)

    @classmethod
    def to(cls, endpoint: str, service: str, instance: str) -> "OtlpTracer":
        """Returns a tracer whose spans go to a collector; see `open_tracer`. Does not wait for the collector."""
        # The SDK logs every failure: see `ForgivingExporter`.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_SECONDS)
        return cls(exporter, service, instance)

    def start(
        self, name: str, parent: trace.SpanContext | None, attributes: Attributes, *, is_entry: bool = False
    ) -> OtlpSpan:
        """Begins a span now, below its parent."""
        kind = trace.SpanKind.SERVER if is_entry else trace.SpanKind.INTERNAL
        return OtlpSpan(
            self._tracer.start_span(name, _below(parent), kind, attributes, start_time=self._clock.now()), self._clock
        )

    def record(
        self, name: str, parent: trace.SpanContext, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        """Makes a span of something that is over, by times of `time.perf_counter`."""
        clock = self._clock
        span = self._tracer.start_span(name, _below(parent), attributes=attributes, start_time=clock.at(started_at))
        span.end(clock.at(ended_at))

    async def close(self) -> None:
        """Sends what is left, for `FLUSH_SECONDS` at most, and ends."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        # Not one of asyncio's threads, which the end of the process would wait for.
        threading.Thread(target=shut_down, name="flush spans", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await ended.wait()
        except TimeoutError:
            self._exporter.shutdown()  # ends the call under way


def _below(parent: trace.SpanContext | None) -> Context:
    """Returns the context of a span's child. Never the one that is current, which others may have set."""
    return Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
