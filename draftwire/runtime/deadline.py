"""The time that a piece of work has on threads that it shares with others of its kind."""

import time
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
