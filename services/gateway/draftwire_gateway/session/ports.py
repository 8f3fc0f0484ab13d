"""Ports to verifiers and drafters, and their events."""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftSessionSpec,
    PlainRun,
    PromptRead,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.models.description import ModelDescription
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The session on the verifier is lost."""

    error: Exception


@dataclass(frozen=True, slots=True)
class BlocksRefused:
    """The verifier accepts no more blocks from a drafter of the session; the round is still open."""

    error: Exception
    permit_number: int
    """Permit number of that drafter."""


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The session on the drafter is lost."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """The drafter has finished its prefill."""


SessionEvent = Verdict | PromptRead | TargetLost | BlocksRefused | DrafterLost | DrafterReady | BlockSent


class Inbox(Protocol):
    """Receives the events of one peer for one session, in order."""

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event."""


class TargetPort(Protocol):
    """A verifier, as the gateway sees it."""

    @property
    def description(self) -> ModelDescription:
        """The target model."""

    @property
    def address(self) -> str:
        """Address at which drafters reach the verifier."""

    @property
    def zone(self) -> str | None:
        """Zone of the verifier, if known."""

    def takes_blocks_of(self, drafter_id: int) -> bool:
        """Whether the verifier has not reported a drafter as quarantined; see `DrafterPort.known_as`."""

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        """Opens a session, whose verdicts then go to the inbox. Raises if the verifier refuses or cannot be reached."""

    def run_plain(self, run: PlainRun) -> None:
        """Requests plain rounds, without waiting."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""


class DrafterPort(Protocol):
    """A drafter, as the gateway sees it."""

    @property
    def description(self) -> ModelDescription:
        """The draft model."""

    @property
    def instance_id(self) -> int:
        """Identifies the drafter's process."""

    def known_as(self, address: str) -> int:
        """Returns what the verifier at an address knows the drafter by; its instance id, if it has not told."""

    @property
    def round_trip(self) -> RoundTripEstimate:
        """Estimate of the time that its blocks take, over all sessions."""

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        """Opens a session and returns after the prefill. Raises if the drafter refuses or cannot be reached."""

    def calibrate(self, calibration: Calibration) -> None:
        """Requests a block, without waiting."""

    def send_drafted(self, command: SendDrafted) -> None:
        """Requests the tokens drawn so far of the block in progress, without waiting.

        The inbox gets a `BlockSent` if the drafter is capable of `FLUSH_REPLIES`.
        """

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""


class Peers(Protocol):
    """The available verifiers and drafters."""

    def targets(self) -> Sequence[TargetPort]:
        """Returns the verifiers that sessions can be opened on, the best first."""

    def drafter_for(self, target: TargetPort, but: Collection[int]) -> DrafterPort | None:
        """Returns the best drafter whose blocks a verifier takes, if there is one.

        Args:
            target: the verifier.
            but: instance ids of drafters to leave out.
        """


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """An event, and the peer of the session that sent it."""

    epoch: int
    permit_number: int | None
    """Identifies the drafter; None for events of a verifier."""
    event: SessionEvent
    at: float = field(default_factory=time.perf_counter)
    """Time of arrival, by `time.perf_counter`."""
    arrived_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """The same by the event loop's clock, which timeouts are measured with."""


MAX_UNREAD_EVENTS = 2**14
"""Events of a session that wait to be handled, at most: many times what its requests can cause. The parts of a prompt's
report, of up to 128 tokens each, are the most."""


@dataclass(frozen=True, slots=True)
class TaggedInbox:
    """An `Inbox` that adds the sender to each event."""

    queue: asyncio.Queue[PeerEvent]
    epoch: int
    permit_number: int | None = None

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event, with its sender and time of arrival.

        Raises:
            ProtocolViolationError: there are more than anybody requested. The peer's stream must be ended.
        """
        if self.queue.qsize() >= MAX_UNREAD_EVENTS:
            raise ProtocolViolationError("a peer sent more events than were requested")
        self.queue.put_nowait(PeerEvent(self.epoch, self.permit_number, item))
