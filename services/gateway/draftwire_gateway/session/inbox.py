"""All that the peers of a session say goes into one queue, with who said it: one that was given up may speak on."""

import asyncio
import time
from dataclasses import dataclass, field

from draftwire_gateway.session.ports import SessionEvent


@dataclass(frozen=True, slots=True)
class Said:
    """An event, and which of the session's peers, one after the other, it comes from."""

    epoch: int
    permit_number: int | None
    """None of a verifier."""
    event: SessionEvent
    at: float = field(default_factory=time.perf_counter)
    """When it arrived."""


@dataclass(frozen=True, slots=True)
class TaggedInbox:
    """An `Inbox` that remembers who speaks."""

    queue: asyncio.Queue[Said]
    epoch: int
    permit_number: int | None = None

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event, with its sender and the time."""
        self.queue.put_nowait(Said(self.epoch, self.permit_number, item))
