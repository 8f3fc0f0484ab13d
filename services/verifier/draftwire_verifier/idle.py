"""Time in which the engine is idle while sessions wait for drafts."""

from dataclasses import dataclass


@dataclass(slots=True)
class IdleWatch:
    """Sums the time in which the engine is idle and sessions wait. All times are by the same clock, seconds.

    Written by one thread; others may call `waited`.
    """

    _is_idle: bool = False
    _num_waiting: int = 0
    _waited: tuple[float, float | None] = (0.0, None)
    """Sum of past intervals, and the start of the current one or None. One object, so that no thread counts an interval
    twice or not at all."""

    def waited(self, now: float) -> float:
        """Returns the sum until now."""
        waited_s, since = self._waited
        return waited_s if since is None else waited_s + max(0.0, now - since)

    def set_idle(self, is_idle: bool, now: float) -> None:
        """Records whether the engine has no step to run."""
        self._is_idle = is_idle
        self._update(now)

    def wait(self, change: int, now: float) -> None:
        """Records that one more session waits (1), or one less (-1)."""
        self._num_waiting += change
        assert self._num_waiting >= 0, "who stops waiting has waited"
        self._update(now)

    def _update(self, now: float) -> None:
        waited_s, since = self._waited
        if (self._is_idle and self._num_waiting > 0) is (since is None):
            self._waited = (waited_s, now) if since is None else (waited_s + now - since, None)
