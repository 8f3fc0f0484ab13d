"""The two directions of a stream, and the messages that wait to be written to it."""

import asyncio
from collections.abc import Awaitable
from typing import Generic, TypeVar

from draftwire.errors import UnavailableError

Item = TypeVar("Item")


async def exchange(reading: Awaitable[None], writing: Awaitable[None]) -> None:
    """Reads and writes at the same time until either side ends, then stops the other.

    Raises:
        Exception: what the side that ended first raised.
    """
    tasks = [asyncio.ensure_future(reading), asyncio.ensure_future(writing)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


class Outbox(Generic[Item]):
    """A bounded queue that never makes its producer wait and hands all it holds to its consumer at once.

    Everything that one step of a service produces is put before the writer task runs, so it leaves in one message.
    """

    def __init__(self, bound: int = 65_536) -> None:
        """Makes an empty outbox.

        Args:
            bound: items that may wait. A stream whose peer reads so slowly that more pile up is broken.
        """
        self._items: list[Item] = []
        self._filled = asyncio.Event()
        self._bound = bound
        self._closed = False

    def put(self, item: Item) -> None:
        """Adds an item; dropped silently when the outbox is closed, because nobody will read it.

        Raises:
            UnavailableError: the bound is reached.
        """
        if self._closed:
            return
        if len(self._items) >= self._bound:
            raise UnavailableError("a peer reads its stream too slowly")
        self._items.append(item)
        self._filled.set()

    async def take_all(self) -> list[Item]:
        """Waits until there is something, and returns all of it in order; an empty list means closed."""
        await self._filled.wait()
        items, self._items = self._items, []
        if not self._closed:
            self._filled.clear()
        return items

    def close(self) -> None:
        """Lets the consumer take what is left, then nothing more."""
        self._closed = True
        self._filled.set()
