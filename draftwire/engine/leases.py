"""Leases: each session belongs to the gateway's stream under whose lease it was opened, and ends with it."""

import secrets
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from draftwire.errors import ProtocolViolationError, UnavailableError
from draftwire.runtime.outbox import Outbox

log = structlog.get_logger()

SessionKey = tuple[int, int]
"""Session id and epoch."""

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """Event for a gateway: one of its sessions has failed and is closed."""

    session_id: int
    epoch: int
    error: Exception


class Leases(Generic[Event]):
    """The open leases, one for each gateway's stream, each with the outbox of its sessions' events."""

    def __init__(self) -> None:
        self.instance_id = secrets.randbits(64)
        """Random id of the process that grants the leases."""
        self._outboxes: dict[int, Outbox[Event]] = {}
        self._used: set[int] = set()
        """Leases that were asked for a session."""

    def open(self) -> tuple[int, Outbox[Event]]:
        """Returns the id and the outbox of a new lease."""
        lease_id, outbox = secrets.randbits(64), Outbox[Event]()
        self._outboxes[lease_id] = outbox
        return lease_id, outbox

    def end(self, lease_id: int) -> None:
        """Ends a lease and closes its outbox; the caller closes the sessions."""
        self._used.discard(lease_id)
        self._outboxes.pop(lease_id).close()

    def is_used(self, lease_id: int) -> bool:
        """Whether a session was asked for under an open lease."""
        return lease_id in self._used

    def require(self, lease_id: int) -> None:
        """Checks that a lease is open, under which a session is to be opened.

        Raises:
            ProtocolViolationError: the lease is unknown or has ended.
        """
        if lease_id not in self._outboxes:
            raise ProtocolViolationError("unknown lease")
        self._used.add(lease_id)

    def send(self, lease_id: int, event: Event) -> None:
        """Puts an event into the outbox of an open lease. If the outbox is full (backpressure), the stream is cut."""
        outbox = self._outboxes[lease_id]
        try:
            outbox.put(event)
        except UnavailableError:
            log.warning("lease.stream_cut", lease_id=lease_id)
            outbox.close()
