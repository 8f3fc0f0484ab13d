"""Middleware around all others: gives each request its id, which the response echoes, counts it, and logs its end."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwire.runtime.served_request import REQUEST_ID, serving
from draftwire_gateway.access_log import log_request
from draftwire_gateway.http.body_reading import header
from draftwire_gateway.metrics import GatewayMetrics

CLIENT_GONE = 499
"""Status of a request whose client left before the response began, as nginx calls it."""


class RequestObserver:
    """ASGI middleware. What uvicorn answers itself, because it is no HTTP, is not seen here."""

    def __init__(
        self, app: ASGIApp, route_of: Callable[[str], str], metrics: GatewayMetrics, *, logs: bool = False
    ) -> None:
        """Wraps all routes, and what guards them; with `logs`, each request is logged when it ends."""
        self._app = app
        self._route_of = route_of
        self._requests = metrics.http_requests
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at, status = time.perf_counter(), CLIENT_GONE
        with serving(header(scope, REQUEST_ID)) as request:
            echo = (REQUEST_ID.encode(), request.id.encode())

            async def send_with_id(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    message = {**message, "headers": [*message.get("headers", ()), echo]}
                await send(message)

            try:
                await self._app(scope, receive, send_with_id)
            finally:
                route = self._route_of(scope["path"])
                self._requests.labels(route, str(status)).inc()
                if self._logs:
                    log_request(scope["method"], route, status, time.perf_counter() - started_at, request)
