"""Who runs and who waits: places of running requests, and a queue for those for which there is none.

Callers take turns, each in order of arrival. A verifier may have no room for a request that has a place: it then waits
on, first in its turn. From then until nobody waits, requests are let in one at a time: whether there is room for the
next shows when the one before has been taken or refused.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from draftwire.errors import NoRoomError

RETRY_SECONDS = 1.0
"""When a refused request is tried again, at the latest: other gateways may have left the verifier."""


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One request's place among those that run, or in the queue."""

    number: int
    """In order of arrival."""
    num_choices: int
    caller: str
    deadline: float
    """When it is refused if it still waits, in the loop's time."""
    is_held: bool = False
    """Whether it may run."""
    turn: asyncio.Future[None] | None = None
    """Set while it waits."""

    def __lt__(self, other: "QueuePlace") -> bool:
        return self.number < other.number


@dataclass(slots=True)
class _Queue:
    """Waiting places: callers in turn, each in order of arrival."""

    places: dict[str, list[QueuePlace]] = field(default_factory=dict)
    """By caller, the next one first."""

    def first(self) -> QueuePlace | None:
        """Returns whose turn it is."""
        return next((places[0] for places in self.places.values()), None)

    def add(self, place: QueuePlace, *, is_next: bool) -> None:
        """Adds a place; with `is_next` it is its caller's turn."""
        heapq.heappush(self.places.setdefault(place.caller, []), place)
        if is_next:
            self.places = {place.caller: self.places.pop(place.caller), **self.places}

    def remove(self, place: QueuePlace) -> None:
        """Removes a place, which need not be the first."""
        places = self.places[place.caller]
        places.remove(place)
        heapq.heapify(places)
        if not places:
            del self.places[place.caller]

    def pop(self) -> None:
        """Removes the first place; its caller comes last now."""
        caller = next(iter(self.places))
        places = self.places.pop(caller)
        heapq.heappop(places)
        if places:
            self.places[caller] = places


class RequestQueue:
    """Places and queue of a gateway. All methods run on the event loop."""

    def __init__(self, max_running: int, max_waiting: int, max_wait_s: float) -> None:
        """Starts without requests.

        Args:
            max_running: choices that may run at once.
            max_waiting: choices that may wait.
            max_wait_s: how long a request may wait, seconds.
        """
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._numbers = count()
        self._queue = _Queue()
        self._is_careful = False
        """Whether a verifier has refused a request, and places are given one by one until nobody waits."""
        self._probe: QueuePlace | None = None
        """The request that was let in last, while it is not known whether there is room for it."""
        self._is_full = False
        """Whether the last one was refused, and none has ended since."""
        self.num_running = 0
        """Choices with a place."""
        self.num_waiting = 0
        """Choices without one."""

    def refuse_if_full(self, num_choices: int = 1) -> None:
        """Refuses a request that would neither run nor wait.

        Raises:
            NoRoomError: as many run and wait as may.
        """
        if not self._has_place(num_choices) and self.num_waiting + num_choices > self._max_waiting:
            waiting = f" and {self.num_waiting} wait, of {self._max_waiting}" if self._max_waiting else ""
            raise NoRoomError(
                f"{self.num_running} requests are running, of {self._max_running} at most{waiting}; retry in a second"
            )

    @asynccontextmanager
    async def place(self, num_choices: int, caller: str) -> AsyncIterator[QueuePlace]:
        """Yields a place as soon as there is one, and takes it back.

        Args:
            num_choices: choices of the request, at most as many as may run at once.
            caller: name of the token's holder; callers take turns.

        Raises:
            NoRoomError: too many wait, or this one waited too long.
        """
        self.refuse_if_full(num_choices)
        deadline = asyncio.get_running_loop().time() + self._max_wait_s
        place = QueuePlace(next(self._numbers), num_choices, caller, deadline)
        try:
            if self._has_place(num_choices):
                self._give(place)
            else:
                await self._wait(place, is_next=False)
            yield place
        finally:
            self._release(place)
            self._is_full = False
            self._let_in()

    async def wait_for_room(self, place: QueuePlace, refusal: NoRoomError) -> None:
        """Waits after a verifier's refusal until another attempt may succeed. Others may run meanwhile.

        Raises:
            NoRoomError: the refusal, if requests may not wait or this one waited too long.
        """
        if not self._max_waiting:
            raise refusal
        self._release(place)
        self._is_careful = self._is_full = True
        asyncio.get_running_loop().call_later(max(RETRY_SECONDS, refusal.retry_after_s), self._retry)
        try:
            await self._wait(place, is_next=True)
        except NoRoomError:
            raise refusal from None

    def mark_open(self, place: QueuePlace) -> None:
        """Notes that a verifier has room for a request."""
        if self._probe is place:
            self._probe = None
            self._let_in()

    def _has_place(self, num_choices: int) -> bool:
        return not self._queue.places and self.num_running + num_choices <= self._max_running

    def _give(self, place: QueuePlace) -> None:
        place.is_held = True
        self.num_running += place.num_choices

    def _release(self, place: QueuePlace) -> None:
        if self._probe is place:
            self._probe = None
        if place.is_held:
            place.is_held = False
            self.num_running -= place.num_choices

    async def _wait(self, place: QueuePlace, *, is_next: bool) -> None:
        place.turn = asyncio.get_running_loop().create_future()
        self._queue.add(place, is_next=is_next)
        self.num_waiting += place.num_choices
        try:
            async with asyncio.timeout_at(place.deadline):
                await place.turn
        except TimeoutError:
            if not place.is_held:  # the turn may have come at the same moment
                raise NoRoomError(f"the request has waited {self._max_wait_s:g} s for others; retry later") from None
        finally:
            if not place.is_held:
                self._queue.remove(place)
                self.num_waiting -= place.num_choices
            place.turn = None

    def _let_in(self) -> None:
        """Gives places to those whose turn it is, as far as there are any."""
        while (place := self._queue.first()) is not None:
            if self.num_running + place.num_choices > self._max_running:
                return
            if self._is_careful and (self._is_full or self._probe is not None):
                return
            self._queue.pop()
            self.num_waiting -= place.num_choices
            self._give(place)
            assert place.turn is not None, "who waits has a turn to wait for"
            if not place.turn.done():
                place.turn.set_result(None)
            if self._is_careful:
                self._probe = place
        self._is_careful = False

    def _retry(self) -> None:
        self._is_full = False
        self._let_in()
