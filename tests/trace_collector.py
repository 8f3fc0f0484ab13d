"""A collector of traces that keeps the spans in memory, and what tests ask of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.trace import SpanContext, TraceFlags

Value = str | int | float | bool


def span_context(trace_id: int, span_id: int, is_sampled: bool = True) -> SpanContext:
    """Returns what names a span of another process."""
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(is_sampled))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened during a span."""

    name: str
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span that arrived."""

    service: str
    """Without `draftwire-`."""
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty of one that begins a trace."""
    started_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    """Without the prefix that all of ours have."""
    events: tuple[Event, ...]
    is_error: bool

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    @property
    def event_names(self) -> list[str]:
        return [event.name for event in self.events]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one trace."""

    spans: Sequence[CollectedSpan]

    def all(self, name: str, service: str | None = None) -> list[CollectedSpan]:
        return sorted(
            (span for span in self.spans if span.name == name and service in (None, span.service)),
            key=lambda span: span.started_ns,
        )

    def one(self, name: str, service: str | None = None) -> CollectedSpan:
        (found,) = self.all(name, service)
        return found


@dataclass(eq=False)
class Collector(service_grpc.TraceServiceServicer):
    """Listens on loopback. A context manager."""

    requests: list[service_pb2.ExportTraceServiceRequest] = field(default_factory=list)
    """All that arrived."""
    spans: list[CollectedSpan] = field(default_factory=list)
    """What was in them."""
    port: int = 0
    _server: Any = None

    def __enter__(self) -> "Collector":
        self._server = grpc.server(ThreadPoolExecutor(4))
        service_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(
        self, request: service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        self.spans += [
            _span(span, _attributes(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        return service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, Trace]:
        """Returns what has arrived, by trace id."""
        spans = tuple(self.spans)
        return {
            trace_id: Trace([span for span in spans if span.trace_id == trace_id])
            for trace_id in dict.fromkeys(span.trace_id for span in spans)
        }

    def wait_for(self, is_there: Callable[["Collector"], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there(self):
            assert time.monotonic() < deadline, f"only {len(self.spans)} spans came"
            time.sleep(0.02)


def _attributes(items: Any) -> dict[str, Value]:
    return {
        item.key.removeprefix("draftwire."): getattr(item.value, item.value.WhichOneof("value") or "") for item in items
    }


def _span(span: trace_pb2.Span, resource: dict[str, Value]) -> CollectedSpan:
    return CollectedSpan(
        service=str(resource["service.name"]).removeprefix("draftwire-"),
        instance=str(resource["service.instance.id"]),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        started_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(Event(event.name, _attributes(event.attributes)) for event in span.events),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )
