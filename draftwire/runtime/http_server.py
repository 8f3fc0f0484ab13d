"""HTTP servers beside gRPC: uvicorn, in the event loop of the service."""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from draftwire.errors import UnavailableError
from draftwire.runtime.addresses import host_and_port
from draftwire.runtime.http_connection import Connections, HttpConnection, TlsHandshake
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.settings import ConnectionSettings

IDLE_SECONDS = 30
"""How long a connection without requests is kept open."""
STOP_SECONDS = 1
"""How long requests that still run after the drain may take to end."""
ACCEPTED_IN_A_TURN = 16
"""Connections that are accepted in one turn of the event loop. Where no file can be opened, each of these fails, and
the next ones a second later."""
WAITING_CONNECTIONS = 2048
"""Connections that wait in the kernel to be accepted."""
MAX_HTTP_CONNECTIONS = 1024
"""Default of the connections of one server at once; see `Connections`."""


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """Address on which a server listens."""

    host: str
    port: int
    """0 takes a free one."""
    tls: ssl.SSLContext | None = None
    """Context of the TLS handshakes; None is plaintext."""
    name: str = "http"
    """The option `<name>_port` sets the port, and the log names it so."""
    max_connections: int = MAX_HTTP_CONNECTIONS
    """Most open connections; never more than half of the files that the process may open."""
    takes_bodies: bool = True
    """Whether any request may have a body."""


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    server_state: Connections

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.server_state = connections

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves HTTP beside gRPC, in the same event loop. `start` comes first; `stop` may be called without it.

    Attributes:
        name: prefix of its port in the log: `<name>_port`.
    """

    def __init__(
        self, make_app: Callable[[ServiceGate], ASGIApp], endpoint: HttpEndpoint, connections: ConnectionSettings
    ) -> None:
        """Does not listen yet. `make_app` gets a gate, which reports whether the service is ready."""
        self.name = endpoint.name
        self._make_app = make_app
        self._endpoint = endpoint
        self._connections = connections
        self._server: _Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, gate: ServiceGate) -> int:
        """Listens, and returns the port. Requests are refused while `gate.refusal` is set.

        Raises:
            UnavailableError: the port is not available.
        """
        listening = self._bind()
        tls, most = self._endpoint.tls, min(self._endpoint.max_connections, _max_open_files() // 2)
        config = uvicorn.Config(
            self._make_app(gate),
            http=HttpConnection if tls is None else TlsHandshake,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs failures; the rest is about faulty clients
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_IN_A_TURN,  # asyncio accepts as many at once as may wait
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        self._server = _Server(config, Connections(most, tls, takes_bodies=self._endpoint.takes_bodies))
        self._running = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started and not self._running.done():
            await asyncio.sleep(0.01)
        if self._running.done():
            self._running.result()
        listening.listen(WAITING_CONNECTIONS)
        return int(listening.getsockname()[1])

    async def run(self) -> None:
        """Serves until it is stopped.

        Raises:
            Exception: the failure that ended the server.
        """
        assert self._running is not None, "it was started"
        await asyncio.wait({self._running})
        self._running.result()

    async def drain(self) -> None:
        """Answers on; connections end as soon as they have no request, so that callers go elsewhere. Returns soon."""
        if self._server is not None:
            await self._server.server_state.drain()

    async def stop(self) -> None:
        """Accepts no more connections, and closes those that do not end within `STOP_SECONDS`."""
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait({self._running})  # a failure is raised by `run`

    def _bind(self) -> socket.socket:
        host, port = self._endpoint.host.removeprefix("[").removesuffix("]"), self._endpoint.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
        except OSError as error:
            message = (
                f"cannot listen on {host_and_port(host, port)} for HTTP ({self.name}_port): {error.strerror or error}"
            )
            raise UnavailableError(message) from error
        _enable_keepalive(listening, self._connections)
        return listening


def _max_open_files() -> int:
    """Returns how many files and sockets this process may open: those of HTTP must leave some to the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2 * MAX_HTTP_CONNECTIONS


def _enable_keepalive(listening: socket.socket, connections: ConnectionSettings) -> None:
    """Enables TCP keepalive, which detects dead connections. Accepted sockets inherit the options."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence, patience = max(1, round(connections.keepalive_time_s)), max(1, round(connections.keepalive_timeout_s))
    probes = 2
    options = {"TCP_KEEPIDLE": silence, "TCP_KEEPINTVL": max(1, patience // probes), "TCP_KEEPCNT": probes}
    for name, value in options.items():
        if hasattr(socket, name):  # not on every operating system
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
