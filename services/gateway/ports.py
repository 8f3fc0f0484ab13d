"""What the gateway needs of a verifier and a drafter, and what it hears from them."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from draftwire.models.description import ModelDescription
from draftwire.rounds import Calibration, DraftSessionSpec, PlainRun, TargetSessionSpec, Verdict


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The session on the verifier is gone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The session on the drafter is gone, or its blocks are no good."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """The drafter has read the prompt."""


SessionEvent = Verdict | TargetLost | DrafterLost | DrafterReady
Inbox = asyncio.Queue[SessionEvent]
"""Where everything about one session arrives, in order."""


class TargetPort(Protocol):
    """The verifier, as the gateway sees it."""

    @property
    def connected(self) -> bool:
        """Whether sessions can be opened now."""

    @property
    def description(self) -> ModelDescription:
        """The target model."""

    @property
    def address(self) -> str:
        """Where drafters reach it."""

    def takes_blocks_of(self, drafter_id: int) -> bool:
        """Whether a drafter is not in quarantine there, as far as is known."""

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        """Opens a session, whose verdicts then go to the inbox, or raises why not."""

    def run_plain(self, run: PlainRun) -> None:
        """Asks for plain rounds, without waiting."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting."""


class DrafterPort(Protocol):
    """The drafter, as the gateway sees it."""

    @property
    def connected(self) -> bool:
        """Whether sessions can be opened now."""

    @property
    def description(self) -> ModelDescription:
        """The draft model."""

    @property
    def instance_id(self) -> int:
        """Names the drafter's process. Only while connected."""

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        """Opens a session and returns when it is ready to draft, or raises why not."""

    def calibrate(self, calibration: Calibration) -> None:
        """Asks for a block, without waiting."""

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting."""
