"""Reads headers and bodies of requests, with limits on size and time."""

import asyncio

from starlette.requests import Request
from starlette.types import Receive, Scope

from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.text.tokenizer_pool import MAX_PROMPT_CHARACTERS

MAX_BODY_BYTES = 2 * MAX_PROMPT_CHARACTERS
"""Largest body, even if gRPC accepts larger messages: parsed JSON takes many times as much memory."""
BODY_SECONDS = 60.0
"""Timeout for receiving a body."""


def header(scope: Scope, name: str) -> str | None:
    """Returns the value of a header; None if it is missing or repeated."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0].decode("latin-1") if len(values) == 1 else None


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Returns the body of a request.

    Raises:
        RefusedError: the content type is not JSON, or the body is too large or too slow.
    """
    most_bytes = min(most_bytes, MAX_BODY_BYTES)
    headers = Request(scope).headers
    # Pages of other origins can send other content types without a CORS preflight.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the header content-type has to be application/json")
    too_large = RefusedError(413, f"the body takes at most {most_bytes} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_large
    chunks: list[bytes] = []
    num_bytes, has_more = 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "the body ends too soon")  # not seen by the client, which is gone
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                if num_bytes > most_bytes:
                    raise too_large
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise RefusedError(408, f"the body took more than {BODY_SECONDS:g} s") from None
    return b"".join(chunks)
