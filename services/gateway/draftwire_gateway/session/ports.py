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


class PeerPort(Protocol):
    """A verifier or a drafter, as the gateway sees it."""

    @property
    def description(self) -> ModelDescription:
        """The model that it serves."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""


class TargetPort(PeerPort, Protocol):
    """A verifier, as the gateway sees it."""

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


class DrafterPort(PeerPort, Protocol):
    """A drafter, as the gateway sees it."""

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


class Peers(Protocol):
    """The available verifiers and drafters."""

    def targets(self) -> Sequence[TargetPort]:
        """Returns the verifiers that sessions can be opened on, the best first."""

    def why_no_target(self) -> str:
        """Returns why `targets` is empty; empty if it is not."""

    def last_usable_at(self) -> float:
        """Returns when a verifier could last take sessions, in the loop's time: now, if one can."""

    def draft_models(self) -> Collection[str]:
        """Returns the names of the draft models, of drafters that were ever connected."""

    def drafters_for(self, target: TargetPort, but: Collection[int]) -> Sequence[DrafterPort]:
        """Returns the drafters whose blocks a verifier takes, the best first, without those of some instance ids."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """An event, and the peer of the session that sent it."""

    epoch: int
    permit_number: int | None
    """Identifies the drafter; None for events of a verifier."""
    event: SessionEvent
    at: float = field(default_factory=lambda: time.perf_counter())
    """Time of arrival, by `time.perf_counter`."""
    arrived_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """The same by the event loop's clock, which timeouts are measured with."""


MAX_UNREAD_EVENTS = 2**14
"""Events of a session's verifier that wait to be handled, at most: many times what its requests can cause. The parts of
a prompt's report, of up to 128 tokens each, are the most."""

MAX_UNREAD_OF_DRAFTER = 2**8
"""The same of a drafter, which replies once to each request."""


@dataclass(slots=True)
class TaggedInbox:
    """An `Inbox` that adds the sender to each event. All inboxes of a session have one queue, and each peer is held to
    a bound of its own: a flood of one peer is not blamed on another.
    """

    queue: asyncio.Queue[PeerEvent]
    epoch: int
    permit_number: int | None = None
    _num_free: int = field(init=False)
    """So many events of the peer are certainly within its bound."""

    def __post_init__(self) -> None:
        self._num_free = self._most - self._num_unread()

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event, with its sender and time of arrival. Those that the gateway makes itself are never refused: a
        session has one at most of each opening.

        Raises:
            ProtocolViolationError: this peer sent more than anybody requested. Its stream must be ended.
        """
        if not isinstance(item, TargetLost | DrafterLost | DrafterReady):
            if self._num_free <= 0:  # unless some were read meanwhile
                self._num_free = self._most - self._num_unread()
            if self._num_free <= 0:
                raise ProtocolViolationError("a peer sent more events than were requested")
            self._num_free -= 1
        self.queue.put_nowait(PeerEvent(self.epoch, self.permit_number, item))

    @property
    def _most(self) -> int:
        return MAX_UNREAD_EVENTS if self.permit_number is None else MAX_UNREAD_OF_DRAFTER

    def _num_unread(self) -> int:
        """Returns how many events of this peer wait, and drops those of earlier epochs, which nobody would handle."""
        waiting = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for event in waiting:
            if event.epoch >= self.epoch:
                self.queue.put_nowait(event)
        return sum(event.epoch == self.epoch and event.permit_number == self.permit_number for event in waiting)
