"""For how long an engine did nothing because all that it had to do was on its way."""

from dataclasses import dataclass


@dataclass(slots=True)
class IdleWatch:
    """Sums the time in which the engine idles and sessions wait. Times are by any one clock, seconds."""

    waited_s: float = 0.0
    _is_idle: bool = False
    _num_waiting: int = 0
    _since: float | None = None
    """Since when both are so."""

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
        if self._is_idle and self._num_waiting:
            self._since = now if self._since is None else self._since
        elif self._since is not None:
            self.waited_s += now - self._since
            self._since = None
