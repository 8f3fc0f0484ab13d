"""Middleware around all routes: converts exceptions into responses, and refuses requests while the service is not
ready. It also refuses names that are not the gateway's and pages of other origins, where the names are known.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwire.errors import UnavailableError
from draftwire.runtime.addresses import is_named_here
from draftwire.runtime.interceptor import ServiceGate
from draftwire_gateway.config import ANY_ORIGIN
from draftwire_gateway.http.body_reading import header
from draftwire_gateway.http.error_bodies import body_of, headers_of, is_expected, status_of
from draftwire_gateway.http.openai_types import event
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.route_names import route_of

log = structlog.get_logger()

MOST_IN_A_TURN = 16
"""Requests that are begun in one turn of the event loop; more wait for a later one, behind all other work."""
FINAL_ERROR_SECONDS = 1.0
"""How long a stream that is cut waits for the client to read the error."""


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """ASGI middleware around the routes."""

    app: ASGIApp
    gate: ServiceGate
    hosts: Collection[str] | None = None
    """Names under which requests are answered, beside localhost and IP addresses. Those under other names, and from
    pages of other origins than `origins`, are refused (DNS rebinding, CSRF); None refuses neither."""
    origins: Collection[str] = ()
    """May have `ANY_ORIGIN`."""
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_IN_A_TURN))
    """Held by requests in the turn in which they begin, so that a flood of them holds up no stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._turns.acquire()
            asyncio.get_running_loop().call_soon(self._turns.release)
            if self.hosts is not None:
                refuse_other_origins(scope, self.hosts, self.origins)
            if self.gate.refusal and scope["path"].startswith(("/v1/", "/tokenize", "/detokenize")):
                raise UnavailableError(f"service is {self.gate.refusal}")
            await self.app(scope, receive, answer.send)
        except asyncio.CancelledError:  # the drain has ended
            with suppress(TimeoutError):
                async with asyncio.timeout(FINAL_ERROR_SECONDS):
                    await answer.fail(UnavailableError("the gateway stops"))
            raise
        except Exception as error:
            if not is_expected(error):
                log.exception("gateway.http_request_failed", path=route_of(str(scope["path"])))
            await answer.fail(error)


class _Answer:
    """Tracks how much of a response was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._has_ended = False
        self._is_stream = False

    async def send(self, message: Message) -> None:
        # State changes only after sending, which waits for the client and may be cancelled before anything was sent.
        await self._send(message)
        if message["type"] == "http.response.start":
            self._has_begun = True
            content_type = dict(message.get("headers", [])).get(b"content-type", b"")
            self._is_stream = content_type.startswith(b"text/event-stream")
        self._has_ended |= message["type"] == "http.response.body" and not message.get("more_body", False)

    async def fail(self, error: BaseException) -> None:
        """Sends an error as the response, or as the last event of a stream. Other begun responses stay incomplete."""
        if self._has_ended or (self._has_begun and not self._is_stream):
            return
        content = body_of(error)
        if self._has_begun:
            content = event(content.decode())
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            headers += headers_of(error)
            await self.send({"type": "http.response.start", "status": status_of(error), "headers": headers})
        await self.send({"type": "http.response.body", "body": content})


def refuse_other_origins(scope: Scope, hosts: Collection[str], origins: Collection[str] = ()) -> None:
    """Refuses requests from browser pages of other origins, including those by DNS rebinding.

    Raises:
        RefusedError: the host header is none of these names, localhost or an IP address, or the origin header names
            another host.
    """
    host = header(scope, "host")
    if host is None:  # not a browser: these always send it
        return
    if not is_named_here(host, hosts):
        message = "host: this gateway answers under localhost, IP addresses and its http_allowed_hosts alone"
        raise RefusedError(403, message, code="host_not_allowed")
    origin = header(scope, "origin")
    is_allowed = origin in origins or ANY_ORIGIN in origins
    if origin is not None and not is_allowed and origin.partition("://")[2].lower() != host.lower():
        raise RefusedError(403, "origin: pages of other origins are not answered", code="origin_not_allowed")
