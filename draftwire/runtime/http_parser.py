"""h11's parser, with bounds on its work in one turn of the event loop and on the parts that one request may have.

What h11 takes depends on the number of parts, not on their bytes: 5 µs for a chunk and 2 for a line of a head or of
trailers. A read of 32 KiB can hold 5,461 chunks or 8,000 lines.
"""

import re

import h11
from typing_extensions import override

MAX_EVENTS = 64
"""Events of one connection in one turn of the event loop; further ones wait for the next turn."""
MAX_HEAD_BYTES = 2**14
"""Size of a head or of trailers that are not complete, and of a line between chunks."""
MAX_HEAD_LINES = 128
"""Lines of a head, the request line counted."""
MAX_TRAILER_LINES = 16
"""Lines behind the last chunk, which mean nothing here."""
SMALL_CHUNKS = 256
"""Chunks that a body may have, whatever their size."""
CHUNK_BYTES = 512
"""Least size of the other chunks of a body, on average."""
BODILESS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
"""Methods whose requests have no body."""

_LAST_CHUNK = re.compile(rb"(?:\r?\n)?0+(?:[; \t][^\n]*)?\r\n")
"""Pattern of the last chunk, with the end of the chunk before it, of which a part may have been parsed."""
_LINE = rb"(?:[^\r\n][^\n]*\n){%d}"
_LONG_HEAD = re.compile(_LINE % (MAX_HEAD_LINES + 1))
_LONG_TRAILERS = re.compile(_LINE % (MAX_TRAILER_LINES + 1))


class RequestParser(h11.Connection):
    """The server's end of a connection, for uvicorn."""

    def __init__(self, *, takes_bodies: bool = True) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.events_left = MAX_EVENTS
        """Events left in this turn of the event loop; set by the connection."""
        self.is_held = False
        """Whether events may be left of what was received."""
        self.fault: h11.RemoteProtocolError | None = None
        """Reason why the request is refused."""
        self._takes_bodies = takes_bodies
        self._is_chunked = False
        self._is_between_chunks = False
        self._has_last_chunk = False
        self._num_chunks = 0
        self._body_bytes = 0

    @override
    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns what h11 does, or NEED_DATA if this turn has had its events.

        Raises:
            RemoteProtocolError: the request is refused; `fault` holds the error, whose message may be sent.
        """
        self.is_held = self.events_left == 0
        if self.is_held:
            return h11.NEED_DATA
        try:
            self._check_lines()
            event = super().next_event()
            if isinstance(event, h11.Event):
                self.events_left -= 1
                self._check(event)
        except h11.RemoteProtocolError as error:
            self.fault = error if isinstance(error, RefusedRequest) else RefusedRequest(error.error_status_hint)
            raise
        return event

    def _check_lines(self) -> None:
        """Refuses heads and trailers of too many lines before they are parsed."""
        if self.their_state is h11.IDLE:
            head = self.trailing_data[0]
            if head.count(b"\n") > MAX_HEAD_LINES and _LONG_HEAD.match(head):
                raise RefusedRequest(431, f"a request has at most {MAX_HEAD_LINES} lines before its body")
        elif self._is_between_chunks and self.their_state is h11.SEND_BODY:
            ahead = self.trailing_data[0]
            last = None if self._has_last_chunk else _LAST_CHUNK.match(ahead)
            self._has_last_chunk |= last is not None
            if self._has_last_chunk and _LONG_TRAILERS.match(ahead, 0 if last is None else last.end()):
                raise RefusedRequest(431, f"a request has at most {MAX_TRAILER_LINES} lines behind its body")

    def _check(self, event: h11.Event) -> None:
        if isinstance(event, h11.Request):
            self._begin(event)
        elif isinstance(event, h11.Data) and self._is_chunked:
            self._is_between_chunks = event.chunk_end
            self._num_chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._num_chunks > SMALL_CHUNKS + self._body_bytes // CHUNK_BYTES:
                raise RefusedRequest(
                    413, f"beyond {SMALL_CHUNKS}, the chunks of a body have at least {CHUNK_BYTES} bytes on average"
                )

    def _begin(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        length = headers.get(b"content-length")
        self._is_chunked = self._is_between_chunks = b"transfer-encoding" in headers
        self._has_last_chunk = False
        self._num_chunks = self._body_bytes = 0
        if self._is_chunked and (length is not None or request.http_version != b"1.1"):
            # A proxy in front may have believed the other length: then what is a body there is a request here.
            raise RefusedRequest(400, "transfer-encoding is beside content-length, or not of HTTP/1.1")
        if self._is_chunked or int(length or 0):
            if not self._takes_bodies:
                raise RefusedRequest(413, "no request has a body here")
            if request.method in BODILESS:
                raise RefusedRequest(400, f"a request with {request.method.decode()} has no body here")


class RefusedRequest(h11.RemoteProtocolError):
    """A request that is answered with a status by the connection, which then ends."""

    def __init__(self, status: int = 400, message: str = "Invalid HTTP request received.") -> None:
        """Takes the status of the answer and its text, which quotes nothing of the request."""
        super().__init__(message, error_status_hint=status)
