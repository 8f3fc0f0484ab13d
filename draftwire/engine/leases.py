"""Who a session belongs to: the gateway's stream under whose lease it was opened."""

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
    """Tells a gateway that one of its sessions is gone."""

    session_id: int
    epoch: int
    error: Exception


class Leases(Generic[Event]):
    """The gateways' streams that are open, each with the outbox that its sessions' events go to."""

    def __init__(self) -> None:
        self.instance_id = secrets.randbits(64)
        """Names the process that grants the leases."""
        self._outboxes: dict[int, Outbox[Event]] = {}

    def open(self) -> tuple[int, Outbox[Event]]:
        """Returns a new lease and its outbox."""
        lease_id, outbox = secrets.randbits(64), Outbox[Event]()
        self._outboxes[lease_id] = outbox
        return lease_id, outbox

    def end(self, lease_id: int) -> None:
        """Ends a lease; its sessions are the caller's to end."""
        self._outboxes.pop(lease_id).close()

    def require(self, lease_id: int) -> None:
        """Makes sure that a lease is open.

        Raises:
            ProtocolViolationError: it is not.
        """
        if lease_id not in self._outboxes:
            raise ProtocolViolationError("unknown lease")

    def send(self, lease_id: int, event: Event) -> None:
        """Puts an event into the outbox of an open lease; a gateway that does not read its stream loses it."""
        outbox = self._outboxes[lease_id]
        try:
            outbox.put(event)
        except UnavailableError:
            log.warning("lease.stream_cut", lease_id=lease_id)
            outbox.close()
