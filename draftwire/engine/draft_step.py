"""A step of a drafter: what goes into it, and what comes of it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.engine.draft_session import DraftSession
from draftwire.errors import DraftwireError
from draftwire.method.rounds import Calibration, DraftBlock

DraftOutcome = DraftBlock | DraftwireError | None
"""Outcome of a session's part in a step: a block, an error that fails the session, or None if tokens were only read."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step: new committed tokens to read, and the block to draft, if any."""

    session: DraftSession
    base_len: int
    """Committed tokens that were passed to the strategy before."""
    token_ids: list[int]
    """New committed tokens."""
    calibration: Calibration | None
    """The block to draft; None only reads."""
    max_read: int | None
    """Tokens to read at most; None is no limit."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Sequences hold one entry for each item."""

    outcomes: Sequence[DraftOutcome]
    num_unread: Sequence[int]
    num_reused: Sequence[int]
    num_read: int
    """Tokens that were read before drafting."""
    calibration_s: float
    """Time of that reading, seconds."""
    draft_s: float = 0.0
    """Time of drafting, seconds."""
    num_passes: int = 0
    """Forward passes of drafting."""
    guesses: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Other tokens that may stand in the places of a block, by index of the item."""


class SpareWork(Protocol):
    """Something to do while nothing is requested."""

    @property
    def num_sessions(self) -> int:
        """Number of sessions that it is for."""

    def run(self) -> StepResult:
        """Does it, on the torch thread. The result has no items."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call into the engine: for what was requested or, if nothing was, for what may be requested next."""

    items: Sequence[StepItem]
    spare: SpareWork | None = None

    @property
    def reads_prompts(self) -> bool:
        """Whether some session is in prefill."""
        return any(item.max_read is not None for item in self.items)

    @property
    def num_sessions(self) -> int:
        """Number of sessions that take part."""
        return len(self.items) if self.spare is None else self.spare.num_sessions
