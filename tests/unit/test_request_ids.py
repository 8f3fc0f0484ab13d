"""Ids of requests: taken, made, echoed and bound to log lines; requests are counted and logged by bounded names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from http_fakes import EMPTY, STREAM_START, Gate, app_of, client_of
from structlog.testing import capture_logs

from draftwire.errors import NoRoomError
from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.interceptor import EndedCall, ServiceGate, value_of
from draftwire.runtime.served_request import (
    REQUEST_ID,
    ServedRequest,
    context_of_no_request,
    note_caller,
    request_metadata,
    served_request,
    serving,
)
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from draftwire_gateway.access_log import log_call, log_request
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.app import make_app
from draftwire_gateway.http.playground_pages import read_pages
from draftwire_gateway.http.request_guard import Guard
from draftwire_gateway.http.request_observer import CLIENT_GONE, RequestObserver
from draftwire_gateway.http.route_names import FILE, INDEX, MODEL, OTHER, ROUTES, route_of
from draftwire_gateway.metrics import GatewayMetrics

SECRET = "Xq7-zebra"


# Which ids are taken


@pytest.mark.parametrize("given", ["a", "A-1_b.c:d/e+f=@~", "x" * 128, "018f6b1e-7c9e-7cc3-b2c4-7a3f9ed5a001"])
def test_valid_id_of_a_client_is_taken(given: str) -> None:
    with serving(given) as request:
        assert request.id == given


@pytest.mark.parametrize(
    "given", [None, "", " a", "a b", "a\n", "a\nb", 'a"', "a,b", "x" * 129, "é", "a\x00", "{}", "a;b", "<a>"]
)
def test_id_that_is_missing_or_invalid_is_replaced_by_a_random_one(given: str | None) -> None:
    with serving(given) as first, serving(given) as second:
        assert len(first.id) == len(second.id) == 32
        assert len({first.id, second.id, given}) == 3
        assert int(first.id, 16) >= 0


def test_lines_of_a_request_have_its_id_and_other_lines_have_none() -> None:
    with serving("mine"):
        bound = structlog.contextvars.get_contextvars()
        assert (bound["request_id"], request_metadata()) == ("mine", ((REQUEST_ID, "mine"),))
    assert "request_id" not in structlog.contextvars.get_contextvars()
    assert (served_request(), request_metadata()) == (None, ())


async def test_requests_at_once_have_an_id_each_and_what_outlives_one_has_none() -> None:
    async def read() -> tuple[str, Any]:
        await asyncio.sleep(0)
        request = served_request()
        bound = structlog.contextvars.get_contextvars()
        return request.id if request else "", bound.get("request_id")

    async def serve(number: int) -> Any:
        with serving(f"r{number}"):
            own, child = read(), asyncio.create_task(read())
            later = asyncio.create_task(read(), context=context_of_no_request())
            return await own, await child, await later

    found = await asyncio.gather(*(serve(number) for number in range(3)))
    assert found == [((f"r{n}", f"r{n}"), (f"r{n}", f"r{n}"), ("", None)) for n in range(3)]


# HTTP


def observed(app: Any, *, logs: bool = False, gate: Gate | None = None) -> tuple[Any, GatewayMetrics]:
    metrics = GatewayMetrics()
    guarded = Guard(app, gate or Gate())
    return client_of(RequestObserver(guarded, route_of, metrics, logs=logs)), metrics


def num_requests(metrics: GatewayMetrics, route: str, status: int) -> float | None:
    labels = {"route": route, "status": str(status)}
    return metrics.registry.get_sample_value("draftwire:http_requests_total", labels)


async def test_id_is_echoed_by_answers_errors_and_streams_alike() -> None:
    loading = Gate()
    loading.refusal = "loading"
    body = {"type": "http.response.body", "body": b"data: x\n\n"}
    for app, gate, status in (
        (app_of(*EMPTY), None, 204),
        (app_of(error=NoRoomError("full")), None, 429),
        (app_of(error=KeyError(SECRET)), None, 500),
        (app_of(STREAM_START, body, error=NoRoomError("full")), None, 200),
        (app_of(*EMPTY), loading, 503),
    ):
        client, metrics = observed(app, gate=gate)
        async with client:
            with capture_logs():
                answer = await client.post("/v1/completions", headers={REQUEST_ID: "mine"})
                other = await client.post("/v1/completions", headers={REQUEST_ID: "not valid"})
        assert (answer.status_code, answer.headers.get_list(REQUEST_ID)) == (status, ["mine"])
        assert len(other.headers[REQUEST_ID]) == 32
        assert num_requests(metrics, "/v1/completions", status) == 2.0


async def test_error_that_is_logged_names_the_request() -> None:
    client, _ = observed(app_of(error=KeyError(SECRET)))
    async with client:
        with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
            await client.post("/v1/completions", headers={REQUEST_ID: "mine"})
    assert [(line["event"], line["request_id"]) for line in lines] == [("gateway.http_request_failed", "mine")]


async def test_paths_of_clients_make_no_series_of_their_own() -> None:
    app, metrics = app_of(*EMPTY), GatewayMetrics()
    async with client_of(RequestObserver(app, route_of, metrics)) as client:
        for number in range(5):
            await client.get(f"/{SECRET}/{number}")
            await client.get(f"/v1/models/{SECRET}{number}")
            await client.get(f"/v1/models/{SECRET}/{number}?a={SECRET}")
    assert (num_requests(metrics, OTHER, 204), num_requests(metrics, MODEL, 204)) == (5.0, 10.0)
    (family,) = [family for family in metrics.registry.collect() if family.name == "draftwire:http_requests"]
    counted = [sample for sample in family.samples if sample.name.endswith("_total") and sample.value]
    assert {sample.labels["route"] for sample in counted} == {OTHER, MODEL}


def test_every_route_has_a_name() -> None:
    pages = read_pages()
    app = make_app(GatewayCore(GatewayConfig(), None), list, Access(None), Gate(), {})  # type: ignore[arg-type]
    paths = {str(route.path) for route in app.router.routes}  # type: ignore[attr-defined]
    assert paths == {*ROUTES, "/v1/models/{name:path}"}
    assert {route_of(path, pages) for path in pages} == {INDEX, FILE}
    assert {route_of(path) for path in pages} == {OTHER}


async def test_client_that_leaves_before_its_answer_is_counted_as_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    metrics = GatewayMetrics()
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    await RequestObserver(app, route_of, metrics)(scope, None, None)  # type: ignore[arg-type]
    assert num_requests(metrics, "/v1/completions", CLIENT_GONE) == 1.0


# Access log


async def test_request_is_logged_once_with_names_and_numbers_and_no_content() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        note_caller("alice")
        request = served_request()
        assert request is not None
        request.num_prompt_tokens, request.num_generated_tokens = 3, 7
        for message in EMPTY:
            await send(message)

    for logs in (False, True):
        client, _ = observed(app, logs=logs)
        async with client:
            with capture_logs() as lines:
                await client.post(
                    f"/v1/models/{SECRET}?prompt={SECRET}", content=SECRET, headers={REQUEST_ID: "mine", "x": SECRET}
                )
        if not logs:
            assert lines == []
    (line,) = lines
    assert line.pop("duration_ms") >= 0.0
    assert line == {
        "event": "gateway.request_ended",
        "log_level": "info",
        "protocol": "http",
        "method": "POST",
        "route": MODEL,
        "status": 204,
        "caller": "alice",
        "num_prompt_tokens": 3,
        "num_generated_tokens": 7,
        "request_id": "mine",
    }


def test_health_checks_are_not_logged() -> None:
    with capture_logs() as lines:
        for route in ("/health", "/ping"):
            log_request("GET", route, 200, 0.1, ServedRequest("mine"))
        log_call(EndedCall("/grpc.health.v1.Health/Check", "OK", 0.1))
    assert lines == []


def test_call_is_logged_by_the_name_of_its_method_and_status() -> None:
    with serving("mine"), capture_logs() as lines:
        log_call(EndedCall("/draftwire.v1.GatewayService/Generate", "RESOURCE_EXHAUSTED", 0.25))
    (line,) = lines
    assert (line["protocol"], line["status"], line["duration_ms"]) == ("grpc", "RESOURCE_EXHAUSTED", 250.0)
    assert (line["route"], line["request_id"]) == ("/draftwire.v1.GatewayService/Generate", "mine")


def test_method_that_a_client_made_up_is_not_logged() -> None:
    with capture_logs() as lines:
        log_request(SECRET, OTHER, 405, 0.1, ServedRequest("mine"))
    assert SECRET not in str(lines)


# gRPC


class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers, or raises an error; notes what it was asked as."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.seen: list[str] = []

    async def GetServer(self, request: Any, context: Any) -> Any:
        served = served_request()
        self.seen.append(served.id if served else "")
        if self.error is not None:
            raise self.error
        return gateway_pb2.GetServerResponse()


@asynccontextmanager
async def serving_grpc(*, is_public: bool) -> AsyncIterator[tuple[grpc.aio.Channel, Gateway, list[EndedCall]]]:
    calls, gateway = list[EndedCall](), Gateway()
    gate = ServiceGate(CallLimits(is_public=is_public), on_end=calls.append)
    gate.refusal = ""
    server = grpc.aio.server(interceptors=[gate])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, gateway, calls
    finally:
        await server.stop(grace=None)


async def asked(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> tuple[str, str | None]:
    """Returns the status of a call, and the id in its trailing metadata."""
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    call = stub.GetServer(gateway_pb2.GetServerRequest(), timeout=10.0, metadata=metadata)
    code = await call.code()
    return code.name, value_of(tuple(await call.trailing_metadata()), REQUEST_ID)


async def test_gateway_echoes_ids_over_grpc_in_answers_and_errors() -> None:
    async with serving_grpc(is_public=True) as (channel, gateway, calls):
        assert await asked(channel, (REQUEST_ID, "mine")) == ("OK", "mine")
        code, made = await asked(channel, (REQUEST_ID, "not valid"))
        assert (code, len(made or "")) == ("OK", 32)
        assert len((await asked(channel, (REQUEST_ID, "a"), (REQUEST_ID, "b")))[1] or "") == 32, "which of the two?"
        assert gateway.seen[:2] == ["mine", made]
        gateway.error = NoRoomError("full")
        assert await asked(channel, (REQUEST_ID, "mine")) == ("RESOURCE_EXHAUSTED", "mine")
        gateway.error = KeyError(SECRET)
        with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
            assert await asked(channel, (REQUEST_ID, "mine")) == ("INTERNAL", "mine")
        assert [line["request_id"] for line in lines] == ["mine"]
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/draftwire.v1.GatewayService/{SECRET}")(b"")
    method = "/draftwire.v1.GatewayService/GetServer"
    ended = [(call.method, call.code) for call in calls]
    assert ended == [
        *[(method, "OK")] * 3,
        (method, "RESOURCE_EXHAUSTED"),
        (method, "INTERNAL"),
        ("other", "UNIMPLEMENTED"),
    ]
    assert all(0.0 <= call.duration_s < 10.0 for call in calls)


async def test_peer_binds_the_id_that_a_gateway_sends_and_echoes_none() -> None:
    async with serving_grpc(is_public=False) as (channel, gateway, _):
        assert await asked(channel, (REQUEST_ID, "mine")) == ("OK", None)
        assert await asked(channel) == ("OK", None)
        assert gateway.seen == ["mine", ""]


def test_calls_are_counted_without_their_package() -> None:
    metrics = GatewayMetrics()
    metrics.count_call("/draftwire.v1.GatewayService/GetServer", "OK")
    metrics.count_call("other", "UNIMPLEMENTED")
    read = metrics.registry.get_sample_value
    assert read("draftwire:grpc_requests_total", {"method": "GatewayService/GetServer", "code": "OK"}) == 1.0
    assert read("draftwire:grpc_requests_total", {"method": "other", "code": "UNIMPLEMENTED"}) == 1.0
