"""uvicorn's HTTP connection, with a timeout on every wait for the peer."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0
"""Timeout for a complete request head, from when the connection was opened or the last response was complete."""
SEND_SECONDS = 300.0
"""How long a client may read nothing of a response before the connection is aborted and its request cancelled."""
MAX_CONNECTIONS = 4096
"""Further connections are closed at once."""
MAX_BYTES_AHEAD = 2**16
"""Bytes of pipelined requests read during a response: a disconnect is noticed only while the connection is read."""


class HttpConnection(H11Protocol):
    """A connection with timeouts, so that an idle or stalled peer cannot hold it or its request for ever."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._head_deadline = self._renewed(self._head_deadline, HEAD_SECONDS, self.timeout_keep_alive_handler)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        _end(self._head_deadline)
        _end(self._send_deadline)
        super().connection_lost(exc)

    @override
    def handle_events(self) -> None:
        """Called after data has arrived."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _end(self._head_deadline)
            if not self.flow.write_paused:  # the deadline of the previous response, which was still in the buffer
                _end(self._send_deadline)
        is_ahead = self.conn.their_state is h11.DONE and self.flow.read_paused
        if is_ahead and len(self.conn.trailing_data[0]) <= MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    @override
    def on_response_complete(self) -> None:
        """Called when a whole response was handed to the transport, which may still buffer a part."""
        self._head_deadline = self._renewed(self._head_deadline, HEAD_SECONDS, self.timeout_keep_alive_handler)
        if self.transport.get_write_buffer_size() and not self.flow.write_paused:
            self._send_deadline = self._renewed(self._send_deadline, SEND_SECONDS, self._cut_unread)
        super().on_response_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self._renewed(self._send_deadline, SEND_SECONDS, self._cut_unread)

    @override
    def resume_writing(self) -> None:
        _end(self._send_deadline)
        super().resume_writing()

    def _cut_unread(self) -> None:
        """Aborts the connection if data is unread: closing would wait until it is read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _renewed(
        self, deadline: asyncio.TimerHandle | None, seconds: float, end: Callable[[], None]
    ) -> asyncio.TimerHandle:
        _end(deadline)
        return self.loop.call_later(seconds, end)


def _end(deadline: asyncio.TimerHandle | None) -> None:
    if deadline is not None:
        deadline.cancel()
