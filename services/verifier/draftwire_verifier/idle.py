"""For how long an engine did nothing because all that it had to do was on its way."""

from dataclasses import dataclass


@dataclass(slots=True)
class IdleWatch:
    """Sums the time in which the engine idles and sessions wait. Times are by any one clock, seconds.

    Written by one thread; `waited` may be asked by others.
    """

    _is_idle: bool = False
    _num_waiting: int = 0
    _waited: tuple[float, float | None] = (0.0, None)
    """The sum of the stretches that are over, and since when both are so. One object, so that no thread sees a stretch
    in both or in none."""

    def waited(self, now: float) -> float:
        """Returns the sum until now."""
        waited_s, since = self._waited
        return waited_s if since is None else waited_s + max(0.0, now - since)

    def set_idle(self, is_idle: bool, now: float) -> None:
        """Notes that the engine has no step to run, or has one again."""
        self._is_idle = is_idle
        self._look(now)

    def wait(self, change: int, now: float) -> None:
        """Notes that one session more waits, or (-1) one less."""
        self._num_waiting += change
        assert self._num_waiting >= 0, "who stops waiting has waited"
        self._look(now)

    def _look(self, now: float) -> None:
        waited_s, since = self._waited
        if (self._is_idle and self._num_waiting > 0) is (since is None):
            self._waited = (waited_s, now) if since is None else (waited_s + now - since, None)
