"""Threads for work on users' texts, which serve callers in turn."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from draftwire.runtime.daemon_threads import DaemonThreads

Result = TypeVar("Result")


class FairThreads:
    """A few threads that serve callers in turn, each in order of arrival. All methods run on the event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts no thread before there is work for it; `name` begins their names."""
        self._threads = DaemonThreads(num_threads, name)
        self._num_free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Does work on a thread when it is the caller's turn. A cancellation does not interrupt work that has begun:
        the next turn on that thread comes after it.
        """
        await self._turn(caller)
        loop = asyncio.get_running_loop()

        def pass_on(_: Future[Result]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._pass_on)

        job = self._threads.submit(work)
        job.add_done_callback(pass_on)
        return await asyncio.wrap_future(job)

    async def _turn(self, caller: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Gives a thread to the caller who has waited longest since the last turn."""
        while self._waiting:
            caller = next(iter(self._waiting))
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
