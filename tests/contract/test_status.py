"""Every error has one status, the same from a unary call and from a stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from draftwire.client import Client
from draftwire.errors import (
    GENERATED_KEY,
    MAX_RETRY_AFTER_S,
    BlockViolationError,
    CompletionInterruptedError,
    ContextLengthError,
    DraftwireError,
    GroupLostError,
    InvalidRequestError,
    ModelMismatchError,
    NoRoomError,
    ProtocolViolationError,
    UnauthenticatedError,
    UnavailableError,
    UnknownSessionError,
    Violation,
    WrongRoleError,
)
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.status import (
    CODE_BY_NUMBER,
    ERROR,
    RETRY_KEY,
    STATUS,
    error_of,
    error_of_number,
    hints,
    status_of,
)
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, gateway_pb2, gateway_pb2_grpc

Code = grpc.StatusCode

EXPECTED: dict[type[DraftwireError], grpc.StatusCode] = {
    InvalidRequestError: Code.INVALID_ARGUMENT,
    BlockViolationError: Code.INVALID_ARGUMENT,
    ContextLengthError: Code.INVALID_ARGUMENT,
    GroupLostError: Code.UNAVAILABLE,
    UnauthenticatedError: Code.UNAUTHENTICATED,
    WrongRoleError: Code.PERMISSION_DENIED,
    UnknownSessionError: Code.NOT_FOUND,
    ProtocolViolationError: Code.FAILED_PRECONDITION,
    ModelMismatchError: Code.FAILED_PRECONDITION,
    NoRoomError: Code.RESOURCE_EXHAUSTED,
    UnavailableError: Code.UNAVAILABLE,
    CompletionInterruptedError: Code.UNAVAILABLE,
}
"""The table, written down again."""

SECRET = "the prompt was: launch at dawn"
DEADLINE_S = 10.0


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("draftwire."):  # not those that other tests define
            yield child
            yield from subclasses(child)


TREE = sorted(subclasses(DraftwireError), key=lambda kind: kind.__name__)
EVERY_CLASS = pytest.mark.parametrize("kind", TREE, ids=[kind.__name__ for kind in TREE])


def made(kind: type[DraftwireError], message: str) -> DraftwireError:
    if issubclass(kind, BlockViolationError):
        return kind(Violation.LENGTH, message)
    return kind(message, 7) if issubclass(kind, CompletionInterruptedError) else kind(message)


FAILURES: list[tuple[Exception, grpc.StatusCode, str]] = [
    *((made(kind, "why"), EXPECTED.get(kind, Code.INTERNAL), "why") for kind in TREE),
    (TimeoutError("too late"), Code.DEADLINE_EXCEEDED, "too late"),
    (KeyError(SECRET), Code.INTERNAL, "internal error"),
    (ExceptionGroup("tasks", [ExceptionGroup("inner", [NoRoomError("full")])]), Code.RESOURCE_EXHAUSTED, "full"),
]
EVERY_FAILURE = pytest.mark.parametrize(
    ("error", "code", "text"), FAILURES, ids=[type(failure[0]).__name__ for failure in FAILURES]
)


class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers every call with one error, streams after one response if so wanted."""

    def __init__(self, error: Exception | None, after_a_response: bool = False) -> None:
        self.error, self.after_a_response = error, after_a_response

    async def GetServer(self, request, context):
        if self.error:
            raise self.error
        return gateway_pb2.GetServerResponse(num_speculative_tokens=4)

    async def Generate(self, request, context):
        if self.error and not self.after_a_response:
            raise self.error
        await context.write(gateway_pb2.GenerateResponse(delta=gateway_pb2.GenerateDelta(text="a")))
        if self.error:
            raise self.error


class Drafter(drafter_pb2_grpc.DrafterServiceServicer):
    """A stream in both directions that ends with an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def RunDraftSessions(self, request_iterator, context):
        async for _ in request_iterator:
            if self.error:
                raise self.error


@asynccontextmanager
async def serving_at(
    error: Exception | None, refusal: str = "", after_a_response: bool = False
) -> AsyncIterator[tuple[str, ServiceGate]]:
    """Runs a guarded server whose methods all raise `error`, and yields its address."""
    gate = ServiceGate()
    gate.refusal = refusal
    server = grpc.aio.server(interceptors=[gate])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Gateway(error, after_a_response), server)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(Drafter(error), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", gate
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def serving(
    error: Exception | None, refusal: str = "", after_a_response: bool = False
) -> AsyncIterator[tuple[grpc.aio.Channel, ServiceGate]]:
    """Runs the same server and yields a channel to it."""
    async with (
        serving_at(error, refusal, after_a_response) as (address, gate),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel, gate


async def unary(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Returns the status of a unary call."""
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    call = stub.GetServer(gateway_pb2.GetServerRequest(), timeout=DEADLINE_S)
    return await call.code(), await call.details()


async def streamed(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Returns the status of a call that streams its answer."""
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    call = stub.Generate(gateway_pb2.GenerateRequest(), timeout=DEADLINE_S)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:  # a status comes after all responses
            pass
    return await call.code(), await call.details()


async def both_streamed(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Returns the status of a call that streams both ways."""
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    call = stub.RunDraftSessions(iter([drafter_pb2.RunDraftSessionsRequest()]), timeout=DEADLINE_S)
    return await call.code(), await call.details()


CALLS = (unary, streamed, both_streamed)


def test_error_tree_is_the_one_that_this_table_knows() -> None:
    assert set(TREE) == set(EXPECTED)


@EVERY_CLASS
def test_every_error_class_has_its_status_and_keeps_its_message(kind: type[DraftwireError]) -> None:
    """So do subclasses, and errors inside nested groups; one without a message is named by its class."""
    code, child = EXPECTED.get(kind), type("Child", (kind,), {})  # of this module, so the tree does not have it
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [made(kind, "why")]), ValueError("other")])
    assert [status_of(error) for error in (made(kind, "why"), made(child, "why"), group)] == [(code, "why")] * 3
    assert status_of(made(kind, "")) == (code, next(one for one in kind.__mro__ if one in STATUS).__name__)


@pytest.mark.parametrize(
    "error",
    [KeyError(SECRET), ValueError(SECRET), RuntimeError(SECRET), OSError(5, SECRET), AssertionError(SECRET)],
    ids=lambda error: type(error).__name__,
)
def test_unknown_error_becomes_internal_and_opaque(error: Exception) -> None:
    for raised in (error, ExceptionGroup(SECRET, [ExceptionGroup(SECRET, [error])])):
        code, text = status_of(raised)
        assert code is Code.INTERNAL
        assert SECRET not in text
        assert text


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_every_status_of_the_table_maps_back_to_an_error_of_that_status(kind: type[BaseException]) -> None:
    code = STATUS[kind]
    error = error_of_number(code.value[0], "why")
    back = code if code is not Code.DEADLINE_EXCEEDED else Code.UNAVAILABLE  # a peer that is too slow is lost
    assert isinstance(error, DraftwireError)
    assert status_of(error) == (back, "why")


def test_way_back_is_the_inverse_of_the_way_there() -> None:
    assert {code: STATUS[kind] for code, kind in ERROR.items()} == {code: code for code in ERROR}


def test_long_message_is_cut_so_that_the_status_survives_the_trailers() -> None:
    """Between two characters, however many bytes one has."""
    for letter in "xé火":
        code, message = status_of(InvalidRequestError("logit_bias " + letter * 100_000))
        assert code is Code.INVALID_ARGUMENT
        assert 995 < len(message.encode()) <= 1000
        assert set(message.removeprefix("logit_bias ")) == {letter}


@pytest.mark.parametrize("number", [99, 2**32 - 1, Code.INTERNAL.value[0], Code.UNKNOWN.value[0]])
def test_number_that_is_not_in_the_table_means_that_the_peer_is_lost(number: int) -> None:
    error = error_of_number(number, "why")
    assert (type(error), str(error)) == (UnavailableError, "why")


def test_every_status_is_found_by_its_number() -> None:
    assert {number: code.value[0] for number, code in CODE_BY_NUMBER.items()} == {n: n for n in range(17)}


@EVERY_FAILURE
async def test_calls_and_streams_end_with_the_same_status_even_after_a_response(
    error: Exception, code: grpc.StatusCode, text: str
) -> None:
    async with serving(error) as (channel, _):
        for call in CALLS:
            assert await call(channel) == (code, text), call.__name__
    async with serving(error, after_a_response=True) as (channel, _):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Generate(gateway_pb2.GenerateRequest(), timeout=DEADLINE_S)
        assert (await call.read()).delta.text == "a", "it is delivered"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (code, text)


async def test_status_of_a_peer_is_passed_on() -> None:
    async with serving(NoRoomError("full")) as (channel, _):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetServer(gateway_pb2.GetServerRequest(), timeout=DEADLINE_S)
    error = error_of(raised.value)
    assert (type(error), str(error)) == (NoRoomError, "full")
    assert status_of(raised.value) == (Code.RESOURCE_EXHAUSTED, "full")
    assert status_of(ExceptionGroup("tasks", [raised.value])) == (Code.RESOURCE_EXHAUSTED, "full")


async def test_bytes_that_are_no_message_are_refused_also_inside_a_stream() -> None:
    """The servicer, which reads all that comes and fails with nothing, never gets them."""
    garbage, fine = b"\xff", drafter_pb2.RunDraftSessionsRequest().SerializeToString()
    refused = (Code.INVALID_ARGUMENT, "the bytes are not those of a message")
    async with serving(None) as (channel, _):
        get_server = channel.unary_unary("/draftwire.v1.GatewayService/GetServer")(garbage, timeout=DEADLINE_S)
        assert (await get_server.code(), await get_server.details()) == refused
        for bodies, expected in (([fine], (Code.OK, "")), ([fine, garbage, fine], refused)):
            run = channel.stream_stream("/draftwire.v1.DrafterService/RunDraftSessions")
            call = run(iter(bodies), timeout=DEADLINE_S)
            assert (await call.code(), await call.details()) == expected


# When to try again


def test_retry_hint_is_grpcs_metadata_and_an_interruption_has_its_progress() -> None:
    """Source: gRPC proposal A6, "Client Retries"."""
    assert RETRY_KEY == "grpc-retry-pushback-ms"
    assert hints(NoRoomError("full", retry_after_s=2.5)) == (("grpc-retry-pushback-ms", "2500"),)
    assert hints(CompletionInterruptedError("gone", 7)) == (("draftwire-generated-tokens", "7"),)


@pytest.mark.parametrize(
    ("error", "hinted"),
    [
        *((made(kind, "why"), kind in (NoRoomError, CompletionInterruptedError)) for kind in TREE),
        (TimeoutError("too late"), False),
        (KeyError(SECRET), False),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [NoRoomError("full")])]), True),
        (ExceptionGroup("tasks", [UnavailableError("gone"), NoRoomError("full")]), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_who_can_try_again_is_told_when_or_from_where(error: Exception, hinted: bool) -> None:
    assert bool(hints(error)) == hinted
    async with serving(error) as (channel, _):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.GetServer(gateway_pb2.GetServerRequest(), timeout=DEADLINE_S)
        trailing = await call.trailing_metadata()
    assert ({RETRY_KEY, GENERATED_KEY} & {key for key, _ in trailing} != set()) == hinted


@pytest.mark.parametrize("seconds", [0.0, 0.001, 1.0, 2.5, 600.0])
async def test_gateway_learns_from_a_peer_when_to_try_again_and_passes_it_on(seconds: float) -> None:
    async with serving(NoRoomError("full", retry_after_s=seconds)) as (channel, _):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetServer(gateway_pb2.GetServerRequest(), timeout=DEADLINE_S)
    error = error_of(raised.value)
    assert isinstance(error, NoRoomError)
    assert error.retry_after_s == pytest.approx(seconds)
    assert hints(raised.value) == hints(error) == ((RETRY_KEY, str(round(seconds * 1e3))),)


def refusal_of_a_peer(*metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*metadata)
    return grpc.aio.AioRpcError(Code.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, details="full")


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [
        ([], 1.0),
        ([("other", "1")], 1.0),
        ([("other", "1"), (RETRY_KEY, "2500"), (RETRY_KEY, "9"), ("other", "2")], 2.5),  # the first one counts
        *(([(RETRY_KEY, nonsense)], None) for nonsense in ("", "soon", "nan", "inf", "-1")),
    ],
)
def test_refusal_of_a_peer_names_a_wait_whatever_its_hint(
    metadata: list[tuple[str, str]], seconds: float | None
) -> None:
    """A proxy may have written it. Where there is none, it is a second."""
    error = error_of(refusal_of_a_peer(*metadata))
    assert isinstance(error, NoRoomError)
    assert 0.0 <= error.retry_after_s < float("inf")
    assert hints(error)
    assert seconds is None or error.retry_after_s == seconds


def test_refusal_without_metadata_is_tried_again_after_a_second() -> None:
    error = error_of_number(Code.RESOURCE_EXHAUSTED.value[0], "full")
    assert isinstance(error, NoRoomError)
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize("streams", [False, True])
async def test_client_learns_when_to_try_again(streams: bool) -> None:
    def call(client: Client) -> object:
        return list(client.stream("hello", timeout_s=DEADLINE_S)) if streams else client.server()

    async with serving_at(NoRoomError("full", retry_after_s=2.5)) as (address, _):
        with Client(address) as client, pytest.raises(NoRoomError, match=r"^full$") as raised:
            await asyncio.to_thread(call, client)
    assert raised.value.retry_after_s == 2.5


async def test_internal_error_is_logged_once_with_traceback_unlike_expected_ones() -> None:
    expected = [("rpc.method_failed", "/draftwire.v1.GatewayService/Generate", True)]
    for error, logged in ((KeyError(SECRET), expected), (InvalidRequestError("temperature"), [])):
        async with serving(error) as (channel, _):
            with capture_logs() as lines:
                await streamed(channel)
                if not logged:
                    await unary(channel)
        assert [(line["event"], line["method"], line["exc_info"]) for line in lines] == logged


@pytest.mark.parametrize("refusal", ["loading", "draining"])
async def test_calls_are_unavailable_while_the_gate_refuses_and_reach_no_method(refusal: str) -> None:
    async with serving(NoRoomError("the method was reached"), refusal) as (channel, _):
        for call in CALLS:
            code, text = await call(channel)
            assert code is Code.UNAVAILABLE, call.__name__
            assert refusal in text


async def test_calls_succeed_as_soon_as_the_gate_opens_and_health_answers_before() -> None:
    assert ServiceGate().refusal, "from the start"
    async with serving(None, "loading") as (channel, gate):
        answered = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert answered.status == health_pb2.HealthCheckResponse.SERVING, "though the gate refuses"
        assert (await unary(channel))[0] is Code.UNAVAILABLE
        gate.refusal = ""
        for call in CALLS:
            assert (await call(channel))[0] is Code.OK, call.__name__
        answer = await gateway_pb2_grpc.GatewayServiceStub(channel).GetServer(gateway_pb2.GetServerRequest())
        assert answer.num_speculative_tokens == 4


@pytest.mark.parametrize(
    ("hint", "seconds"),
    [
        ("1500", 1.5),
        ("3600000", 3600.0),
        ("3600001", MAX_RETRY_AFTER_S),
        ("9" * 5000, MAX_RETRY_AFTER_S),
        ("-1", 1.0),
        ("1e9", 1.0),
        ("", 1.0),
        (None, 1.0),
    ],
)
def test_retry_delay_of_a_peer_is_bounded(hint: str | None, seconds: float) -> None:
    """Python refuses to parse integers of thousands of digits, with another error than ours."""
    assert NoRoomError.hinted("full", hint).retry_after_s == seconds
