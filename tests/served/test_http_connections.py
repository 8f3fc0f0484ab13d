"""Connections of the HTTP edge whose other end does nothing, in this process and without a core."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftwire.runtime.settings import ConnectionSettings
from draftwire_gateway.http import http_connection
from draftwire_gateway.http.http_server import HttpListener
from draftwire_gateway.http.streaming import _while_connected

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
PART = b"x" * 2**16


class Gate:
    refusal = ""


class Endless:
    """Answers with more than anybody reads, unless the request is for something else."""

    def __init__(self) -> None:
        self.sent = 0
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
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
            await asyncio.sleep(60)
        await send({"type": "http.response.body", "body": b"well"})


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    listener = HttpListener(lambda _gate: app, "127.0.0.1", 0, ConnectionSettings(), None)
    port = await listener.start(Gate())
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


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.01)


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
            assert (await received(later)).endswith(b"\r\n4\r\nwell\r\n0\r\n\r\n"), "an answer, then the same"


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


async def test_connections_beyond_the_limit_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_CONNECTIONS", 1)
    async with listening(Endless()) as port, connected(port) as first:
        await send(first, HEAD)
        async with connected(port) as second:
            assert await received(second) == b""
        await send(first, b"ab")
        assert (await asyncio.get_running_loop().sock_recv(first, 100)).startswith(b"HTTP/1.1 200")


async def test_client_that_goes_away_after_sending_more_is_noticed() -> None:
    app = Endless()
    async with listening(app) as port:
        async with connected(port) as raw:
            await send(raw, HEAD.replace(b"/ ", b"/silent ") + b"ab")
            await asyncio.wait_for(app.began.wait(), 10.0)
            for _ in range(3):
                await send(raw, b"GET / HTTP/1.1\r\n")
                await asyncio.sleep(0.05)
        await asyncio.wait_for(app.ended.wait(), 5.0)


async def test_what_is_sent_ahead_is_bounded() -> None:
    app = Endless()
    async with listening(app) as port, connected(port) as raw:
        await send(raw, HEAD.replace(b"/ ", b"/silent ") + b"ab")
        await asyncio.wait_for(app.began.wait(), 10.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(raw, b"x" * 2**25), 1.0)


async def test_failure_of_the_server_is_seen_and_does_not_keep_it_from_being_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = HttpListener(lambda _gate: Endless(), "127.0.0.1", 0, ConnectionSettings(), None)
    await listener.start(Gate())

    async def fails(_counter: int) -> bool:
        raise OSError("broken")

    monkeypatch.setattr(listener._server, "on_tick", fails)
    with pytest.raises(OSError, match="broken"):
        await asyncio.wait_for(listener.run(), 5.0)
    await listener.stop()
