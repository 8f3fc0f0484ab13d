"""Connections of the HTTP edge whose other end does nothing, in this process and without a core."""

import asyncio
import errno
import socket
import ssl
import threading
import tomllib
from asyncio.sslproto import SSLProtocol
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trustme
from observing import until
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from draftwire.runtime import http_connection, http_server, metrics_endpoint
from draftwire.runtime.http_connection import Connections, HttpConnection
from draftwire.runtime.http_parser import MAX_EVENTS, SMALL_CHUNKS, RequestParser
from draftwire.runtime.http_server import HttpEndpoint, HttpListener
from draftwire.runtime.metrics_endpoint import metrics_listener
from draftwire.runtime.process import LostErrors
from draftwire.runtime.settings import ConnectionSettings, ServerSettings
from draftwire_gateway.http.streaming import _while_connected
from tests.attacks.http_tls import Secured, in_records, large_hello

ROOT = Path(__file__).parents[2]
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
PART = b"x" * 2**16
ANSWER_END = b"4\r\nwell\r\n0\r\n\r\n"


class Gate:
    refusal = ""


class Endless:
    """Answers with more than anybody reads, unless the request is for something else."""

    def __init__(self) -> None:
        self.sent = 0
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        """Ends the silence of `/silent`."""
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.began.set()
        try:
            await _while_connected(receive, self._answer(scope["path"], send))
        finally:
            self.ended.set()

    async def _answer(self, path: str, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while path == "/endless":
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            self.sent += 1
            await asyncio.sleep(0)
        if path == "/silent":
            await asyncio.wait_for(self.may_end.wait(), 60.0)
        await send({"type": "http.response.body", "body": b"well"})


@asynccontextmanager
async def listening(app: Any, max_connections: int = 100) -> AsyncIterator[int]:
    endpoint = HttpEndpoint("127.0.0.1", 0, max_connections=max_connections)
    async with started(HttpListener(lambda _gate: app, endpoint, ConnectionSettings())) as port:
        yield port


@asynccontextmanager
async def started(listener: HttpListener) -> AsyncIterator[int]:
    port = await listener.start(Gate())  # type: ignore[arg-type]
    try:
        yield port
    finally:
        await listener.stop()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[socket.socket]:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    with raw:
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        yield raw


async def received(raw: socket.socket) -> bytes:
    """Returns what comes until the other end closes."""
    loop, said = asyncio.get_running_loop(), b""
    while part := await asyncio.wait_for(loop.sock_recv(raw, 2**16), 10.0):
        said += part
    return said


async def send(raw: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(raw, data)


async def answer(raw: socket.socket) -> bytes:
    """Returns what comes until an answer is complete, or the other end closes."""
    loop, said = asyncio.get_running_loop(), b""
    async with asyncio.timeout(10.0):
        while not said.endswith(ANSWER_END) and (part := await loop.sock_recv(raw, 2**16)):
            said += part
    return said


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the context of a server, and that of a client who trusts it."""
    ca, context, trusting = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    ca.issue_cert("localhost").configure_cert(context)
    ca.configure_trust(trusting)
    return context, trusting


def state_of(listener: HttpListener) -> Connections:
    assert isinstance(listener._server, http_server._Server)
    return listener._server.server_state


async def test_reader_that_stops_reading_is_cut_and_its_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "SEND_SECONDS", 0.3)
    app = Endless()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"/ ", b"/endless ") + b"ab")
        await asyncio.wait_for(app.ended.wait(), 10.0)
        assert app.sent * len(PART) < 2**25, "and costs no more than what the kernel holds"


async def test_reader_that_is_slow_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "SEND_SECONDS", 1.5)
    app = Endless()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"/ ", b"/endless ") + b"ab")
        await asyncio.wait_for(app.began.wait(), 10.0)
        for _ in range(25):
            await asyncio.sleep(0.1)
            for _ in range(100):
                await asyncio.get_running_loop().sock_recv(raw, 2**16)
        assert not app.ended.is_set()


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n"], ids=["nothing", "half a head"])
async def test_connection_that_finishes_no_head_is_closed(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.3)
    app = Endless()
    async with listening(app) as port:
        async with connected(port) as raw:
            await send(raw, begun)
            assert await received(raw) == b""
        async with connected(port) as later:
            await send(later, HEAD + b"ab" + begun)
            assert (await received(later)).endswith(ANSWER_END), "an answer, then the same"


async def test_request_that_takes_long_is_not_cut_by_the_deadline_of_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.2)
    app = Endless()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        await asyncio.wait_for(app.began.wait(), 10.0)
        await asyncio.sleep(0.6)
        assert not app.ended.is_set()


async def test_connection_beyond_the_limit_is_closed_if_all_others_are_at_work() -> None:
    app = Endless()
    async with listening(app, max_connections=1) as port, connected(port) as first:
        await send(first, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        await asyncio.wait_for(app.began.wait(), 10.0)
        async with connected(port) as second:
            assert await received(second) == b""
        assert not app.ended.is_set()


@dataclass(frozen=True, slots=True)
class Begun:
    """What a client sends before the server waits for it."""

    data: bytes
    rest: bytes
    """What makes a request of it; a request, if it was one."""
    has_come: Callable[[HttpConnection], bool]
    """Whether the server has it all."""


BEGUN = {
    "nothing": Begun(b"", HEAD + b"ab", lambda one: True),
    "half a head": Begun(HEAD[:20], HEAD[20:] + b"ab", lambda one: one.conn.trailing_data[0] == HEAD[:20]),
    "half a body": Begun(HEAD + b"a", b"b", lambda one: one.cycle is not None and not one.conn.trailing_data[0]),
    "an answer": Begun(
        HEAD + b"ab", HEAD + b"ab", lambda one: one.cycle is not None and bool(one.cycle.response_complete)
    ),
    "an answer that is not read": Begun(
        HEAD.replace(b"/ ", b"/endless ") + b"ab", b"", lambda one: one.flow is not None and one.flow.write_paused
    ),
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=list(BEGUN))
async def test_who_keeps_the_server_waiting_keeps_nobody_out(begun: Begun) -> None:
    """The longest of those that wait make room, and not the one that is at work, nor the newest."""
    app = Endless()
    listener = HttpListener(lambda _gate: app, HttpEndpoint("127.0.0.1", 0, max_connections=4), ConnectionSettings())
    async with started(listener) as port, AsyncExitStack() as opened:
        state = state_of(listener)
        at_work = await opened.enter_async_context(connected(port))
        await send(at_work, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        assert (await asyncio.get_running_loop().sock_recv(at_work, 2**16)).startswith(b"HTTP/1.1 200")
        waiting = []
        for number in range(3):
            before = set(state.connections)
            waiting.append(raw := await opened.enter_async_context(connected(port)))
            await until(lambda number=number: len(state.connections) == number + 2, "it is accepted")
            (connection,) = state.connections - before
            await send(raw, begun.data)
            await until(lambda one=connection: begun.has_come(one), "the server has what was sent")
            if begun.data == begun.rest:
                assert (await answer(raw)).endswith(ANSWER_END)
        await until(lambda: len(state.waiting) == 3, "the server waits for all of them")
        honest = await opened.enter_async_context(connected(port))
        await send(honest, HEAD + b"ab")
        assert (await answer(honest)).startswith(b"HTTP/1.1 200")
        await until(lambda: len(state.connections) == 4, "one was closed for it")
        if begun.rest:
            with suppress(ConnectionResetError):
                assert await received(waiting[0]) == b"", "which waited longest"
            await send(waiting[1], begun.rest)
            assert (await answer(waiting[1])).startswith(b"HTTP/1.1 200")
        app.may_end.set()
        assert (await answer(at_work)).endswith(ANSWER_END)


async def test_who_never_shakes_hands_is_counted_and_keeps_nobody_out() -> None:
    context, trusting = contexts()
    endpoint = HttpEndpoint("127.0.0.1", 0, context, max_connections=4)
    async with (
        started(HttpListener(lambda _gate: Endless(), endpoint, ConnectionSettings())) as port,
        AsyncExitStack() as opened,
    ):
        silent = [await opened.enter_async_context(connected(port)) for _ in range(6)]
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
            writer.write(HEAD + b"ab")
            assert (await asyncio.wait_for(reader.read(100), 10.0)).startswith(b"HTTP/1.1 200")
            writer.close()
        with suppress(ConnectionResetError):
            assert await received(silent[0]) == b""
        reader, writer = await asyncio.open_connection(sock=silent[5], ssl=trusting, server_hostname="localhost")
        writer.write(HEAD + b"ab")
        assert (await asyncio.wait_for(reader.read(100), 10.0)).startswith(b"HTTP/1.1 200"), "nor is the newest closed"
        writer.close()


async def test_what_was_not_read_of_a_body_is_not_kept_once_it_is_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    listener = HttpListener(lambda _gate: app, HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    async with started(listener) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"length: 2", b"length: 8000000") + PART)
        assert (await asyncio.get_running_loop().sock_recv(raw, 2**16)).startswith(b"HTTP/1.1 404")
        (connection,) = state_of(listener).connections
        assert connection.cycle.body == b""  # type: ignore[union-attr]


async def test_no_more_of_a_body_is_read_than_one_part_until_it_is_asked_for() -> None:
    asked_for, sizes = asyncio.Event(), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asked_for.wait()
        sizes.extend([len((await receive())["body"]) for _ in range(3)])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    listener = HttpListener(lambda _gate: app, HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    async with started(listener) as port, connected(port) as raw:
        sending = asyncio.create_task(send(raw, HEAD.replace(b"length: 2", b"length: 2000000") + 30 * PART))
        connections = state_of(listener).connections
        await until(lambda: any(one.cycle and one.cycle.body for one in connections), "a part is read")  # type: ignore
        (connection,) = connections
        held, is_reading = len(connection.cycle.body), connection.transport.is_reading()  # type: ignore[union-attr]
        asked_for.set()
        await sending
        assert (await asyncio.get_running_loop().sock_recv(raw, 2**16)).startswith(b"HTTP/1.1 404")
    assert (0 < held <= http_connection.READ_BYTES, is_reading) == (True, False)
    assert max(sizes) <= http_connection.READ_BYTES


class Refusing:
    """Answers without reading bodies, unless they are for `/read`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Of the bodies, as far as they were read."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, has_more = 0, scope["path"] == "/read"
        while has_more:
            message = await receive()
            size, has_more = size + len(message.get("body", b"")), message.get("more_body", False)
        self.sizes.append(size)
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
TINY = b"1\r\nx\r\n"


async def test_no_more_than_one_turn_of_a_body_is_parsed_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its connection ends with the answer, which the client sees, whatever it still sends."""
    turn, turns, next_event = 0, Tally[int](), RequestParser.next_event

    def counted(parser: RequestParser) -> Any:
        left = parser.events_left
        event = next_event(parser)
        turns[turn] += left - parser.events_left
        return event

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(RequestParser, "next_event", counted)
    async with listening(Refusing()) as port, connected(port) as raw:
        working = asyncio.create_task(others())
        sending = asyncio.create_task(send(raw, CHUNKED + TINY * 300_000))
        text = await received(raw)
        await sending
        working.cancel()
    assert text.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in text
    assert turns.total() == MAX_EVENTS


async def test_body_that_is_asked_for_is_parsed_in_many_turns_and_whole() -> None:
    app = Refusing()
    body = TINY * (SMALL_CHUNKS - 1) + b"%x\r\n%s\r\n" % (len(PART), PART) * 40 + TINY * 99 + b"0\r\n\r\n"
    async with listening(app) as port, connected(port) as raw:
        for _ in range(2):
            await send(raw, CHUNKED.replace(b"/ ", b"/read ") + body)
            assert b"connection: close" not in await asyncio.get_running_loop().sock_recv(raw, 2**16)
    assert app.sizes == [SMALL_CHUNKS - 1 + len(PART) * 40 + 99] * 2


async def test_body_of_tiny_chunks_is_refused_and_its_request_ends() -> None:
    app = Refusing()
    async with listening(app) as port, connected(port) as raw:
        sending = asyncio.create_task(send(raw, CHUNKED.replace(b"/ ", b"/read ") + TINY * 300_000))
        assert (await received(raw)).startswith(b"HTTP/1.1 413")
        await sending
        await until(lambda: app.sizes != [], "the request has ended")
    assert SMALL_CHUNKS - MAX_EVENTS <= app.sizes[0] <= SMALL_CHUNKS


async def test_connection_that_ends_early_is_closed_though_its_client_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_SECONDS", 0.3)
    listener = HttpListener(lambda _gate: Refusing(), HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    async with started(listener) as port, connected(port) as raw:
        await send(raw, CHUNKED)
        assert (await asyncio.get_running_loop().sock_recv(raw, 2**16)).startswith(b"HTTP/1.1 401")
        await until(lambda: not state_of(listener).connections, "it is closed")
    context, trusting = contexts()
    listener = HttpListener(lambda _gate: Refusing(), HttpEndpoint("127.0.0.1", 0, context), ConnectionSettings())
    async with started(listener) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
        writer.write(CHUNKED + TINY)
        assert (await asyncio.wait_for(reader.read(2**16), 10.0)).startswith(b"HTTP/1.1 401")
        await until(lambda: not state_of(listener).connections, "over TLS too, which cannot be closed by halves")
        writer.close()


async def test_few_records_of_tls_are_decrypted_at_once_however_small_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    context, trusting = contexts()
    asked_for, sizes, read = asyncio.Event(), list[int](), SSLProtocol._do_read

    def measured(protocol: SSLProtocol) -> None:
        sizes.append(protocol._incoming.pending)
        read(protocol)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asked_for.wait()
        await Refusing()(scope | {"path": "/read"}, receive, send)

    monkeypatch.setattr(SSLProtocol, "_do_read", measured)
    endpoint = HttpEndpoint("127.0.0.1", 0, context)
    async with started(HttpListener(lambda _gate: app, endpoint, ConnectionSettings())) as port, connected(port) as raw:
        incoming, outgoing, loop = ssl.MemoryBIO(), ssl.MemoryBIO(), asyncio.get_running_loop()
        client = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                await send(raw, outgoing.read())
                incoming.write(await loop.sock_recv(raw, 2**16))
        client.write(HEAD.replace(b"length: 2", b"length: 2020000"))
        for _ in range(20_000):
            client.write(b"x")
        for _ in range(100):
            client.write(b"x" * 20_000)
        sending = asyncio.create_task(send(raw, outgoing.read()))
        await until(lambda: sum(sizes) > http_connection.TLS_READ_BYTES, "it arrives")
        await asyncio.sleep(0.05)  # in which more would arrive
        asked_for.set()
        await sending
        while True:
            try:
                assert client.read(2**16).startswith(b"HTTP/1.1 401")
                break
            except ssl.SSLWantReadError:
                incoming.write(await asyncio.wait_for(loop.sock_recv(raw, 2**16), 10.0))
    assert max(sizes) <= 2 * http_connection.TLS_READ_BYTES


async def test_messages_that_change_the_keys_of_tls_are_read_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs 20 µs, whatever it is good for, and 300 fit into a read that costs 20 µs otherwise."""
    context, _ = contexts()
    sizes, updated, all_read = list[int](), SSLProtocol.buffer_updated, threading.Event()

    def measured(protocol: SSLProtocol, num_bytes: int) -> None:
        sizes.append(num_bytes)
        updated(protocol, num_bytes)

    def flood(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as raw:
            connection = Secured(raw)
            for _ in range(10):
                connection.update_keys(512)
            all_read.wait(10.0)

    monkeypatch.setattr(SSLProtocol, "buffer_updated", measured)
    app, endpoint = Refusing(), HttpEndpoint("127.0.0.1", 0, context)
    async with started(HttpListener(lambda _gate: app, endpoint, ConnectionSettings())) as port:
        flooding = asyncio.create_task(asyncio.to_thread(flood, port))
        await until(lambda: sum(sizes) > 100_000, "most is read")
        all_read.set()
        await flooding
    assert sum(sizes) / len(sizes) < http_connection.TLS_READ_BYTES / 4


async def test_handshake_of_any_length_is_not_read_to_its_end() -> None:
    context, _ = contexts()
    endpoint = HttpEndpoint("127.0.0.1", 0, context)
    listener = HttpListener(lambda _gate: Refusing(), endpoint, ConnectionSettings())
    async with started(listener) as port, connected(port) as raw:
        with suppress(ConnectionError):
            await send(raw, in_records(large_hello(), 1))
            assert await received(raw) == b""
        await until(lambda: not state_of(listener).connections, "it is aborted")


async def test_requests_behind_each_other_are_all_answered() -> None:
    app = Refusing()
    async with listening(app) as port, connected(port) as raw:
        sending = asyncio.create_task(send(raw, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000))
        text, loop = b"", asyncio.get_running_loop()
        async with asyncio.timeout(20.0):
            while text.count(b"HTTP/1.1 401") < 2000:
                text += await loop.sock_recv(raw, 2**16)
        await sending


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"GET /read HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 200 + b"\r\n", b"431"),
        (b"no request\r\n\r\n", b"400"),
    ],
    ids=["two lengths", "body of GET", "lines", "no request"],
)
async def test_request_that_the_parser_refuses_is_answered_and_reaches_no_route(head: bytes, status: bytes) -> None:
    app = Refusing()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, head + b"abc" * 100)
        text = await received(raw)
    assert text.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in text
    assert app.sizes == []


async def test_metrics_take_no_bodies() -> None:
    listener = metrics_listener(CollectorRegistry(), ServerSettings(metrics_port=0), ConnectionSettings())
    assert listener is not None
    async with started(listener) as port:
        for head in (CHUNKED, CHUNKED.replace(b"POST", b"GET"), HEAD):
            async with connected(port) as raw:
                await send(raw, head)
                assert (await received(raw)).startswith(b"HTTP/1.1 413")


async def test_server_without_files_logs_it_once_and_goes_on_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = 0

    def fails(_socket: socket.socket) -> Any:
        nonlocal failures
        failures += 1
        raise OSError(errno.EMFILE, "too many open files")

    async with listening(Refusing()) as port, AsyncExitStack() as opened:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LostErrors())
        with capture_logs() as lines, monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", fails)
            waiting = [await opened.enter_async_context(connected(port)) for _ in range(90)]
            await until(lambda: failures > http_server.ACCEPTED_IN_A_TURN, "it was tried again")
        assert failures <= 4 * http_server.ACCEPTED_IN_A_TURN, "and not for each that waits"
        assert [line["event"] for line in lines] == ["process.open_files_exhausted"]
        for raw in waiting:
            await send(raw, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await received(raw)).startswith(b"HTTP/1.1 401")


async def test_half_of_the_files_that_may_be_open_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_max_open_files", lambda: 2)
    async with listening(Endless()) as port, connected(port) as first, connected(port):
        with suppress(ConnectionResetError):
            assert await received(first) == b""


async def test_silent_scrapers_cost_no_thread_and_keep_nobody_from_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "MAX_SCRAPERS", 4)
    registry = CollectorRegistry()
    Counter("x", "Some number.", registry=registry).inc(3)
    listener = metrics_listener(registry, ServerSettings(metrics_port=0), ConnectionSettings())
    assert listener is not None
    threads: list[int] = []
    async with started(listener) as port, AsyncExitStack() as opened:
        for num_silent in (6, 12):
            for _ in range(num_silent):
                await opened.enter_async_context(connected(port))
            honest = await opened.enter_async_context(connected(port))
            await send(honest, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert b"x_total 3.0" in await received(honest)
            threads.append(threading.active_count())
    assert threads[0] == threads[1]


def test_connections_are_those_of_the_versions_that_they_were_written_for() -> None:
    """After an upgrade: read http_connection.py beside uvicorn's h11_impl.py again, then change the versions there."""
    assert (version("uvicorn"), version("h11")) == (http_connection.UVICORN, http_connection.H11)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gateway"]
    assert {f"uvicorn=={http_connection.UVICORN}", f"h11=={http_connection.H11}"} <= set(wanted)


async def test_drain_closes_connections_as_soon_as_they_have_no_request() -> None:
    """So that a client which keeps connections open sends its next request elsewhere, instead of being refused here."""
    app = Endless()
    listener = HttpListener(lambda _gate: app, HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    async with started(listener) as port, AsyncExitStack() as opened:
        kept, late, at_work, begun, new = [await opened.enter_async_context(connected(port)) for _ in range(5)]
        for raw in (kept, late):
            await send(raw, HEAD + b"ab")
            assert b"connection: close" not in await answer(raw)
        await send(at_work, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        assert (await asyncio.get_running_loop().sock_recv(at_work, 2**16)).startswith(b"HTTP/1.1 200")
        await send(begun, HEAD + b"ab")
        assert (await answer(begun)).endswith(ANSWER_END)
        await send(begun, HEAD[:10])
        await until(
            lambda: sum(one.is_kept for one in state_of(listener).connections) == 2, "a part of a head has come"
        )
        draining = asyncio.create_task(listener.drain())
        await until(lambda: state_of(listener).is_draining, "it drains")
        await send(late, HEAD + b"ab")  # which was on its way
        assert await received(kept) == b""
        await draining
        await send(begun, HEAD[10:] + b"ab")
        await send(new, HEAD + b"ab")
        for raw in (late, begun, new):
            text = await received(raw)
            assert text.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in text
        app.may_end.set()
        assert (await received(at_work)).endswith(ANSWER_END), "it is answered, and then ends"


async def test_client_that_goes_away_after_sending_more_is_noticed() -> None:
    app, ahead = Endless(), b"GET / HTTP/1.1\r\n"
    listener = HttpListener(lambda _gate: app, HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    async with started(listener) as port:
        async with connected(port) as raw:
            await send(raw, HEAD.replace(b"/ ", b"/silent ") + b"ab")
            await asyncio.wait_for(app.began.wait(), 10.0)
            (connection,) = state_of(listener).connections
            for number in range(1, 4):
                await send(raw, ahead)
                await until(
                    lambda number=number: connection.conn.trailing_data[0] == number * ahead,  # type: ignore[union-attr]
                    "it has been read",
                )
        await asyncio.wait_for(app.ended.wait(), 5.0)


async def test_what_is_sent_ahead_is_bounded() -> None:
    app = Endless()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        await asyncio.wait_for(app.began.wait(), 10.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(raw, b"x" * 2**25), 1.0)


async def test_failure_of_the_server_is_seen_and_does_not_block_its_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = HttpListener(lambda _gate: Endless(), HttpEndpoint("127.0.0.1", 0), ConnectionSettings())
    await listener.start(Gate())  # type: ignore[arg-type]

    async def fails(_counter: int) -> bool:
        raise OSError("broken")

    monkeypatch.setattr(listener._server, "on_tick", fails)
    with pytest.raises(OSError, match="broken"):
        await asyncio.wait_for(listener.run(), 5.0)
    await listener.stop()
