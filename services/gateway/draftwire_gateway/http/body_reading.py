"""Reads headers and bodies of requests, with limits on size and time and on what all bodies take together."""

import asyncio

import structlog
from starlette.types import Receive, Scope

from draftwire_gateway.body_budget import BodyBudget, BodyShare
from draftwire_gateway.http.body import AnyBody, LeftOut, read
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.text.tokenizer_pool import MAX_PROMPT_CHARACTERS

MAX_BODY_BYTES = 2 * MAX_PROMPT_CHARACTERS
"""Largest body, even if gRPC accepts larger messages: parsed JSON takes many times as much memory."""
BODY_SECONDS = 60.0
"""Timeout for receiving a body."""
PIECE_BYTES = 2**16
"""Bytes that are reserved of the budget before each read of a body that does not declare its length."""
MAX_BODY_ON_LOOP = 64 * 2**10
"""Bytes. Larger bodies are parsed on a thread."""
MAX_PARSERS = 2
"""Bodies that are parsed at once on threads: each takes up to 29 times its length meanwhile."""
MAX_IGNORED_NAMES = 256
"""Names of ignored parameters that are logged."""

_MAX_DIGITS = 20

log = structlog.get_logger()


def header(scope: Scope, name: str) -> str | None:
    """Returns the value of a header; None if it is missing or repeated."""
    values = [value for key, value in scope["headers"] if key == name.encode()]
    return values[0].decode("latin-1") if len(values) == 1 else None


class BodyReader:
    """Reads and parses the bodies of all requests of a gateway. Runs on the event loop."""

    def __init__(self, most_bytes: int, budget: BodyBudget | None = None, *, ignores_unknown: bool = False) -> None:
        """Refuses unknown parameters or, with `ignores_unknown`, logs each of them once."""
        self._ignores_unknown = ignores_unknown
        self._ignored: set[str] = set()
        self.budget = BodyBudget() if budget is None else budget
        self._most_bytes = min(most_bytes, MAX_BODY_BYTES)
        self._parsers = asyncio.Semaphore(MAX_PARSERS)

    async def read(self, kind: type[AnyBody], scope: Scope, receive: Receive, share: BodyShare) -> AnyBody:
        """Returns the validated body of a request: what `receive` returns, parsed."""
        return await self.parse(kind, await self.receive(scope, receive, share))

    async def parse(self, kind: type[AnyBody], data: bytearray) -> AnyBody:
        """Returns the validated body of a request.

        Raises:
            RefusedError: the body is invalid for the route.
        """
        left_out = LeftOut(self._ignores_unknown)
        if len(data) <= MAX_BODY_ON_LOOP:
            body = read(kind, data, left_out)
        else:
            async with self._parsers:
                body = await asyncio.to_thread(read, kind, data, left_out)
        if left_out.names:
            self._log_ignored(left_out.names)
        return body

    def _log_ignored(self, names: set[str]) -> None:
        if len(self._ignored) >= MAX_IGNORED_NAMES:
            return
        new = sorted(names - self._ignored)[: MAX_IGNORED_NAMES - len(self._ignored)]
        self._ignored.update(new)
        for name in new:
            log.warning("gateway.parameter_ignored", name=name)

    async def receive(self, scope: Scope, receive: Receive, share: BodyShare) -> bytearray:
        """Returns the body of a request as it came. What it takes is taken for the share, before it is read.

        Raises:
            RefusedError: the content type is not JSON, or the body is too large or too slow.
            NoRoomError: all bodies together take too much.
        """
        declared = self._declared(scope)
        if declared is not None:
            share.take(declared)
        try:
            async with asyncio.timeout(BODY_SECONDS) as deadline:
                with share.arriving(lambda: deadline.reschedule(asyncio.get_running_loop().time())):
                    return await self._collected(receive, share, is_declared=declared is not None)
        except TimeoutError:
            share.take(0)  # raises if it was given up for others
            raise RefusedError(408, f"the body took more than {BODY_SECONDS:g} s") from None

    async def _collected(self, receive: Receive, share: BodyShare, *, is_declared: bool) -> bytearray:
        data, has_more = bytearray(), True
        while has_more:
            if not is_declared:
                share.take(min(len(data) + PIECE_BYTES, self._most_bytes))
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the body ends too soon")  # not seen by the client, which is gone
            data += message.get("body", b"")
            share.take(len(data))
            if len(data) > self._most_bytes:
                raise self._too_large()
            has_more = message.get("more_body", False)
        share.keep(len(data))
        return data

    def _declared(self, scope: Scope) -> int | None:
        """Returns the length that a body declares; None if it declares none. Refuses one that is not JSON, or too
        large.
        """
        # Pages of other origins can send other content types without a CORS preflight.
        if (header(scope, "content-type") or "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the header content-type has to be application/json")
        length = header(scope, "content-length") or ""
        if not length.isdecimal():
            return None
        if len(length) > _MAX_DIGITS or int(length) > self._most_bytes:
            raise self._too_large()
        return int(length)

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body takes at most {self._most_bytes} bytes", code="body_too_large")
