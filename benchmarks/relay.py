"""A TCP relay on this machine that counts bytes and simulates network partitions.

with Relay(port_of_the_service) as relay:
    ...  # connect to relay.port instead
    relay.pause()  # forwards no bytes, closes no connection
    relay.connections[0].sent  # bytes from the client to the service
"""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType

CHUNK_BYTES = 2**18


@dataclass(slots=True)
class Connection:
    """One connection through the relay."""

    client: socket.socket
    server: socket.socket
    sent: int = 0
    """Bytes that passed from the client to the server."""
    received: int = 0
    """Bytes that passed from the server to the client."""
    is_open: bool = True
    """Whether neither side has closed it; not updated while it is paused."""
    flowing: threading.Event = field(default_factory=threading.Event)
    """Cleared while it is paused."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pause(self) -> None:
        """Stops forwarding bytes without closing: both ends only see silence."""
        self.flowing.clear()

    def resume(self) -> None:
        """Forwards queued and new bytes."""
        self.flowing.set()

    def close(self) -> None:
        """Closes both sides."""
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that blocks on it
            end.close()


_given_ports: set[int] = set()


def free_port() -> int:
    """Returns a free port of this machine, for a service whose relay must know the port beforehand.

    Each port is returned once, and none is in the ephemeral range of outgoing connections: a service that restarts must
    find its port free.
    """
    for port in random.sample(range(12_000, 32_000), 20_000):
        if port not in _given_ports:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                _given_ports.add(port)
                return port
    raise OSError("no port is free")


class Relay:
    """Forwards connections from its port to another port of this machine. A context manager.

    Attributes:
        port: where to connect.
        connections: all connections since the start, in order of arrival.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        """Listens on a free port; connections are forwarded from `__enter__` on.

        Args:
            target_port: port on this machine; no server needs to listen there before the first connection.
            delay_s: how long bytes are on the way, in each direction.
        """
        self._delay_s = delay_s
        self.connections: list[Connection] = []
        self._target_port = target_port
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @property
    def open_connections(self) -> list[Connection]:
        """Connections that are not closed."""
        return [connection for connection in self.connections if connection.is_open]

    def pause(self) -> None:
        """Pauses all connections; new ones get no answer either."""
        self._flowing.clear()
        for connection in self.connections:
            connection.pause()

    def resume(self) -> None:
        """Resumes all connections, and accepts those that arrived meanwhile."""
        for connection in self.connections:
            connection.resume()
        self._flowing.set()

    def cut(self) -> None:
        """Closes all connections, at both ends. New ones are accepted."""
        for connection in self.connections:
            connection.close()

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.resume()  # ends the threads

    def _accept(self) -> None:
        for client in self._clients():
            self._flowing.wait()
            if self._listener.fileno() < 0:
                client.close()
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:  # no listener: reset the client's connection, as the server's machine would
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(client, server)
            connection.resume()
            self.connections.append(connection)
            for is_sending in (True, False):
                threading.Thread(target=self._pass_on, args=(connection, is_sending), daemon=True).start()

    def _clients(self) -> Iterator[socket.socket]:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                yield self._listener.accept()[0]

    def _pass_on(self, connection: Connection, is_sending: bool) -> None:
        source, sink = connection.client, connection.server
        if not is_sending:
            source, sink = sink, source
        with contextlib.suppress(OSError):  # either side was closed
            for data in self._delayed(source) if self._delay_s else _received(source):
                connection.flowing.wait()
                sink.sendall(data)
                if is_sending:
                    connection.sent += len(data)
                else:
                    connection.received += len(data)
            connection.flowing.wait()
        connection.close()

    def _delayed(self, source: socket.socket) -> Iterator[bytes]:
        """Yields what a side sends, each part when its time on the way is over."""
        parts = SimpleQueue[tuple[float, bytes]]()

        def receive() -> None:
            with contextlib.suppress(OSError):
                for data in _received(source):
                    parts.put((time.monotonic() + self._delay_s, data))
            parts.put((0.0, b""))

        threading.Thread(target=receive, daemon=True).start()
        while (part := parts.get())[1]:
            time.sleep(max(0.0, part[0] - time.monotonic()))
            yield part[1]


def _received(source: socket.socket) -> Iterator[bytes]:
    while data := source.recv(CHUNK_BYTES):
        yield data
