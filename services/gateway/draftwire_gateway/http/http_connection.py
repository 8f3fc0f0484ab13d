"""One connection of the HTTP edge: uvicorn's, with a bound on every wait for whoever is at its other end."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0
"""How long a connection may take to send a whole head of a request, from when it is opened or was last answered."""
SEND_SECONDS = 300.0
"""How long a reader may take no more of an answer before the connection is cut, and what it asked for ends."""
MAX_CONNECTIONS = 4096
"""More are closed as soon as they are opened."""
MAX_BYTES_AHEAD = 2**16
"""How much of further requests is read while one is answered: only who is read is noticed when they go away."""


class HttpConnection(H11Protocol):
    """A connection whose peer cannot hold it, or what it asked for, for ever by doing nothing."""

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
        """Called after anything has come."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _end(self._head_deadline)
            if not self.flow.write_paused:  # that of the answer before, which was not read at once
                _end(self._send_deadline)
        is_ahead = self.conn.their_state is h11.DONE and self.flow.read_paused
        if is_ahead and len(self.conn.trailing_data[0]) <= MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    @override
    def on_response_complete(self) -> None:
        """Called when all of an answer was handed to the transport, which may still hold some."""
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
        """Cuts the connection: closing it would wait until the rest is read."""
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
