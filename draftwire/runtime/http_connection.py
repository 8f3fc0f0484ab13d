"""uvicorn's HTTP connection, with a timeout on every wait for the peer and a bound on connections that wait for it.

uvicorn has no such limits. `UVICORN` and `H11` are the versions that this file was written for: it relies on how they
call the methods that it overrides, so others are taken only after that was read again.
"""

import asyncio
import ssl
from asyncio import sslproto
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from draftwire.runtime.http_parser import MAX_EVENTS, RefusedRequest, RequestParser
from draftwire.runtime.tls_reads import BoundedReads

UVICORN, H11 = "0.54.0", "0.16.0"
"""The versions that pyproject.toml pins."""
HEAD_SECONDS = 60.0
"""Timeout for a complete request head, from when the connection was opened or the last response was complete."""
SEND_SECONDS = 300.0
"""How long a client may read nothing of a response before the connection is aborted and its request cancelled."""
MAX_BYTES_AHEAD = 2**16
"""Bytes of pipelined requests read during a response: a disconnect is noticed only while the connection is read."""
ON_THE_WAY_SECONDS = 0.25
"""How long a server that drains serves calls that were sent before their clients were told to go elsewhere."""
LINGER_SECONDS = 2.0
"""How long a connection that ends before its request is still read, so that its client sees the answer: closing with
unread data would reset the connection."""
READ_BYTES = 2**15
"""Bytes read at once. asyncio reads eight times as many, and what comes with a head is in no budget yet."""

TLS_READ_BYTES = 2**13
"""Bytes read at once of a connection with TLS, and kept while it is not read. What they cost depends on the number of
records, which may have one byte each, and grows with its square: asyncio reads 256 KiB, for 1,000 times as much."""


class Connections(ServerState):
    """State that the connections of one server share."""

    def __init__(self, most: int, tls: ssl.SSLContext | None = None, *, takes_bodies: bool = True) -> None:
        """Lets `most` connections be open at once. Without `takes_bodies`, no request may have a body."""
        super().__init__()
        self.most = most
        self.tls = tls
        if tls is not None:
            sslproto.SSLProtocol.max_size = TLS_READ_BYTES  # of what `start_tls` makes, which has no option for it
        self.takes_bodies = takes_bodies
        self.is_draining = False
        """Whether each connection ends after its next response."""
        self.waiting: OrderedDict[HttpConnection | TlsHandshake, None] = OrderedDict()
        """Connections that wait for their clients: for a handshake, for a head or the rest of a body, or to read what
        was sent. The longest first."""

    async def drain(self) -> None:
        """Lets each connection end after its next response, and closes those that have none to give.

        So a client's next request opens a connection, which leads elsewhere, instead of being refused on its old one.
        One that clients keep open is closed only after `ON_THE_WAY_SECONDS`: its next request may have been sent.
        """
        self.is_draining = True
        if any(connection.is_kept for connection in self._http):
            await asyncio.sleep(ON_THE_WAY_SECONDS)
        for connection in self._http:
            if connection.is_kept:
                connection.shutdown()
            elif connection.cycle is not None:
                connection.close_after_response()

    @property
    def _http(self) -> list["HttpConnection"]:
        return [connection for connection in self.connections if isinstance(connection, HttpConnection)]

    def make_room(self) -> None:
        """Aborts the connection that has waited longest, if there are too many.

        Who sends nothing so keeps nobody out: a client that sends its request at once waits for less than the time in
        which all places are taken anew. If no connection waits, the newest is the one that is aborted.
        """
        if len(self.connections) > self.most and self.waiting:
            longest, _ = self.waiting.popitem(last=False)
            longest.transport.abort()


class HttpConnection(H11Protocol):
    """A connection with timeouts, so that an idle or stalled peer cannot hold it or its request for ever.

    It parses a bounded part of a request in each turn of the event loop, and of a body no more than that before the
    application asks for it. A connection that is answered before its request has ended ends with the answer.
    """

    server_state: Connections
    conn: RequestParser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = RequestParser(takes_bodies=self.server_state.takes_bodies)
        self._routes, self.app = self.app, self._serve
        self._turn: asyncio.Handle | None = None
        """Begins the next turn of the event loop; None if nothing was parsed in this one."""
        self._linger_deadline: asyncio.TimerHandle | None = None
        self._head_deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # of the event loop's own transports
            transport.max_size = READ_BYTES
        if hasattr(transport, "set_read_buffer_limits"):  # of those with TLS
            transport.set_read_buffer_limits(TLS_READ_BYTES)
        self._wait_for_client()
        self.server_state.make_room()
        self._head_deadline = self._renewed(self._head_deadline, HEAD_SECONDS, self.timeout_keep_alive_handler)

    @property
    def is_kept(self) -> bool:
        """Whether a response is complete, and nothing of a next request has arrived."""
        is_over = self.cycle is not None and self.cycle.response_complete
        return is_over and not self.conn.trailing_data[0]

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.waiting.pop(self, None)
        _end(self._head_deadline)
        _end(self._send_deadline)
        _end(self._linger_deadline)
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        """Called with at most `READ_BYTES`."""
        if self._linger_deadline is None:
            super().data_received(data)

    @override
    def handle_events(self) -> None:
        """Called after data has arrived, and to go on with what has."""
        if self._turn is None:
            self._turn = self.loop.call_soon(self._begin_turn)
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            if self.server_state.is_draining:
                self.close_after_response()
            if self.cycle.more_body:  # the application asks for each further part, when there is room for it
                self.flow.pause_reading()
            _end(self._head_deadline)
            self._go_on()
            if not self.flow.write_paused:  # the deadline of the previous response, which was still in the buffer
                _end(self._send_deadline)
        is_ahead = self.conn.their_state is h11.DONE and self.flow.read_paused
        if is_ahead and len(self.conn.trailing_data[0]) <= MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    def _begin_turn(self) -> None:
        self._turn = None
        self.conn.events_left = MAX_EVENTS
        is_asked_for = self.cycle is None or self.cycle.response_complete  # a body only by its application
        if self.conn.is_held and is_asked_for and self._linger_deadline is None and not self.transport.is_closing():
            self.handle_events()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request: the application that uvicorn calls."""
        cycle = self.cycle

        async def receive_more() -> Any:
            if self.conn.is_held and cycle.more_body and not cycle.disconnected:
                if self.conn.events_left == 0:
                    await asyncio.sleep(0)
                self.handle_events()
            message = await receive()
            if self.conn.is_held:  # no further part is read before this one is parsed
                self.flow.pause_reading()
            return message

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:
                self.close_after_response()
                cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]  # all that a cycle uses of one
            await send(message)

        await self._routes(scope, receive_more, send_on)

    @override
    def send_400_response(self, msg: str) -> None:
        """Answers a request that is refused, and ends the connection. The application sees its client disconnect."""
        fault = self.conn.fault or RefusedRequest()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has begun, or is over
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        content = str(fault).encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        reason = STATUS_PHRASES[fault.error_status_hint]
        response = h11.Response(status_code=fault.error_status_hint, headers=headers, reason=reason)
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.linger()

    def linger(self) -> None:
        """Ends the connection behind what was sent, once its client has closed it or `LINGER_SECONDS` have passed.

        Until then it is read, and nothing of that is parsed.
        """
        if self._linger_deadline is not None or self.transport.is_closing():
            return
        _end(self._head_deadline)
        self._linger_deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        self._wait_for_client()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    @override
    def on_response_complete(self) -> None:
        """Called when a whole response was handed to the transport, which may still buffer a part."""
        self.cycle.body = bytearray()  # what the application did not read, which nobody counts
        self._wait_for_client()
        if self._linger_deadline is None:
            self._head_deadline = self._renewed(self._head_deadline, HEAD_SECONDS, self.timeout_keep_alive_handler)
        if self.transport.get_write_buffer_size() and not self.flow.write_paused:
            self._send_deadline = self._renewed(self._send_deadline, SEND_SECONDS, self._cut_unread)
        super().on_response_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()
        self._send_deadline = self._renewed(self._send_deadline, SEND_SECONDS, self._cut_unread)

    @override
    def resume_writing(self) -> None:
        _end(self._send_deadline)
        super().resume_writing()
        self._go_on()

    def close_after_response(self) -> None:
        """Ends the connection after the response under way, which says so if it has not begun."""
        if self.cycle.keep_alive:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def _go_on(self) -> None:
        """Notes that the client is not waited for, if it is not."""
        cycle = self.cycle
        if cycle is not None and not (cycle.response_complete or cycle.more_body or self.flow.write_paused):
            self.server_state.waiting.pop(self, None)

    def _wait_for_client(self) -> None:
        if self in self.connections:  # it may have been lost
            self.server_state.waiting[self] = None
            self.server_state.waiting.move_to_end(self)

    def _cut_unread(self) -> None:
        """Aborts the connection if data is unread: closing would wait until it is read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _renewed(
        self, deadline: asyncio.TimerHandle | None, seconds: float, end: Callable[[], None]
    ) -> asyncio.TimerHandle:
        _end(deadline)
        return self.loop.call_later(seconds, end)


class _LingeringTransport:
    """The transport of a response that ends the connection before its request has ended."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Called by uvicorn behind the response."""
        self._connection.linger()


class TlsHandshake(asyncio.Protocol):
    """A connection until its TLS handshake is done, when an `HttpConnection` takes it over.

    asyncio's own way shows nobody a connection before that, so those that never shake hands would be in no count.
    """

    def __init__(
        self,
        config: Config,
        server_state: Connections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.transport: asyncio.Transport
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._http = HttpConnection(config, server_state, app_state, _loop)
        self._early = bytearray()
        self._is_lost = False
        self._handshake: asyncio.Task[None] | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self.transport = transport
        transport.pause_reading()  # until the handshake begins, which takes all that is read
        self._state.connections.add(self)  # type: ignore[arg-type]  # closed like a protocol of uvicorn's
        self._state.waiting[self] = None
        self._state.make_room()
        self._handshake = self._loop.create_task(self._shake_hands())

    @override
    def data_received(self, data: bytes) -> None:
        """Called after the handshake, before the connection is taken over."""
        self._early += data

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True

    def shutdown(self) -> None:
        """Called by the server when it stops."""
        self.transport.abort()

    async def _shake_hands(self) -> None:
        assert self._state.tls is not None, "handshakes need a context"
        secured: asyncio.Transport | None = None
        if not self.transport.is_closing():  # it may have made room for others at once
            handshake = self._loop.create_task(
                self._loop.start_tls(
                    self.transport, self, self._state.tls, server_side=True, ssl_handshake_timeout=HEAD_SECONDS
                )
            )
            await asyncio.sleep(0)  # it has begun, and nothing was read yet
            tls, connections = self.transport.get_protocol(), self._state.connections
            assert isinstance(tls, asyncio.BufferedProtocol), "as asyncio has it"
            reads = BoundedReads(self.transport, tls, TLS_READ_BYTES, lambda: len(connections))
            with suppress(OSError):  # all failures of TLS and of the network are
                secured = await handshake
            reads.is_shaking_hands = False
        self._state.connections.discard(self)
        self._state.waiting.pop(self, None)
        if secured is None or self._is_lost:
            return
        secured.set_protocol(self._http)
        self._http.connection_made(secured)
        if self._early:
            self._http.data_received(bytes(self._early))


def _end(deadline: asyncio.TimerHandle | None) -> None:
    if deadline is not None:
        deadline.cancel()
