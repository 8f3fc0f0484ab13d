"""Applications behind the HTTP edge's guard, and what it asks whether the service is ready."""

from collections.abc import Callable
from typing import Any

import httpx2

from draftwire_gateway.http.request_guard import Guard
from draftwire_gateway.http.streaming import STREAM_HEADERS

STREAM_START = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
EMPTY = ({"type": "http.response.start", "status": 204, "headers": []}, {"type": "http.response.body"})
"""An answer without a body."""


class Gate:
    refusal = unready = ""


def app_of(*messages: dict[str, Any], error: Exception | None = None) -> Callable[..., Any]:
    """Returns an application that sends messages, and then raises an error if there is one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    return app


class Sent(list[dict[str, Any]]):
    """Takes what an application sends."""

    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self)


def client_of(app: Callable[..., Any], base_url: str = "http://gateway") -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=base_url)


def guarded(app: Callable[..., Any], gate: Gate | None = None, **options: Any) -> httpx2.AsyncClient:
    return client_of(Guard(app, gate or Gate(), **options))
