"""Time limits: `Deadline` for work on shared threads, `Watchdog` for calls that nothing can cancel."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LATE = 0.1
"""Largest share of its time that work may have spent queued for a timeout to be its own fault."""


@dataclass(slots=True)
class Deadline:
    """Deadline of work that is queued for a thread; the time in the queue counts."""

    seconds: float
    submitted_at: float = field(default_factory=time.monotonic)
    begun_at: float | None = None
    """Time at which a thread began the work; None while it is queued."""

    @property
    def left_s(self) -> float:
        """Seconds left; negative after the deadline."""
        return self.submitted_at + self.seconds - time.monotonic()

    @property
    def has_waited(self) -> bool:
        """Whether the time was spent in the queue: the work was not begun, or late."""
        return self.begun_at is None or self.begun_at - self.submitted_at > LATE * self.seconds

    def begin(self) -> None:
        """Records that the work begins."""
        self.begun_at = time.monotonic()


@dataclass(slots=True)
class Watchdog:
    """Detects calls on a device that take too long.

    A call that never ends (a hung kernel, a lost device) cannot be cancelled: the process has to be restarted.
    """

    limit_s: float
    """Seconds that one call may take."""
    busy_s: Callable[[], float]
    """Returns for how many seconds the current call has run; 0 if none runs."""
    is_stuck: bool = False
    """Whether the current call exceeds the limit, as of the last `check`."""

    @property
    def interval_s(self) -> float:
        """How often to check, seconds."""
        return min(1.0, self.limit_s / 4)

    def check(self) -> bool:
        """Updates `is_stuck` and returns whether it has changed."""
        was_stuck, self.is_stuck = self.is_stuck, self.busy_s() > self.limit_s
        return self.is_stuck != was_stuck
