"""Middleware around all others: gives each request its id, which the response echoes, counts it, and logs its end."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwire.runtime.served_request import REQUEST_ID, serving
from draftwire_gateway.access_log import log_request
from draftwire_gateway.http.body_reading import header
from draftwire_gateway.metrics import GatewayMetrics

CLIENT_GONE = 499
"""Status of a request whose client left before the response began, as nginx calls it."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestObserver:
    """ASGI middleware. What uvicorn answers itself, because it is no HTTP, is not seen here."""

    app: ASGIApp
    """All routes, and what guards them."""
    route_of: Callable[[str], str]
    metrics: GatewayMetrics
    logs: bool = False
    """Whether each request is logged when it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
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
                await self.app(scope, receive, send_with_id)
            finally:
                route = self.route_of(scope["path"])
                self.metrics.http_requests.labels(route, str(status)).inc()
                if self.logs:
                    log_request(scope["method"], route, status, time.perf_counter() - started_at, request)
