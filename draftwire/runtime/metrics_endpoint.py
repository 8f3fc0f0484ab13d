"""`/metrics` of every service, over HTTP of its own, in the event loop, and `/livez` and `/readyz` for probes.

A probe costs one small answer here, and no process, connection with TLS or gRPC in the container.
"""

import asyncio

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwire.runtime.addresses import is_loopback, is_named_here
from draftwire.runtime.http_server import HttpEndpoint, HttpListener
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.settings import ConnectionSettings, ServerSettings

METRICS = "/metrics"
PLAIN = "text/plain; charset=utf-8"
"""Type of the answers to probes."""
MAX_SCRAPERS = 64
"""Connections to one `/metrics` at once. Beyond it, the one that has waited longest for its client is closed."""


class MetricsPage:
    """The metrics of a registry, as text; made on a thread, once for all who wait for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._rendering = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        """Makes the text that has not been begun yet."""

    async def text(self) -> bytes:
        """Returns all metrics as of now, as Prometheus's text: OpenMetrics does not allow the colons in the names."""
        if self._next is None:
            self._next = asyncio.create_task(self._render())
        return await asyncio.shield(self._next)

    async def _render(self) -> bytes:
        async with self._rendering:
            self._next = None  # who asks from now on gets what is made after this
            return await asyncio.to_thread(generate_latest, self._registry)


class MetricsApp:
    """The ASGI application of `/metrics`, `/livez` and `/readyz`."""

    def __init__(self, page: MetricsPage, state: ServiceGate, *, is_local: bool) -> None:
        """`is_local`: this machine alone is to read it, so not a page of a browser here."""
        self._page = page
        self._state = state
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        host = next((value for name, value in scope["headers"] if name == b"host"), None)
        if self._is_local and host is not None and not is_named_here(host.decode("latin-1")):
            status, content = 403, b"host: answered under localhost and IP addresses alone\n"
        elif scope["method"] not in ("GET", "HEAD"):
            status, content = 405, b"only GET and HEAD are answered\n"
        else:
            status, content = await self._answer(scope["path"])
        kind = CONTENT_TYPE_PLAIN_0_0_4 if scope["path"] == METRICS else PLAIN
        await Response(content, status, media_type=kind)(scope, receive, send)

    async def _answer(self, path: str) -> tuple[int, bytes]:
        state = self._state
        match path:
            case "/metrics":
                return 200, await self._page.text()
            case "/readyz":
                return (503, f"{state.unready}\n".encode()) if state.unready else (200, b"ready\n")
            case "/livez":
                return (200, b"live\n") if state.is_live else (503, f"{state.refusal}\n".encode())
        return 404, b"there are /metrics, /livez and /readyz\n"


def metrics_listener(
    registry: CollectorRegistry, settings: ServerSettings, connections: ConnectionSettings
) -> HttpListener | None:
    """Returns what serves `/metrics` and probes on `metrics_port`; None where that is not set."""
    if settings.metrics_port is None:
        return None
    page, is_local = MetricsPage(registry), is_loopback(settings.host)
    endpoint = HttpEndpoint(
        settings.host, settings.metrics_port, name="metrics", max_connections=MAX_SCRAPERS, takes_bodies=False
    )
    return HttpListener(lambda gate: MetricsApp(page, gate, is_local=is_local), endpoint, connections)
