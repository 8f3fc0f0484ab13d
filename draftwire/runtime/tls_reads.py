"""Limits of one connection with TLS: bounds on the CPU time of a read, and on what a peer makes of it.

OpenSSL takes a microsecond for a record, which may hold one byte, 20 for a message that changes keys, and has no limit
of their number: 6 ms for a read of 8 KiB, and an answer of as many bytes.
"""

import asyncio
import time
from collections.abc import Callable

from typing_extensions import Buffer, override

READ_S = 0.0005
"""CPU time of a read, seconds: one that takes longer is followed by smaller ones."""
TURN_S = 0.05
"""CPU time of the reads of all connections together in a turn of the event loop, seconds, where each is read once."""
LEAST_READ_BYTES = 64
MORE_BYTES = 256
"""How much larger the next read may be: so few large ones are reached that they are cheap on average."""
MAX_HANDSHAKE_BYTES = 2**16
"""Bytes of a handshake, and of what is read before it is known to be done. It has some 2 KB, and a chain of
certificates where clients need one; in records of one byte each, OpenSSL takes 1.5 ms for as much as may be sent."""
MAX_UNANSWERED_BYTES = 2**18
"""Read while the peer reads nothing of what it is sent: answers of TLS itself to that are kept."""


class BoundedReads(asyncio.BufferedProtocol):
    """Stands between a transport and asyncio's protocol of TLS, and decides how much is read at once.

    Takes the place of that protocol at the transport.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        tls: asyncio.BufferedProtocol,
        most_bytes: int,
        num_connections: Callable[[], int],
    ) -> None:
        """Takes the protocol's place. Reads have at most `most_bytes`; `num_connections` counts those of the server."""
        self.is_shaking_hands = True
        """Set to False when the handshake is done."""
        self._transport, self._tls = transport, tls
        self._most_bytes = self._read_bytes = most_bytes
        self._num_connections = num_connections
        self._handshake_bytes = 0
        self._unanswered_bytes: int | None = None
        """None while the peer reads what it is sent."""
        transport.set_protocol(self)

    @override
    def get_buffer(self, sizehint: int) -> Buffer:
        return memoryview(self._tls.get_buffer(sizehint))[: self._read_bytes]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        if self.is_shaking_hands:
            self._handshake_bytes += nbytes
        if self._unanswered_bytes is not None:
            self._unanswered_bytes += nbytes
        if self._handshake_bytes > MAX_HANDSHAKE_BYTES or (self._unanswered_bytes or 0) > MAX_UNANSWERED_BYTES:
            self._transport.abort()
            return
        started = time.thread_time()
        self._tls.buffer_updated(nbytes)
        if not self.is_shaking_hands:
            self._adapt(nbytes, time.thread_time() - started)

    @override
    def eof_received(self) -> bool | None:
        return self._tls.eof_received()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        self._unanswered_bytes = 0
        self._tls.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._unanswered_bytes = None
        self._tls.resume_writing()

    def _adapt(self, num_bytes: int, cpu_s: float) -> None:
        """Chooses the size of the next read by what the last one has cost."""
        most_s = min(READ_S, TURN_S / max(1, self._num_connections()))
        if cpu_s > most_s:
            self._read_bytes = max(LEAST_READ_BYTES, int(num_bytes * most_s / cpu_s))
        else:
            self._read_bytes = min(self._most_bytes, self._read_bytes + MORE_BYTES)
