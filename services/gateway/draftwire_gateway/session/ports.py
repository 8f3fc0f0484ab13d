"""Ports to verifiers and drafters, and what they report."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

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
