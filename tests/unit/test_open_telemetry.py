"""Spans as OpenTelemetry's SDK makes and sends them, and what happens when the collector does not take them."""

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any
from unittest.mock import Mock

import pytest
from gateway_fakes import make_generation
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from draftwire.runtime import open_telemetry
from draftwire.runtime.open_telemetry import ABORT_SECONDS, FLUSH_SECONDS, ForgivingExporter, OtlpTracer, WallClock
from draftwire.runtime.settings import TracingSettings
from draftwire.runtime.traceparent import parse_own_traceparent, traceparent_of
from draftwire.runtime.tracing import open_tracer
from draftwire_gateway.session.spans import RequestTracing
from tests.trace_collector import span_context

PARENT = span_context(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


class Hanging(SpanExporter):
    """Never answers, until it is shut down."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_called = threading.Event()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_spans += len(spans)
        self.is_called.set()
        self.is_over.wait(60.0)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.is_over.set()


@asynccontextmanager
async def tracing(exporter: SpanExporter) -> AsyncIterator[OtlpTracer]:
    tracer = OtlpTracer(exporter, "gateway", "one")
    try:
        yield tracer
    finally:
        await tracer.close()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def quiet_sdk() -> Iterator[None]:
    """What a tracer sets for the whole process is put back."""
    level = logging.getLogger("opentelemetry").level
    yield
    logging.getLogger("opentelemetry").setLevel(level)


@pytest.mark.parametrize(
    ("endpoint", "disabled"), [(None, "false"), ("http://127.0.0.1:1", "true"), ("http://127.0.0.1:1", "TRUE ")]
)
def test_no_tracer_without_an_endpoint_or_by_opentelemetrys_switch(
    endpoint: str | None, disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    assert open_tracer(TracingSettings(endpoint), "gateway", "one") is None


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_span_that_nobody_records_is_not_passed_on(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """Verifiers refuse ids of zeros."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", str(not is_recorded).lower())
    async with tracing(exporter) as tracer:
        header = RequestTracing(tracer, 1.0, random.Random(5)).begin("", 1).choice(make_generation()).traceparent
    assert (parse_own_traceparent(header) is not None) is is_recorded
    assert bool(header) is is_recorded


async def test_spans_say_where_they_belong_and_when_they_were(exporter: InMemorySpanExporter) -> None:
    before = time.time_ns()
    async with tracing(exporter) as tracer:
        root = tracer.start("generate", PARENT, {"draftwire.num_choices": 1}, is_entry=True)
        child = tracer.start("choice", root.context, {})
        child.add_event("drafter ready", {"draftwire.epoch": 0})
        ended_at = time.perf_counter()
        tracer.record("round", child.context, ended_at - 2.0, ended_at, {"draftwire.round": 7})
        child.end({"draftwire.finish_reason": "stop"})
        root.end({"draftwire.result": "failed"}, "NoRoomError")
    after = time.time_ns()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    generate, choice, one = (spans[name] for name in ("generate", "choice", "round"))
    assert {span.context.trace_id for span in spans.values()} == {PARENT.trace_id}
    assert [span.parent.span_id for span in (generate, choice, one)] == [
        PARENT.span_id,
        root.context.span_id,
        child.context.span_id,
    ]
    assert [span.parent.is_remote for span in (generate, choice, one)] == [True, False, False]
    assert (generate.kind.name, choice.kind.name) == ("SERVER", "INTERNAL")
    assert (generate.status.status_code.name, generate.status.description) == ("ERROR", "NoRoomError")
    assert choice.status.status_code.name == "UNSET"
    assert dict(generate.attributes) == {"draftwire.num_choices": 1, "draftwire.result": "failed"}
    assert [(event.name, dict(event.attributes)) for event in choice.events] == [
        ("drafter ready", {"draftwire.epoch": 0})
    ]
    assert one.end_time - one.start_time == pytest.approx(2e9, abs=2)
    assert before - 10**6 <= generate.start_time <= choice.start_time <= choice.events[0].timestamp <= one.end_time
    assert one.end_time <= choice.end_time <= generate.end_time <= after + 10**6
    resource = generate.resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("draftwire-gateway", "one")


async def test_span_without_a_parent_begins_a_trace_of_its_own(exporter: InMemorySpanExporter) -> None:
    async with tracing(exporter) as tracer:
        for _ in range(2):
            tracer.start("generate", None, {}).end({})
    first, second = exporter.get_finished_spans()
    assert first.parent is second.parent is None
    assert first.context.trace_id != second.context.trace_id


def test_wall_clock_agrees_with_the_system_and_runs_as_the_other_one() -> None:
    clock = WallClock()
    moment = time.perf_counter()
    assert clock.at(moment) == pytest.approx(time.time_ns(), abs=50_000_000)
    assert clock.at(moment + 1.5) - clock.at(moment) == pytest.approx(1_500_000_000, abs=1000)
    assert clock.now() >= clock.at(moment)


@pytest.mark.parametrize("outcome", [SpanExportResult.FAILURE, RuntimeError("prompt: zebra")])
def test_lost_spans_are_counted_in_a_line_a_minute(outcome: object, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(open_telemetry.time, "monotonic", lambda: now)
    broken = Mock(**{"export.side_effect": cycle([outcome])})
    exporter = ForgivingExporter(broken, "verifier")
    spans: list[Any] = [None, None, None]
    with capture_logs() as lines:
        for _ in range(50):
            assert exporter.export(spans) is SpanExportResult.FAILURE
        assert [(line["event"], line["num_spans"]) for line in lines] == [("verifier.spans_lost", 3)]
        now += open_telemetry.WARNING_SECONDS
        exporter.export(spans)
    assert [line["num_spans"] for line in lines] == [3, 150]
    assert "zebra" not in str(lines)


def test_spans_that_arrive_are_not_warned_of() -> None:
    with capture_logs() as lines:
        assert ForgivingExporter(InMemorySpanExporter(), "verifier").export([]) is SpanExportResult.SUCCESS
    assert lines == []


async def test_end_waits_for_a_hanging_collector_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_telemetry, "FLUSH_SECONDS", 0.3)
    exporter = Hanging()
    tracer = OtlpTracer(exporter, "gateway", "one")
    tracer.start("generate", None, {}).end({})
    started, closing = time.monotonic(), asyncio.create_task(tracer.close())
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert not closing.done(), "the event loop goes on meanwhile"
    await closing
    assert exporter.is_called.is_set()
    assert exporter.is_over.is_set()
    assert 0.3 <= time.monotonic() - started < 3.0
    assert FLUSH_SECONDS + ABORT_SECONDS <= 5.0


async def test_what_the_end_breaks_off_is_counted_before_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that is shut down needs a moment to fail."""

    class Slow(Hanging):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            time.sleep(0.1)
            return result

    monkeypatch.setattr(open_telemetry, "FLUSH_SECONDS", 0.1)
    tracer = OtlpTracer(Slow(), "gateway", "one")
    tracer.start("generate", None, {}).end({})
    with capture_logs() as lines:
        await tracer.close()
        assert [(line["event"], line["num_spans"]) for line in lines] == [("gateway.spans_lost", 1)]


async def test_full_queue_neither_blocks_nor_grows(monkeypatch: pytest.MonkeyPatch, quiet_sdk: None) -> None:
    monkeypatch.setattr(open_telemetry, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(open_telemetry, "QUEUE_SPANS", 600)
    monkeypatch.setattr(open_telemetry, "WARNING_SECONDS", 0.0)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = Hanging()
    tracer = OtlpTracer(exporter, "gateway", "one")
    started = time.monotonic()
    with capture_logs() as lines:
        for number in range(3000):
            tracer.record("round", PARENT, 0.0, 1.0, {"draftwire.round": number})
        assert time.monotonic() - started < 5.0
        assert exporter.is_called.wait(5.0)
    (processor,) = tracer._provider._active_span_processor._span_processors
    num_waiting = len(processor._batch_processor._queue)  # type: ignore[attr-defined]
    assert num_waiting <= 600
    assert {line["event"] for line in lines} == {"gateway.spans_lost"}
    assert sum(line["num_spans"] for line in lines) == 3000 - num_waiting - exporter.num_spans
    await tracer.close()


async def test_spans_that_went_out_make_room_for_others(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_telemetry, "QUEUE_SPANS", 600)
    with capture_logs() as lines:
        async with tracing(exporter) as tracer:
            for _ in range(5):
                for _ in range(500):
                    tracer.record("round", PARENT, 0.0, 1.0, {})
                tracer._provider.force_flush()
    assert (len(exporter.get_finished_spans()), lines) == (2500, [])


async def test_collector_that_is_down_is_told_of_in_one_line_of_ours(
    quiet_sdk: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_telemetry, "EXPORT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with capture_logs() as lines:
        tracer = open_tracer(TracingSettings(f"http://127.0.0.1:{port}"), "drafter", "one")
        for _ in range(10):
            tracer.start("generate", None, {}).end({})
        await tracer.close()
    assert [(line["event"], line["num_spans"]) for line in lines] == [("drafter.spans_lost", 10)]
    assert caplog.records == []


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.25, 180, 320)])
async def test_share_of_requests_that_say_nothing_is_traced(ratio: float, least: int, most: int) -> None:
    """0.25 of 1000: 250 +- 14, by a fixed seed."""
    async with tracing(InMemorySpanExporter()) as tracer:
        requests = RequestTracing(tracer, ratio, random.Random(5))
        traced = sum(requests.begin(header, 1) is not None for header in ("", "nonsense") * 500)
    assert least <= traced <= most


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_request_that_says_whether_it_is_traced_is_obeyed(exporter: InMemorySpanExporter, ratio: float) -> None:
    async with tracing(exporter) as tracer:
        requests = RequestTracing(tracer, ratio, random.Random(5))
        unsampled = span_context(PARENT.trace_id, PARENT.span_id, is_sampled=False)
        assert requests.begin(traceparent_of(unsampled), 1) is None
        request = requests.begin(traceparent_of(PARENT), 1)
        request.end("finished")
    (span,) = exporter.get_finished_spans()
    assert (span.context.trace_id, span.parent.span_id) == (PARENT.trace_id, PARENT.span_id)


async def test_error_of_a_request_is_named_and_not_quoted(exporter: InMemorySpanExporter) -> None:
    async with tracing(exporter) as tracer:
        request = RequestTracing(tracer, 1.0, random.Random(5)).begin("", 1)
        request.end("failed", ValueError("prompt: zebra"))
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "ValueError"
    assert "zebra" not in span.to_json()
