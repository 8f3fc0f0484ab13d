"""ASGI application of the generating routes: authentication, admission, and sending of the response."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Generic

from starlette.types import Message, Receive, Scope, Send

from draftwire_gateway.auth.access import Access, Caller, payer
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import Body, GenerateBody, read
from draftwire_gateway.http.body_reading import header, read_body
from draftwire_gateway.http.choice_deltas import ChoiceDelta, DeltaMaker
from draftwire_gateway.http.model_list import ListDrafters
from draftwire_gateway.http.openai_types import END, ResponseWriter
from draftwire_gateway.http.routes import Route, in_names_of, model_fault
from draftwire_gateway.session.committed_text import Delta
from draftwire_gateway.session.generation import Generation, check_num_choices

PART_BYTES = 2**16
"""Size of the parts of a response that is not streamed: other requests run between two parts."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
]


class GeneratingRoute(Generic[Body]):
    """An ASGI application for one route. `Guard` around it converts its exceptions into responses.

    Plain ASGI, without a framework: an event is sent with one call, and a disconnect is noticed at once.
    """

    def __init__(
        self, route: Route[Body], core: GatewayCore, drafters: ListDrafters, access: Access, most_bytes: int
    ) -> None:
        """Stores its collaborators.

        Args:
            route: conversion of bodies and responses.
            core: runs requests.
            drafters: returns the connected drafters.
            access: authenticates callers.
            most_bytes: largest body.
        """
        self._route = route
        self._core = core
        self._drafters = drafters
        self._access = access
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        caller = self._access.authenticate(header(scope, "authorization"))
        body = await read(self._route.body, await read_body(scope, receive, self._most_bytes))
        target = self._core.description.name
        fault = model_fault(body.model, target, [drafter.description.name for drafter in self._drafters()])
        if fault is not None:
            raise fault
        host, _ = scope.get("client") or ("", 0)
        work = self._answer(body, caller, payer(caller, host), header(scope, "traceparent") or "", send)
        await _while_connected(receive, in_names_of(self._route, body, work))

    async def _answer(self, body: Body, caller: Caller, form_payer: str, traceparent: str, send: Send) -> None:
        num_prompts = self._route.num_prompts(body)
        num_choices = num_prompts * check_num_choices(num_prompts, body.n)
        with caller.request(num_choices), self._core.admit(num_choices):
            generations = await self._core.complete(await self._route.requested(body, self._core))
            generations = await self._core.check_form(generations, form_payer)
            options = self._route.options(body)
            maker = DeltaMaker(options, self._core)
            writer = ResponseWriter(self._route.formatter, options, self._core.description.name)
            async with aclosing(self._deltas(generations, maker, caller, traceparent)) as deltas:
                if body.stream:
                    await _stream(body, deltas, maker, writer, send)
                    return
                whole = {generation.choice: ChoiceDelta(generation.choice) for generation in generations}
                async for delta in deltas:
                    whole[delta.choice].add(delta)
            await send_whole(send, writer.answer(list(whole.values()), maker.endings))

    async def _deltas(
        self, generations: Sequence[Generation], maker: DeltaMaker, caller: Caller, traceparent: str
    ) -> AsyncGenerator[ChoiceDelta]:
        """Yields the deltas of all choices, and charges the caller for their tokens."""
        async with aclosing(self._core.generate(generations, traceparent)) as events:
            async for event in events:
                if isinstance(event.event, Delta):
                    caller.charge(len(event.event.token_ids))
                for delta in await maker.deltas(event):
                    yield delta


async def _stream(
    body: GenerateBody, deltas: AsyncIterator[ChoiceDelta], maker: DeltaMaker, writer: ResponseWriter, send: Send
) -> None:
    """Sends each delta at once. The status is sent with the first one: until then, an error sets the status."""
    reports_usage = body.stream_options is not None and body.stream_options.include_usage
    has_begun = False
    async for delta in deltas:
        if not has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            has_begun = True
        await send(_part(writer.chunk(delta, reports_usage=reports_usage)))
    end = writer.cost(maker.endings) + END if reports_usage else END
    await send(_part(end, is_last=True))


async def send_whole(send: Send, texts: Iterator[str]) -> None:
    """Sends a response as fast as the client reads it. A long one is built in parts, and so has no content-length."""
    parts = _parts(texts)
    part, following = next(parts), next(parts, None)
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    if following is None:
        headers.append((b"content-length", str(len(part)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if following is None:
        await send(_part(part, is_last=True))
        return
    for content in chain((part, following), parts):
        await send(_part(content))
        await asyncio.sleep(0)  # lets other requests run: `send` yields only if the client is slow
    await send(_part(b"", is_last=True))  # waits until the parts are read, so that a drain cuts nothing off


def _parts(texts: Iterator[str]) -> Iterator[bytes]:
    """Joins texts to parts of at least `PART_BYTES`; the last one may be shorter."""
    collected = bytearray()
    for text in texts:
        collected += text.encode()
        if len(collected) >= PART_BYTES:
            yield bytes(collected)
            collected.clear()
    if collected:
        yield bytes(collected)


def _part(content: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": not is_last}


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work until it is done; cancels it if the client disconnects."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, gone})
    with suppress(asyncio.CancelledError):
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
