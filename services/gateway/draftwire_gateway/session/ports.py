"""What the gateway needs of verifiers and drafters, and what it hears from them."""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.method.rounds import (
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
    """The session on the verifier is gone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class BlocksRefused:
    """The verifier takes no more blocks from a drafter of the session; the round is still open."""

    error: Exception
    permit_number: int
    """Which drafter."""


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The session on the drafter is gone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """The drafter has read the prompt."""


SessionEvent = Verdict | PromptRead | TargetLost | BlocksRefused | DrafterLost | DrafterReady


class Inbox(Protocol):
    """Where everything that one peer says about one session arrives, in order."""

    def put_nowait(self, item: SessionEvent) -> None:
        """Adds an event."""


class TargetPort(Protocol):
    """A verifier, as the gateway sees it."""

    @property
    def description(self) -> ModelDescription:
        """The target model."""

    @property
    def address(self) -> str:
        """Where drafters reach it."""

    @property
    def zone(self) -> str | None:
        """Where it stands, if that is known."""

    def takes_blocks_of(self, drafter_id: int) -> bool:
        """Whether a drafter is not in quarantine there, as far as is known."""

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        """Opens a session, whose verdicts then go to the inbox, or raises why not."""

    def run_plain(self, run: PlainRun) -> None:
        """Asks for plain rounds, without waiting."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""


class DrafterPort(Protocol):
    """A drafter, as the gateway sees it."""

    @property
    def description(self) -> ModelDescription:
        """The draft model."""

    @property
    def instance_id(self) -> int:
        """Names the drafter's process."""

    @property
    def round_trip(self) -> RoundTripEstimate:
        """How long its blocks take, whoever asks."""

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        """Opens a session and returns when it is ready to draft, or raises why not."""

    def calibrate(self, calibration: Calibration) -> None:
        """Asks for a block, without waiting."""

    def send_drafted(self, command: SendDrafted) -> None:
        """Asks for a block under way as far as it is drawn, without waiting."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""


class Peers(Protocol):
    """The verifiers and drafters that there are now."""

    def targets(self) -> Sequence[TargetPort]:
        """Returns the verifiers that sessions can be opened on, the best first."""

    def drafter_for(self, target: TargetPort, but: Collection[int]) -> DrafterPort | None:
        """Returns the best drafter whose blocks a verifier takes, if there is one.

        Args:
            target: the verifier.
            but: instance ids of drafters that are not wanted.
        """


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
