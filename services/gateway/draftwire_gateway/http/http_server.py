"""The HTTP server: uvicorn, in the event loop of the gateway."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from draftwire.errors import UnavailableError
from draftwire.runtime.settings import ConnectionSettings
from draftwire_gateway.http.http_connection import HttpConnection
from draftwire_gateway.http.request_guard import Gate

IDLE_SECONDS = 30
"""How long a connection without requests is kept open."""
STOP_SECONDS = 1
"""How long requests that still run after the drain may take to end."""


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves HTTP beside gRPC: a `Listener` of the service."""

    name = "http"

    def __init__(
        self,
        make_app: Callable[[Gate], ASGIApp],
        host: str,
        port: int,
        connections: ConnectionSettings,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Does not listen yet.

        Args:
            make_app: returns the ASGI application for a gate, which reports whether the service is ready.
            host: address to listen on.
            port: 0 takes a free one.
            connections: keepalive settings.
            tls: context of the TLS handshakes; None is plaintext.
        """
        self._make_app = make_app
        self._host, self._port = host, port
        self._connections = connections
        self._tls = tls
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, gate: Gate) -> int:
        """Listens, and returns the port.

        Raises:
            UnavailableError: the port is not available.
        """
        listening = self._bind()
        tls = self._tls
        config = uvicorn.Config(
            self._make_app(gate),
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs failures; the rest is about faulty clients
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)
        self._running = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started and not self._running.done():
            await asyncio.sleep(0.01)
        if self._running.done():
            self._running.result()
        return int(listening.getsockname()[1])

    async def run(self) -> None:
        """Waits until the server has ended.

        Raises:
            Exception: the failure that ended the server.
        """
        assert self._running is not None, "it was started"
        await asyncio.wait({self._running})
        self._running.result()

    async def stop(self) -> None:
        """Accepts no more connections, and closes those that do not end within `STOP_SECONDS`."""
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait({self._running})  # a failure is raised by `run`

    def _bind(self) -> socket.socket:
        host = self._host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, self._port), family=family, dualstack_ipv6=host == "::")
        except OSError as error:
            where = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
            message = f"cannot listen on {where} for HTTP (http_port): {error.strerror or error}"
            raise UnavailableError(message) from error
        _enable_keepalive(listening, self._connections)
        return listening


def _enable_keepalive(listening: socket.socket, connections: ConnectionSettings) -> None:
    """Enables TCP keepalive, which detects dead connections. Accepted sockets inherit the options."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence, patience = max(1, round(connections.keepalive_time_s)), max(1, round(connections.keepalive_timeout_s))
    probes = 2
    options = {"TCP_KEEPIDLE": silence, "TCP_KEEPINTVL": max(1, patience // probes), "TCP_KEEPCNT": probes}
    for name, value in options.items():
        if hasattr(socket, name):  # not on every operating system
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
