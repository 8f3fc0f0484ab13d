"""Whether a step waits for the next blocks of other sessions, or begins without them.

While reading the weights is most of a step, it takes about as long for a few sessions as for many. Sessions that have
fallen out of step with each other, each half in steps of its own, are then nearly half as fast as together, and nothing
would bring them together again. So a step that could begin waits for blocks that are expected soon.

In step, a cycle is a step of all, and then the wait for their next blocks; in two halves, it is a step of each, beside
which the other half is drafted for. A step waits only where the first is shorter: where drafting takes less time than
the second step. Drafters and verifiers on the same cores slow each other down: the time that drafting takes without a
step beside it is what counts.

Which rounds share a step changes no token. Pure: no tensors, no transport, no clock but the given one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest

MEMORY = 0.8
"""Weight of the previous estimate in the moving averages of times of steps."""
WAIT_MEMORY = 0.5
"""The same of a session's waits, which change with the length of its drafts."""
PATIENCE = 1.5
"""A block that takes longer than so many times its session's usual wait is not expected any more."""
UNKNOWN_SHARE = 0.5
"""Share of the usual wait that a block is expected to need while no step runs, before it is known."""
LEAST_LEFT = 0.25
"""A block that is due is expected after this share of its session's usual wait."""
MOST_AWAITED = 16
"""Sessions that are considered to be waited for; when they have come, the next ones are."""
TRIAL_EVERY = 64
"""One in so many steps waits for nobody, so that the times of smaller steps are known; and one waits as if blocks came
at once while no step runs, so that it is known when they do."""


@dataclass(slots=True)
class StepTimes:
    """Time of a step by the number of rows that it computes, without prompts."""

    _by_magnitude: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Rows and seconds, averages, by bit length of the rows."""
    _points: list[tuple[float, float]] = field(default_factory=list)
    """The same by rows."""

    def learn(self, num_rows: int, seconds: float) -> None:
        """Adds a step to the moving averages."""
        magnitude = num_rows.bit_length()
        rows, total = self._by_magnitude.get(magnitude, (float(num_rows), seconds))
        weight = 1.0 - MEMORY
        self._by_magnitude[magnitude] = rows + weight * (num_rows - rows), total + weight * (seconds - total)
        self._points = sorted(self._by_magnitude.values())

    @property
    def is_empty(self) -> bool:
        """Whether no step was measured."""
        return not self._by_magnitude

    def seconds(self, num_rows: float) -> float:
        """Returns the time of a step, on lines between those that were measured, and the nearest one's beyond them. At
        least one was.
        """
        low_rows, low_s = self._points[0]
        for rows, seconds in self._points:
            if rows > num_rows:
                share = max(0.0, num_rows - low_rows) / (rows - low_rows) if rows > low_rows else 0.0
                return low_s + share * (seconds - low_s)
            low_rows, low_s = rows, seconds
        return low_s


@dataclass(slots=True)
class UsualWait:
    """How long a session's next block usually takes to come after a verdict, seconds."""

    seconds: float | None = None
    """None before the first."""

    def learn(self, seconds: float) -> None:
        """Adds a wait to the moving average."""
        self.seconds = seconds if self.seconds is None else self.seconds + WAIT_MEMORY * (seconds - self.seconds)

    def left_s(self, since: float, now: float, share: float = 1.0) -> float | None:
        """Returns how much longer it is to be expected; None if it is not, because nothing is known or it is late.

        Args:
            since: when the wait began.
            now: by the same clock.
            share: of the usual wait that it takes now.
        """
        if self.seconds is None or now - since > PATIENCE * self.seconds:
            return None
        expected_s = share * self.seconds
        return max(LEAST_LEFT * expected_s, since + expected_s - now)


@dataclass(frozen=True, slots=True)
class Ready:
    """The sessions that a step could begin with."""

    num_sessions: int
    """Number of sessions, at least one."""
    num_rows: int
    """Rows that the step would compute."""
    usual_wait_s: float
    """How long their next blocks usually take to come after their verdicts, mean."""


def worthwhile_wait_s(ready: Ready, left_s: Iterable[float], times: StepTimes, undisturbed_s: float) -> float:
    """Returns for how long a step that could begin should wait for others; 0 is to begin now.

    It waits if that takes less time than the second step that is saved, now and in each cycle, unless those that come
    late, of which there are fewer, could rather wait for the next blocks of those that are ready.

    Args:
        ready: who is.
        left_s: after how long each of the others is expected; they are taken to have as many rows each.
        times: of steps.
        undisturbed_s: how long blocks usually take to come after verdicts while no step runs.
    """
    if times.is_empty:
        return 0.0
    alone_s = times.seconds(ready.num_rows)
    rows_of_each = ready.num_rows / ready.num_sessions
    best_s, most_saved_s, sum_s = 0.0, 0.0, 0.0
    for num_others, wait_s in enumerate(nsmallest(MOST_AWAITED, left_s), 1):
        sum_s += wait_s
        others_s = times.seconds(num_others * rows_of_each)
        together_s = times.seconds(ready.num_rows + num_others * rows_of_each)
        saved_s = alone_s + others_s - together_s - max(wait_s, undisturbed_s)
        waited_s = (ready.num_sessions + num_others) * wait_s - sum_s  # by all of them
        waited_instead_s = num_others * (alone_s + ready.usual_wait_s) - sum_s
        if saved_s > most_saved_s and waited_s < waited_instead_s:
            best_s, most_saved_s = wait_s, saved_s
    return best_s


@dataclass(slots=True)
class Gathering:
    """Decides for one step after the other. Times by the scheduler's clock, seconds."""

    times: StepTimes = field(default_factory=StepTimes)
    usual: UsualWait = field(default_factory=UsualWait)
    """How long blocks take to come after verdicts, of all sessions."""
    undisturbed: UsualWait = field(default_factory=UsualWait)
    """The same while no step runs."""
    until: float | None = None
    """Time until which the next step waits, unless more comes before; None if it waits for nobody."""
    held_s: float = 0.0
    """Seconds that steps have waited in all."""
    _held_since: float | None = None
    _num_asked: int = 0

    @property
    def undisturbed_share(self) -> float:
        """Share of its usual wait that a block takes while no step runs."""
        if self.usual.seconds is None or self.undisturbed.seconds is None:
            return UNKNOWN_SHARE
        return min(1.0, self.undisturbed.seconds / max(self.usual.seconds, 1e-9))

    def holds(self, ready: Ready, left_s: Iterable[float], now: float) -> bool:
        """Returns whether the next step is to wait, until `until` at most; arguments as of `worthwhile_wait_s`. If not,
        it begins now.
        """
        if self._held_since is None:
            self._num_asked += 1
        undisturbed_s = self.undisturbed.seconds or 0.0
        if self._num_asked % TRIAL_EVERY == TRIAL_EVERY // 2:
            undisturbed_s = 0.0
        is_alone = self._num_asked % TRIAL_EVERY == 0
        wait_s = 0.0 if is_alone else worthwhile_wait_s(ready, left_s, self.times, undisturbed_s)
        if wait_s <= 0.0:
            self.begin(now)
            return False
        self._held_since = now if self._held_since is None else self._held_since
        self.until = now + wait_s
        return True

    def begin(self, now: float) -> None:
        """Ends the wait, if there was one: the next step begins now if there is anything to do."""
        if self._held_since is not None:
            self.held_s += now - self._held_since
        self.until = self._held_since = None
