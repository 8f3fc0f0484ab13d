"""Events of a session's peers, queued in order of arrival, and the deadline of the next one."""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass

from draftwire.errors import ProtocolViolationError
from draftwire_gateway.session.ports import DrafterLost, DrafterReady, SessionEvent, TargetLost

MAX_UNREAD_EVENTS = 2**14
"""Events of a session's verifier that wait, at most: many times what is requested, most of it parts of prompts."""

MAX_UNREAD_OF_DRAFTER = 2**8
"""The same of a drafter, which replies once to each request."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """An event, and the peer of the session that sent it."""

    epoch: int
    permit_number: int | None
    """Identifies the drafter; None for events of a verifier."""
    event: SessionEvent
    at: float
    """Time of arrival, by `time.perf_counter`."""
    arrived_at: float
    """The same by the event loop's clock, which timeouts are measured with."""


class EventQueue:
    """Events that wait for the one task that reads them, and a deadline that moves with every round: mostly without a
    timer, since one that rings too early is set anew. Peers never block; see `TaggedInbox`.
    """

    def __init__(self) -> None:
        self._events: deque[PeerEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Done when the task that waits is to look again; None while none waits."""
        self._deadline = math.inf
        self._alarm: asyncio.TimerHandle | None = None
        """Rings at the deadline or before."""

    def put_nowait(self, event: PeerEvent) -> None:
        """Adds an event."""
        self._events.append(event)
        self._wake()

    async def get(self) -> PeerEvent:
        """Waits for an event, and returns the oldest.

        Raises:
            TimeoutError: there is none at the deadline.
        """
        while not self._events:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._deadline:
                raise TimeoutError
            if self._alarm is None and self._deadline < math.inf:
                self._alarm = loop.call_at(self._deadline, self._ring)
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._events.popleft()

    def set_timeout(self, seconds: float) -> None:
        """Moves the deadline to so many seconds from now. To be called by the task that reads."""
        self._deadline = asyncio.get_running_loop().time() + seconds
        if self._alarm is not None and self._alarm.when() > self._deadline:
            self.close()

    def num_unread(self, epoch: int, permit_number: int | None) -> int:
        """Returns how many events of a peer wait, and drops those of earlier epochs, which nobody would handle."""
        self._events = deque(event for event in self._events if event.epoch >= epoch)
        return sum(event.epoch == epoch and event.permit_number == permit_number for event in self._events)

    def close(self) -> None:
        """Leaves no timer behind."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True)
class TaggedInbox:
    """An `Inbox` that adds the sender to each event. All inboxes of a session have one queue, and each peer is held to
    a bound of its own: a flood of one peer is not blamed on another.
    """

    queue: EventQueue
    epoch: int
    permit_number: int | None = None
    _num_free: int = 0
    """So many events of the peer are certainly within its bound."""

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event, with its sender and time of arrival. Those that the gateway makes itself are never refused: a
        session has one at most of each opening.

        Raises:
            ProtocolViolationError: this peer sent more than anybody requested. Its stream must be ended.
        """
        if not isinstance(item, TargetLost | DrafterLost | DrafterReady):
            if self._num_free <= 0:  # as at first, and unless some were read meanwhile
                most = MAX_UNREAD_EVENTS if self.permit_number is None else MAX_UNREAD_OF_DRAFTER
                self._num_free = most - self.queue.num_unread(self.epoch, self.permit_number)
            if self._num_free <= 0:
                raise ProtocolViolationError("a peer sent more events than were requested")
            self._num_free -= 1
        arrived_at = asyncio.get_running_loop().time()
        self.queue.put_nowait(PeerEvent(self.epoch, self.permit_number, item, time.perf_counter(), arrived_at))
