"""Queue of requests: places of those that run, and an order of those for which there is none.

Callers take turns, each in order of arrival. A verifier may have no room for a request that has a place: it then waits
on as the next of its caller, while others are tried. From then until nobody waits, requests are let in one at a time:
whether there is room for the next shows when the one before has been taken or refused.
"""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from draftwire.errors import InvalidRequestError, NoRoomError

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 10.0
"""Pauses after which refused requests are tried again, if none ends before: other gateways may have left the verifier.
The second is the longest that a verifier can ask for."""
PROBE_SECONDS = 1.0
"""How long others wait for the outcome of the request that was let in last: it may have a long way to a verifier."""
MAX_OVERTAKEN = 8
"""Refusals after which others no longer overtake a request: so large ones are served, too."""


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One request's place among those that run, or in the queue."""

    number: int
    """Number in order of arrival."""
    num_choices: int
    caller: str
    deadline: float
    """Time at which it is refused if it still waits, by the loop's clock."""
    is_held: bool = False
    """Whether it may run."""
    turn: asyncio.Future[None] | None = None
    """Set while it waits."""
    num_refusals: int = 0
    """Number of refusals by verifiers."""

    def __lt__(self, other: "QueuePlace") -> bool:
        return self.number < other.number


@dataclass(slots=True)
class _Queue:
    """Waiting places: callers in turn, each in order of arrival."""

    places: dict[str, list[QueuePlace]] = field(default_factory=dict)
    """Places by caller, in order of arrival."""

    def first(self, without: Container[str]) -> QueuePlace | None:
        """Returns whose turn it is, if some callers are left out."""
        return next((places[0] for caller, places in self.places.items() if caller not in without), None)

    def add(self, place: QueuePlace) -> None:
        """Adds a place; a caller that had none comes last."""
        insort(self.places.setdefault(place.caller, []), place)

    def remove(self, place: QueuePlace, *, has_had_turn: bool) -> None:
        """Removes a place, which need not be the first; with `has_had_turn` its caller comes last now."""
        places = self.places.pop(place.caller) if has_had_turn else self.places[place.caller]
        places.remove(place)
        if places:
            self.places[place.caller] = places
        else:
            self.places.pop(place.caller, None)


@dataclass(slots=True, eq=False)
class RequestQueue:
    """Places and queue of a gateway. What may run and wait is counted in choices. All methods run on the event loop."""

    _max_running: int
    _max_waiting: int
    _max_wait_s: float
    _numbers: Iterator[int] = field(default_factory=count)
    _queue: _Queue = field(default_factory=_Queue)
    _is_careful: bool = False
    """Whether a verifier has refused a request, and places are given one by one until nobody waits."""
    _probe: QueuePlace | None = None
    """The request that was let in last, while it is not known whether there is room for it."""
    _refused: set[str] = field(default_factory=set)
    """Callers whose next request was refused, since a request has ended."""
    _overtaken: QueuePlace | None = None
    """The request that nobody may overtake any more."""
    _retry: asyncio.TimerHandle | None = None
    num_running: int = 0
    """Choices with a place."""
    num_waiting: int = 0
    """Choices without one."""

    def has_place(self, num_choices: int) -> bool:
        """Whether a request would run at once."""
        return not self._queue.places and self.num_running + num_choices <= self._max_running

    def is_full(self, num_choices: int = 1) -> bool:
        """Whether a request would neither run nor wait."""
        return not self.has_place(num_choices) and self.num_waiting + num_choices > self._max_waiting

    def refuse_if_full(self, num_choices: int = 1) -> None:
        """Refuses a request that would neither run nor wait; of one that is not read yet, at least one choice is known.

        Raises:
            NoRoomError: as many run and wait as may.
        """
        if self.is_full(num_choices):
            waiting = f" and {self.num_waiting} wait, of {self._max_waiting}" if self._max_waiting else ""
            raise NoRoomError(
                f"{self.num_running} requests are running, of {self._max_running} at most{waiting}; retry in a second"
            )

    @asynccontextmanager
    async def place(self, num_choices: int, caller: str = "") -> AsyncIterator[QueuePlace]:
        """Yields a place as soon as there is one, and frees it at the end. The prompts are tokenised within.

        Raises:
            InvalidRequestError: the request has more choices than may ever run at once.
            NoRoomError: too many wait, or this one waited too long.
        """
        if num_choices > self._max_running:
            raise InvalidRequestError(
                f"num_choices: {num_choices} choices in all; at most {self._max_running} may run at once"
            )
        self.refuse_if_full(num_choices)
        deadline = asyncio.get_running_loop().time() + self._max_wait_s
        place = QueuePlace(next(self._numbers), num_choices, caller, deadline)
        try:
            if self.has_place(num_choices):
                self._hold(place)
            else:
                await self._wait(place)
            yield place
        finally:
            if place.is_held:
                self._refused.clear()
            self._release(place)
            if self._overtaken is place:
                self._overtaken = None
            self._let_in()

    async def wait_for_room(self, place: QueuePlace, refusal: NoRoomError) -> None:
        """Waits after a verifier's refusal until another attempt may succeed. Others may run meanwhile.

        Raises:
            NoRoomError: the refusal, if requests may not wait or this one waited too long.
        """
        if not self._max_waiting:
            raise refusal
        self._release(place)
        self._is_careful = True
        self._refused.add(place.caller)
        place.num_refusals += 1
        if place.num_refusals >= MAX_OVERTAKEN and self._overtaken is None:
            self._overtaken = place
        if self._retry is None:
            pause_s = min(max(RETRY_SECONDS, refusal.retry_after_s), MAX_RETRY_SECONDS)
            self._retry = asyncio.get_running_loop().call_later(pause_s, self._try_again)
        try:
            await self._wait(place)
        except NoRoomError:
            raise refusal from None

    def mark_open(self, place: QueuePlace) -> None:
        """Notes that a verifier has room for a request."""
        if self._overtaken is place:
            self._overtaken = None
        self._forget_probe(place)

    def _hold(self, place: QueuePlace) -> None:
        place.is_held = True
        self.num_running += place.num_choices

    def _release(self, place: QueuePlace) -> None:
        if self._probe is place:
            self._probe = None
        if place.is_held:
            place.is_held = False
            self.num_running -= place.num_choices

    async def _wait(self, place: QueuePlace) -> None:
        place.turn = asyncio.get_running_loop().create_future()
        self._queue.add(place)
        self.num_waiting += place.num_choices
        self._let_in()  # others, if this one was refused
        try:
            async with asyncio.timeout_at(place.deadline):
                await place.turn
        except TimeoutError:
            if not place.is_held:  # the turn may have come at the same moment
                raise NoRoomError(f"the request has waited {self._max_wait_s:g} s for others; retry later") from None
        finally:
            if not place.is_held:
                self._queue.remove(place, has_had_turn=False)
                self.num_waiting -= place.num_choices
            place.turn = None

    def _next(self) -> QueuePlace | None:
        """Returns who may be let in; None if nobody waits, or all that wait were refused."""
        if self._overtaken is not None and self._overtaken.turn is not None:
            return None if self._overtaken.caller in self._refused else self._overtaken
        return self._queue.first(self._refused)

    def _let_in(self) -> None:
        """Lets those in whose turn it is, as far as there are places."""
        while (place := self._next()) is not None:
            if self.num_running + place.num_choices > self._max_running:
                return
            if self._is_careful and self._probe is not None:
                return
            self._queue.remove(place, has_had_turn=True)
            self.num_waiting -= place.num_choices
            self._hold(place)
            assert place.turn is not None, "who waits has a turn to wait for"
            if not place.turn.done():
                place.turn.set_result(None)
            if self._is_careful:
                self._probe = place
                asyncio.get_running_loop().call_later(PROBE_SECONDS, self._forget_probe, place)
        if not self._queue.places:
            self._is_careful = False

    def _forget_probe(self, place: QueuePlace) -> None:
        if self._probe is place:
            self._probe = None
            self._let_in()

    def _try_again(self) -> None:
        self._retry = None
        self._refused.clear()
        self._let_in()
