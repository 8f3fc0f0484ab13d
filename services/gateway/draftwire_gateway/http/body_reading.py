"""Reading of requests, within bounds."""

import asyncio

from starlette.requests import Request
from starlette.types import Receive, Scope

from draftwire_gateway.core import MAX_PROMPT_CHARACTERS
from draftwire_gateway.http.refusal import RefusedError

MAX_BODY_BYTES = 2 * MAX_PROMPT_CHARACTERS
"""Most that is read of a body, even where gRPC takes more: what is read of JSON takes many times as much memory."""
BODY_SECONDS = 60.0
"""How long a body may take to arrive."""


def header(scope: Scope, name: str) -> str | None:
    """Returns a header; None where there is none of that name, or more than one."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0].decode("latin-1") if len(values) == 1 else None


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Returns the body of a request.

    Raises:
        RefusedError: it is said to be something else than JSON, is too large, or takes too long.
    """
    most_bytes = min(most_bytes, MAX_BODY_BYTES)
    headers = Request(scope).headers
    # Pages of other origins can send other types without asking first.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the header content-type has to be application/json")
    too_large = RefusedError(413, f"the body takes at most {most_bytes} bytes", code="body_too_large")
    said = headers.get("content-length", "")
    if said.isdecimal() and int(said) > most_bytes:
        raise too_large
    chunks: list[bytes] = []
    num_bytes, has_more = 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "the body ends too soon")  # which nobody reads
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                if num_bytes > most_bytes:
                    raise too_large
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise RefusedError(408, f"the body took more than {BODY_SECONDS:g} s") from None
    return b"".join(chunks)
