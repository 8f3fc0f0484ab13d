"""Limits of what the callers of a server may take of it, and the counters that enforce them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from draftwire.errors import NoRoomError

Result = TypeVar("Result")

SPARE_CALLS = 1024
"""Calls that a server takes beside those that run a session each: questions, streams of peers, calls to be refused."""

MAX_STREAMS = 384
"""Streams of peers of one kind that may be open at once. Two kinds leave a quarter of `SPARE_CALLS` for other calls."""

ARRIVING_BYTES = 256 * 2**20
"""Bytes that requests that have not arrived as a whole may hold together, as long as there may be so few; see
`Arrivals`."""

LEAST_ARRIVING = 4
"""Requests of users that may arrive slowly at once, however large each may be."""

ARRIVAL_SECONDS = 60.0
"""How long a request may take to arrive as a whole."""

GRACE_SECONDS = 0.25
"""How much longer the oldest requests may take to arrive while too many arrive."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of the callers of a gRPC server."""

    max_request_bytes: int = 64 * 2**20
    """Largest message that is accepted."""
    max_calls: int = SPARE_CALLS
    """Calls that may run at once, over all connections; also the streams of one connection. Those beyond `SPARE_CALLS`
    run a session each."""
    is_public: bool = False
    """Whether users call, who are many and send little: a call may then send little ahead of what is read, and idle
    connections are closed."""

    @property
    def max_arriving(self) -> int:
        """Requests that may arrive slowly at once; twice as many are held at most.

        Peers open all sessions of a service at once, such as after a failure elsewhere, and their long prompts arrive
        over one connection, all slowly.
        """
        of_users = max(LEAST_ARRIVING, ARRIVING_BYTES // (2 * self.max_request_bytes))
        return of_users if self.is_public else max(of_users, self.max_calls - SPARE_CALLS)


class CallCounter:
    """Counts running calls. All methods run on the event loop."""

    def __init__(self, what: str, most: int) -> None:
        """Counts `what`, such as "calls", of which `most` may run at once."""
        self._what, self._most = what, most
        self.num_running = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts one more within the block.

        Raises:
            NoRoomError: as many as possible are running.
        """
        if self.num_running >= self._most:
            raise NoRoomError(f"{self.num_running} {self._what} are running, which is the limit; retry in a second")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


class Arrivals:
    """Requests that have not arrived as a whole, each of which holds what has come of it.

    They are given up after `ARRIVAL_SECONDS`. While more than `most` are arriving, the oldest of them have
    `GRACE_SECONDS` from then on, and while more than twice as many are, the oldest are given up at once: so whoever
    sends slowly, or never to the end, keeps nobody else out. All methods run on the event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unhurried: dict[asyncio.Timeout, float] = {}
        """Deadlines of the requests that have all the time, the oldest first, and when their time is over."""
        self._hurried: dict[asyncio.Timeout, None] = {}
        """Deadlines of those that have the shorter time, the oldest first."""

    async def receive(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """Returns what `read` returns.

        Raises:
            NoRoomError: it took too long.
        """
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS) as deadline:
                self._unhurried[deadline] = now + ARRIVAL_SECONDS
                try:
                    self._hurry(now)
                    return await read()
                finally:
                    self._unhurried.pop(deadline, None)
                    self._hurried.pop(deadline, None)
        except TimeoutError:
            raise NoRoomError("the request took too long to arrive") from None

    def _hurry(self, now: float) -> None:
        """Gives the oldest request the shorter time if there are too many, and another one none at all."""
        if len(self._unhurried) > self._most:
            oldest = next(iter(self._unhurried))
            self._hurried[oldest] = None
            _reschedule(oldest, min(self._unhurried.pop(oldest), now + GRACE_SECONDS))
        if len(self._hurried) > self._most:
            oldest = next(iter(self._hurried))
            del self._hurried[oldest]
            _reschedule(oldest, now)


class StreamUse(Enum):
    """Uses of a peer's stream."""

    NONE = "none"
    """Nothing, ever."""
    PAST = "past"
    """Nothing now."""
    PRESENT = "present"
    """It has to stay open."""


class PeerStreams:
    """Streams of peers of one kind, which stay open without sending anything.

    Where there are too many, the oldest of those that were never used is ended, or of those that are not used now: so
    whoever opens streams without end, and holds them, keeps nobody else out. Peers whose stream is ended open another
    one. All methods run on the event loop.
    """

    def __init__(self, what: str, most: int = MAX_STREAMS) -> None:
        """Counts `what`, such as "streams of drafters", of which `most` may be open at once."""
        self._what, self._most = what, most
        self._open: dict[asyncio.Timeout, Callable[[], StreamUse]] = {}
        """Ends of each stream, the oldest first, and the use of each."""

    @asynccontextmanager
    async def one(self, use: Callable[[], StreamUse]) -> AsyncIterator[None]:
        """Counts one more within the block. `use` returns what the stream is used for.

        Raises:
            NoRoomError: as many as possible are open, and all are used; or this one was not used, and another one was
                opened.
        """
        self._make_room()
        try:
            async with asyncio.timeout(None) as deadline:
                self._open[deadline] = use
                try:
                    yield
                finally:
                    self._open.pop(deadline, None)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise NoRoomError(f"{self._most} {self._what} are open, the limit, and this one was idle") from None

    def _make_room(self) -> None:
        """Ends a stream that is not used, if there is no room for another one."""
        if len(self._open) < self._most:
            return
        idle = self._oldest(StreamUse.NONE) or self._oldest(StreamUse.PAST)
        if idle is None:
            raise NoRoomError(f"{self._most} {self._what} are open, which is the limit; retry in a second")
        del self._open[idle]
        _reschedule(idle, asyncio.get_running_loop().time())

    def _oldest(self, wanted: StreamUse) -> asyncio.Timeout | None:
        return next((deadline for deadline, use in self._open.items() if use() is wanted), None)


def _reschedule(deadline: asyncio.Timeout, when: float) -> None:
    if not deadline.expired():
        deadline.reschedule(when)
