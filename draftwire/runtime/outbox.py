"""Bidirectional streams: concurrent reading and writing, and the queue of messages to be written."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from draftwire.errors import UnavailableError

Item = TypeVar("Item")

ITEMS_IN_A_TURN = 256
"""Commands of a message that are carried out in one turn of the event loop: peers may send any number."""


async def in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yields items, and lets others have their turn on the event loop after each `ITEMS_IN_A_TURN`."""
    for index, item in enumerate(items):
        if index and index % ITEMS_IN_A_TURN == 0:
            await asyncio.sleep(0)
        yield item


async def exchange(
    reading: Awaitable[None], writing: Awaitable[None], end_writing: Callable[[], None] | None = None
) -> None:
    """Runs the reader and the writer of a stream concurrently until either ends, then cancels the other.

    With `end_writing`, the writer is not cancelled when the reader has ended: it is made to end after what it has left
    to write, and waited for. A write that is cancelled leaves a call without a status.

    Raises:
        Exception: raised by the side that ended first; if that is the reader and it raised nothing, by the writer that
            was waited for.
    """
    reader, writer = asyncio.ensure_future(reading), asyncio.ensure_future(writing)
    tasks = (reader, writer)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if end_writing is not None and writer not in done:  # so the reader has ended
            end_writing()
            done, _ = await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


class Outbox(Generic[Item]):
    """A bounded queue whose producer never waits and whose consumer receives all queued items at once.

    All items of one step of a service are put before the writer task runs, so they leave in one message.
    """

    def __init__(self, bound: int = 65_536) -> None:
        """Makes an empty outbox. A stream whose peer reads too slowly to stay below `bound` items is broken."""
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._bound = bound
        self._closed = False

    def put(self, item: Item) -> None:
        """Adds an item; drops it silently if the outbox is closed, because nothing reads it any more.

        Raises:
            UnavailableError: the outbox is full.
        """
        if self._closed:
            return
        if len(self._items) >= self._bound:
            raise UnavailableError("a peer reads its stream too slowly")
        self._items.append(item)
        self._filled.set()

    async def take_all(self) -> list[Item]:
        """Waits for items and returns all of them in order; an empty list means that the outbox is closed."""
        await self._filled.wait()
        items, self._items = self._items, []
        if not self._closed:
            self._filled.clear()
        return items

    def close(self) -> None:
        """Closes the outbox; the consumer still receives the queued items."""
        self._closed = True
        self._filled.set()
