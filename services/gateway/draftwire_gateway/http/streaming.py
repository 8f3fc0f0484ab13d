"""ASGI application of the generating routes: authentication, admission, and sending of the response."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic

from starlette.types import Message, Receive, Scope, Send

from draftwire.errors import InvalidRequestError
from draftwire_gateway.auth.access import Access, Caller, payer
from draftwire_gateway.body_budget import BodyBudget, BodyShare
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import Body
from draftwire_gateway.http.body_reading import BodyReader, header
from draftwire_gateway.http.choice_deltas import ChoiceDelta, DeltaMaker
from draftwire_gateway.http.model_list import ListDrafters
from draftwire_gateway.http.responses_writer import Writer
from draftwire_gateway.http.routes import Route, check_model, in_names
from draftwire_gateway.request_queue import QueuePlace
from draftwire_gateway.requested_generation import check_num_choices
from draftwire_gateway.session.committed_text import Delta
from draftwire_gateway.session.generation import Generation

PART_BYTES = 2**16
"""Size of the parts of a response that is not streamed: other requests run between two parts."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
]


@dataclass(frozen=True, slots=True)
class GeneratingRoute(Generic[Body]):
    """An ASGI application for one route. `Guard` around it converts its exceptions into responses.

    Plain ASGI, without a framework: an event is sent with one call, and a disconnect is noticed at once.
    """

    route: Route[Body]
    core: GatewayCore
    drafters: ListDrafters
    access: Access
    bodies: BodyReader
    waiting: BodyBudget
    """Budget of the bodies that wait for a place, as they came."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Nothing of its body is read for a caller who is unknown or has no room."""
        caller = self.access.authenticate(header(scope, "authorization"))
        counting = self.core.metrics.counting_refusals
        with counting("caller", caller.name):
            caller.refuse_if_over()
        with counting("gateway", caller.name):
            self.core.queue.refuse_if_full()
        with self.bodies.budget.share(caller.name) as share:
            with counting("gateway", caller.name):
                data = await self.bodies.receive(scope, receive, share)
                body = await self.bodies.parse(self.route.body, data)
            check_model(body.model, self.core.model_names, self.drafters())
            names = self.route.names(body)
            work = self._answer(data, body, share, caller, scope, send)
            del data, body  # which are large, and of no use once they are a request
            with in_names(names):
                await _while_connected(receive, work)

    async def _answer(
        self, data: bytearray, body: Body, share: BodyShare, caller: Caller, scope: Scope, send: Send
    ) -> None:
        num_prompts = self.route.num_prompts(body)
        num_choices = num_prompts * check_num_choices(num_prompts, body.n)
        options, streams = self.route.options(body, self.core), body.stream
        counting = self.core.metrics.counting_refusals
        async with AsyncExitStack() as running:
            with counting("caller", caller.name, num_choices):
                running.enter_context(caller.request(num_choices))
            with counting("gateway", caller.name, num_choices):
                admission = self.core.queue.place(num_choices, caller.name)
                if self.core.queue.has_place(num_choices):
                    place = await running.enter_async_context(admission)
                else:
                    del body  # which takes many times as much as its text
                    with self.waiting.share(caller.name) as waiting:
                        waiting.take(len(data))
                        share.give_back()
                        place = await running.enter_async_context(admission)
                    body = await self.bodies.parse(self.route.body, data)
                del data
                writer = self.route.writer(body, options)
                requested = await self.route.requested(body, options, self.core, caller.name)
                del body
                generations = await self.core.complete(requested)
                if not generations:
                    raise InvalidRequestError("generated_choices: all are finished, so nothing is left to send")
                host, _ = scope.get("client") or ("", 0)
                generations = await self.core.check_form(generations, payer(caller, host))
                del requested
            share.give_back()
            maker = DeltaMaker(options, self.core)
            traceparent = header(scope, "traceparent") or ""
            async with aclosing(self._deltas(generations, place, maker, caller, traceparent)) as deltas:
                if streams:
                    await _stream(deltas, maker, writer, send)
                    return
                whole = {generation.choice: ChoiceDelta(generation.choice) for generation in generations}
                async for delta in deltas:
                    whole[delta.choice].add(delta)
            await send_whole(send, writer.answer(list(whole.values()), maker.endings))

    async def _deltas(
        self, generations: Sequence[Generation], place: QueuePlace, maker: DeltaMaker, caller: Caller, traceparent: str
    ) -> AsyncGenerator[ChoiceDelta]:
        """Yields the deltas of all choices, and charges the caller for their tokens."""
        async with aclosing(self.core.generate(generations, place, traceparent)) as events:
            async for event in events:
                if isinstance(event.event, Delta):
                    caller.charge(len(event.event.token_ids))
                for delta in await maker.deltas(event):
                    yield delta


async def _stream(deltas: AsyncIterator[ChoiceDelta], maker: DeltaMaker, writer: Writer, send: Send) -> None:
    """Sends each delta at once. The status is sent with the first one: until then, an error sets the status."""
    start = writer.begin()
    has_begun = False
    async for delta in deltas:
        if not has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            has_begun = True
        await send(_part(start + writer.chunk(delta)))
        start = b""
    await send(_part(writer.end(maker.endings), is_last=True))


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
