"""A call is decided on by its metadata: whoever is refused makes a server receive and decode nothing."""

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from observing import until

from draftwire.errors import NoRoomError, UnauthenticatedError
from draftwire.runtime import call_limits, channels, interceptor
from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.channels import server_options
from draftwire.runtime.interceptor import MAX_QUESTION_BYTES, MAX_WATCHES, Metadata, ServiceGate, num_received_bytes
from draftwire.runtime.message_scan import MAX_FIELDS, SCANNED_BYTES
from draftwire.runtime.outbox import exchange
from draftwire.runtime.settings import ConnectionSettings
from draftwire.v1 import gateway_pb2, model_pb2, verifier_pb2

Code = grpc.StatusCode

SERVICE = "draftwire.v1.GatewayService"
SECONDS = 10.0
TOKEN = (("authorization", "Bearer good"),)
EMPTIES = b"\xb2\x01\x00" * (MAX_FIELDS + 1)
"""A request of one field more than a large one may have: of empty messages."""


class Server:
    """A guarded gateway whose methods answer at once, and what reached it."""

    def __init__(self, *, is_public: bool) -> None:
        self.port = 0
        self.num_decoded = 0
        self.decoded_on: list[str] = []
        """Names of the threads, a request each."""
        self.may_decode = threading.Event()
        self.may_decode.set()
        self.num_served = 0
        self.held_when_served: list[str] = []
        self.held: list[str] = []
        """Methods of the calls whose requests are arriving."""
        self.streamed: list[int] = []
        """Lengths of the names in a stream."""
        self.gate = ServiceGate(CallLimits(max_calls=3, is_public=is_public), self.admit)
        self.gate.refusal = ""

    @contextmanager
    def admit(self, method: str, metadata: Metadata) -> Iterator[None]:
        if ("authorization", "Bearer good") not in tuple(metadata):
            raise UnauthenticatedError("who are you?")
        self.held.append(method)
        try:
            yield
        finally:
            self.held.remove(method)

    def decode(self, data: bytes) -> gateway_pb2.GenerateRequest:
        self.num_decoded += 1
        self.decoded_on.append(threading.current_thread().name)
        self.may_decode.wait(SECONDS)
        return gateway_pb2.GenerateRequest.FromString(data)

    def decode_blocks(self, data: bytes) -> verifier_pb2.PushDraftBlocksRequest:
        self.decoded_on.append(threading.current_thread().name)
        return verifier_pb2.PushDraftBlocksRequest.FromString(data)

    async def serve(self, request: gateway_pb2.GenerateRequest, context: Any) -> Any:
        self.num_served += 1
        self.held_when_served = list(self.held)
        return gateway_pb2.GetServerResponse()

    async def stream(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await context.write(await self.serve(request, context))

    async def serve_stream(self, requests: AsyncIterator[verifier_pb2.PushDraftBlocksRequest], context: Any) -> Any:
        async for request in requests:
            self.streamed.append(len(request.hello.model.name))
            assert num_received_bytes.get() == request.ByteSize()
        return gateway_pb2.GetServerResponse()


@asynccontextmanager
async def serving(*, is_public: bool = True) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    guarded = Server(is_public=is_public)
    limits = CallLimits(is_public=is_public)
    server = grpc.aio.server(interceptors=[guarded.gate], options=server_options(ConnectionSettings(), limits))
    kinds = {
        "request_deserializer": guarded.decode,
        "response_serializer": gateway_pb2.GetServerResponse.SerializeToString,
    }
    methods = {
        "GetServer": grpc.unary_unary_rpc_method_handler(guarded.serve, **kinds),
        "Generate": grpc.unary_stream_rpc_method_handler(guarded.stream, **kinds),
    }
    stream = grpc.stream_unary_rpc_method_handler(
        guarded.serve_stream, **{**kinds, "request_deserializer": guarded.decode_blocks}
    )
    streams = grpc.method_handlers_generic_handler("draftwire.v1.VerifierService", {"PushDraftBlocks": stream})
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods), streams])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection([SERVICE], server)
    guarded.port = port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield guarded, channel
    finally:
        await server.stop(grace=None)


async def code_of(
    channel: grpc.aio.Channel, data: bytes = b"", metadata: Sequence[tuple[str, str]] = TOKEN, method: str = "Generate"
) -> tuple[Code, str]:
    call = channel.unary_stream(f"/{SERVICE}/{method}")(data, metadata=metadata, timeout=SECONDS)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:  # a status comes after all responses
            pass
    return await call.code(), await call.details()


def silent(channel: grpc.aio.Channel, method: str, metadata: Sequence[tuple[str, str]] = TOKEN) -> Any:
    """Starts a call that never sends its request."""
    return channel.stream_stream(method)(metadata=metadata, timeout=SECONDS)


async def check(channel: grpc.aio.Channel) -> Code:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).code()


@pytest.mark.parametrize("method", ["Generate", "GetServer"])
async def test_request_of_whoever_is_refused_is_neither_received_nor_decoded(method: str) -> None:
    async with serving() as (server, channel):
        for refusal, metadata, code in (("loading", TOKEN, Code.UNAVAILABLE), ("", (), Code.UNAUTHENTICATED)):
            server.gate.refusal = refusal
            assert (await code_of(channel, EMPTIES, metadata, method))[0] is code
            quiet = silent(channel, f"/{SERVICE}/{method}", metadata)
            assert await quiet.code() is code, "though nothing was sent"
        assert (server.num_decoded, server.held) == (0, [])
        assert (await code_of(channel, b"", TOKEN, method))[0] is Code.OK
        assert (server.num_decoded, server.num_served) == (1, 1)
        assert server.held_when_served == [], "what has arrived has no place among what arrives"


async def test_large_request_of_too_many_messages_is_refused_undecoded() -> None:
    async with serving() as (server, channel):
        code, text = await code_of(channel, EMPTIES)
        assert (code, server.num_decoded) == (Code.INVALID_ARGUMENT, 0)
        assert f"at most {MAX_FIELDS} fields" in text
        assert (await code_of(channel, EMPTIES[:-6]))[0] is Code.OK


LARGE = gateway_pb2.GenerateRequest(text="x" * SCANNED_BYTES).SerializeToString()


@pytest.mark.parametrize("is_public", [False, True])
async def test_large_request_is_decoded_on_a_thread_and_a_peers_arrives_before(is_public: bool) -> None:
    async with serving(is_public=is_public) as (server, channel):
        server.may_decode.clear()
        call = asyncio.create_task(code_of(channel, LARGE))
        while not server.num_decoded:
            await asyncio.sleep(0.001)
        assert bool(server.gate._arrivals._unhurried) == is_public, "others that arrive end that of a user alone"
        assert server.held == [f"/{SERVICE}/Generate"]
        server.may_decode.set()
        assert (await call)[0] is Code.OK
        assert server.decoded_on != [threading.current_thread().name]


async def test_large_messages_of_streams_are_decoded_on_a_thread_in_their_order() -> None:
    sizes = (1, SCANNED_BYTES, 1)
    hellos = [verifier_pb2.DrafterHello(model=model_pb2.ModelDescription(name="x" * size)) for size in sizes]
    sent = [verifier_pb2.PushDraftBlocksRequest(hello=hello).SerializeToString() for hello in hellos]
    async with serving() as (server, channel):
        call = channel.stream_unary("/draftwire.v1.VerifierService/PushDraftBlocks")
        await call(iter(sent), metadata=TOKEN, timeout=SECONDS)
        assert server.streamed == [1, SCANNED_BYTES, 1]
        own = threading.current_thread().name
        assert [thread == own for thread in server.decoded_on] == [True, False, True]


async def test_calls_are_limited_over_all_connections_and_end_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (server, channel):
        calls = [silent(channel, f"/{SERVICE}/Generate") for _ in range(3)]
        await until(lambda: len(server.held) == 3, "three calls wait for their requests")
        code, text = await code_of(channel)
        assert (code, text) == (Code.RESOURCE_EXHAUSTED, "3 calls are running, which is the limit; retry in a second")
        calls.pop().cancel()
        await until(lambda: len(server.held) == 2, "the cancelled call gives its place back")
        assert (await code_of(channel))[0] is Code.OK
        monkeypatch.setattr(call_limits, "ARRIVAL_SECONDS", 0.0)
        assert await silent(channel, f"/{SERVICE}/Generate").code() is Code.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_call_without_a_request_is_refused() -> None:
    async with serving() as (_, channel):
        call = channel.stream_stream(f"/{SERVICE}/Generate")(iter(()), metadata=TOKEN, timeout=SECONDS)
        assert (await call.code(), await call.details()) == (Code.INVALID_ARGUMENT, "the call has no request")


async def test_health_answers_probes_while_anybody_watches_and_asks_without_end() -> None:
    async with serving() as (server, channel):
        server.gate.refusal = "loading"
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHES)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        refused = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert await refused.code() is Code.RESOURCE_EXHAUSTED
        questions = [silent(channel, interceptor.HEALTH_CHECK) for _ in range(100)]
        assert await check(channel) is Code.OK
        assert await questions[0].code() is Code.RESOURCE_EXHAUSTED, "the oldest made room"
        most = 2 * interceptor.MAX_ARRIVING_QUESTIONS
        await until(lambda: sum(not each.done() for each in questions) <= most, "all questions have come")
        watches.pop().cancel()
        await until(lambda: server.gate._watches.num_running < MAX_WATCHES, "the cancelled watch ends")
        assert (await stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS).read()).status
        for call in (*watches, *questions):
            call.cancel()


async def test_streams_of_reflection_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with serving() as (server, channel):
        calls = [silent(channel, method) for _ in range(interceptor.MAX_REFLECTIONS)]
        await until(lambda: server.gate._reflections.num_running == len(calls), "all streams are open")
        assert await silent(channel, method).code() is Code.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: not server.gate._reflections.num_running, "all streams end")
        monkeypatch.setattr(interceptor, "ARRIVAL_SECONDS", 0.0)
        assert await silent(channel, method).code() is Code.DEADLINE_EXCEEDED


async def test_questions_that_need_no_token_are_short() -> None:
    long = health_pb2.HealthCheckRequest(service="x" * MAX_QUESTION_BYTES)
    async with serving() as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for call in (stub.Check(long, timeout=SECONDS), stub.Watch(long, timeout=SECONDS)):
            assert await call.code() is Code.INVALID_ARGUMENT
        unknown = stub.Check(health_pb2.HealthCheckRequest(service="another"), timeout=SECONDS)
        assert await unknown.code() is Code.NOT_FOUND, "as ever"


async def test_compressed_request_is_refused_because_it_has_no_size() -> None:
    """A thousandth of what it becomes: the limit of message sizes is that of the compressed one."""
    async with serving() as (server, channel):
        call = channel.unary_unary(f"/{SERVICE}/GetServer")(
            bytes(10**6), metadata=TOKEN, timeout=SECONDS, compression=grpc.Compression.Gzip
        )
        assert await call.code() is Code.UNIMPLEMENTED
        assert server.num_decoded == 0


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""What opens a connection of HTTP/2: its preface, and settings without any."""
PING, PONG = (b"\0\0\x08\x06" + flags + bytes(4) + b"who goes" for flags in (b"\0", b"\1"))


def is_served(connection: socket.socket) -> bool:
    """Whether the other end answers on a connection; False if it closes it."""
    heard = b""
    try:
        connection.sendall(HELLO + PING)
        while PONG not in heard:
            if not (part := connection.recv(2**16)):
                return False
            heard += part
    except ConnectionError:
        return False
    return True


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection to which nothing is sent."""
    with suppress(ConnectionError):
        while connection.recv(2**16):
            pass  # it greets
    return True


async def test_connections_are_limited_and_those_that_say_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of gRPC itself, so that their arguments are not only known by name."""
    monkeypatch.setattr(channels, "MAX_CONNECTIONS", 2)
    async with serving() as (server, channel):
        assert await check(channel) is Code.OK
        with ExitStack() as stack:
            address = ("127.0.0.1", server.port)
            served = []
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(address, SECONDS))
                served.append(await asyncio.to_thread(is_served, connection))
        assert served == [True, False]
    monkeypatch.setattr(channels, "HANDSHAKE_MS", 100)
    async with serving() as (server, _):
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as silent_one:
            assert await asyncio.to_thread(is_closed, silent_one)


class Arrived:
    """What has arrived of a request. Bytes have no weak references."""


class RefusedCall:
    """A call as gRPC keeps it: with what arrived, and with the exception that ends it."""

    def __init__(self, statuses: list[Any]) -> None:
        self.arrived = Arrived()
        self.kept: grpc.aio.AbortError | None = None
        self._statuses = statuses

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> bytes:
        return b""

    async def abort(self, code: Code, *_: Any) -> None:
        self._statuses.append(code)
        self.kept = grpc.aio.AbortError("over")
        raise self.kept


@contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(("refusal", "code"), [("loading", Code.UNAVAILABLE), ("", Code.RESOURCE_EXHAUSTED)])
async def test_refused_call_is_freed_with_what_arrived_of_its_request(refusal: str, code: Code) -> None:
    """At once, and not at the next collection, whether it is refused unread or by its method."""

    async def serve(_request: Any, _context: Any) -> None:
        raise NoRoomError("full")

    async def find(_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(serve, request_deserializer=bytes)

    gate, statuses = ServiceGate(), list[Any]()
    gate.refusal = refusal
    details: Any = SimpleNamespace(method=f"/{SERVICE}/GetServer")
    handler: Any = await gate.intercept_service(find, details)
    call = RefusedCall(statuses)
    arrived = weakref.ref(call.arrived)
    with without_collections():
        await handler.stream_unary(None, call)
        del call
        assert arrived() is None
    assert statuses == [code]


async def test_message_is_freed_with_the_stream_whose_reader_refuses_it() -> None:
    """At once, although the stream's tasks keep the exception, and its traceback the tasks."""
    statuses, messages = list[Any](), list[weakref.ref[Arrived]]()

    async def refuse(message: Arrived) -> None:
        messages.append(weakref.ref(message))
        raise NoRoomError("full")

    async def serve(_requests: Any, _context: Any) -> None:
        await exchange(refuse(Arrived()), asyncio.Event().wait())

    async def find(_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(serve, request_deserializer=bytes)

    gate = ServiceGate()
    gate.refusal = ""
    details: Any = SimpleNamespace(method="/draftwire.v1.VerifierService/RunTargetSessions")
    handler: Any = await gate.intercept_service(find, details)
    with without_collections():
        await handler.stream_stream(None, RefusedCall(statuses))
        assert [message() for message in messages] == [None]
    assert statuses == [Code.RESOURCE_EXHAUSTED]


def test_unready_service_may_take_calls_and_one_that_refuses_is_unready() -> None:
    reasons = [""]
    gate = ServiceGate(why_unready=lambda: reasons[0])
    states = []
    for gate.refusal, reasons[0] in (("loading", ""), ("", ""), ("", "no verifier answers"), ("draining", "full")):
        states.append(gate.unready)
    assert states == ["loading", "", "no verifier answers", "draining"]
