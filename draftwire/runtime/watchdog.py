"""Tells a process that is stuck from one that is busy."""

from collections.abc import Callable
from dataclasses import dataclass


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
