"""Limits of time: `Deadline` for work on shared threads, `Watchdog` for calls that nothing can cancel."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LATE = 0.1
"""The part of its time that work may have waited and still be told that it takes too long itself."""


@dataclass(slots=True)
class Deadline:
    """So much time from now on, waiting for others included."""

    seconds: float
    submitted_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    """When a thread turned to it."""

    @property
    def left_s(self) -> float:
        """How much of it is left; negative when it is over."""
        return self.submitted_at + self.seconds - time.monotonic()

    @property
    def has_waited(self) -> bool:
        """Whether others have used it up: it was not begun, or late."""
        return self.begun_at is None or self.begun_at - self.submitted_at > LATE * self.seconds

    def begin(self) -> None:
        """Says that the work begins."""
        self.begun_at = time.monotonic()


@dataclass(slots=True)
class Watchdog:
    """Watches how long the current call on a device takes.

    A call that never ends (a hung kernel, a lost device) cannot be cancelled: only a new process helps.
    """

    limit_s: float
    """Seconds that one call may take."""
    busy_s: Callable[[], float]
    """Returns for how many seconds the current call has run; 0 where none runs."""
    is_stuck: bool = False
    """Whether the current call takes too long, as of the last `check`."""

    @property
    def interval_s(self) -> float:
        """How often to check, seconds."""
        return min(1.0, self.limit_s / 4)

    def check(self) -> bool:
        """Looks, and returns whether `is_stuck` has changed."""
        was_stuck, self.is_stuck = self.is_stuck, self.busy_s() > self.limit_s
        return self.is_stuck != was_stuck
