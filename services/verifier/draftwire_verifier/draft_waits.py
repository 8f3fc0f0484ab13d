"""Sessions that wait for their next draft, and steps that wait for them. Pure: no clock but the given one."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwire.engine.target_session import TargetSession
from draftwire_verifier.gathering import Gathering, Ready, UsualWait


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


@dataclass(slots=True)
class DraftWaits:
    """Measures the waits of all sessions, and decides by them when a step begins."""

    clock: Callable[[], float] = time.perf_counter
    draft_wait_s: float = 0.0
    """Time from verdicts to the next blocks, summed over all sessions. Rounds without a drafter are left out."""
    idle: IdleWatch = field(default_factory=IdleWatch)
    """Sums the time in which no step runs while a session waits for a draft."""
    gathering: Gathering = field(default_factory=Gathering)
    """Decides whether steps wait for sessions that are not ready yet."""
    since: dict[TargetSession, float] = field(default_factory=dict)
    """Sessions that wait for their next blocks or runs, with the time since which each does."""
    _usual: dict[TargetSession, UsualWait] = field(default_factory=dict)
    """How long each session waits for them."""
    _step_began_at: float = -math.inf
    """Time at which the latest step began, by the clock."""

    def begin(self, session: TargetSession) -> None:
        """Begins the wait of a session whose round was decided."""
        self.since[session] = now = self.clock()
        self.idle.wait(1, now)

    def end(self, session: TargetSession, *, has_block: bool = False) -> None:
        """Ends the wait of a session, if it waits, whose next round can be decided; `has_block`: of its drafter."""
        if session not in self.since:
            return
        now, since = self.clock(), self.since.pop(session)
        self.draft_wait_s += now - since if has_block else 0.0
        self._usual.setdefault(session, UsualWait()).learn(now - since)
        self.gathering.usual.learn(now - since)
        if self._step_began_at <= since:
            self.gathering.undisturbed.learn(now - since)
        self.idle.wait(-1, now)

    def close(self, session: TargetSession) -> None:
        """Forgets a session."""
        self._usual.pop(session, None)
        if self.since.pop(session, None) is not None:
            self.idle.wait(-1, self.clock())

    def begin_step(self, now: float, *, is_empty: bool) -> None:
        """Notes that a step begins, or that there is nothing to do."""
        self.idle.set_idle(is_empty, now)
        if not is_empty:
            self._step_began_at = now

    def hold(self, ready: Sequence[TargetSession], now: float) -> bool:
        """Whether a step that could begin with some sessions waits for others. `now` is by the clock."""
        deciding = [session for session in ready if not session.is_reading]
        if not deciding or not self.since:
            self.gathering.begin(now)
            return False
        num_rows = sum(session.num_rows for session in deciding)
        share, nothing = self.gathering.undisturbed_share, UsualWait()
        waiting = [self._usual.get(each, nothing).left_s(since, now, share) for each, since in self.since.items()]
        expected = [left_s for left_s in waiting if left_s is not None]
        usual_s = sum(self._usual.get(each, nothing).seconds or 0.0 for each in deciding) / len(deciding)
        return self.gathering.holds(Ready(len(deciding), num_rows, usual_s), expected, now)

    @property
    def holds_for_s(self) -> float | None:
        """Seconds after which a step that waits is to be asked for again; None if none waits."""
        until = self.gathering.until
        return None if until is None else max(0.0, until - self.clock())
