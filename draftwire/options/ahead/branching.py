"""Chooses for how many texts of a session to draft ahead at once: for as many as save time. Pure.

A further text makes it likelier that the right one is among them, and each pass takes longer. Which of the two weighs
more depends on what a row of a batch costs, on how likely the endings of a round are, and on how long a miss waits. All
of that was measured before the round that is drafted for: see docs/exactness.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

WEIGHT = 1 / 16
"""Weight of the latest pass in the moving averages of passes."""
LARGEST_RATIO = 3.0
"""A pass that took longer than so many times what was expected counts as that long: it may have been paused."""
TRIAL_EVERY = 64
"""Number of choices of which one tries twice as many texts as are worthwhile: so the cost of a row stays known."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """Time of a forward pass of the drafter, seconds."""

    first_s: float
    """Seconds with one row."""
    row_s: float
    """Seconds that each further row adds."""

    def seconds(self, num_rows: float) -> float:
        """Returns the time of a pass with so many rows."""
        return self.first_s + (num_rows - 1.0) * self.row_s


class PassTimes:
    """Learns the time of a pass with one row, and by what share of that each further row makes one longer."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._row_share: float | None = None

    @property
    def known(self) -> PassTime | None:
        """Estimate; None before there was a pass with one row, and another with more."""
        if self._first_s is None or self._row_share is None:
            return None
        return PassTime(self._first_s, max(0.0, self._row_share) * self._first_s)

    def learn(self, num_rows: int, seconds: float) -> None:
        """Adds a pass."""
        known = self.known
        if known is not None:
            seconds = min(seconds, LARGEST_RATIO * known.seconds(num_rows))
        if num_rows == 1:
            self._first_s = _moved(self._first_s, seconds)
        elif self._first_s is not None:
            self._row_share = _moved(self._row_share, (seconds / self._first_s - 1.0) / (num_rows - 1))


def _moved(average: float | None, value: float) -> float:
    """Returns a moving average after another value."""
    return value if average is None else average + WEIGHT * (value - average)


def num_worthwhile(
    chances: Sequence[float], length: int, times: PassTime, outcome_s: float, num_rows_beside: int = 0
) -> int:
    """Returns how many of the likeliest texts to draft for, at least 1: so that the next block is expected soonest.

    Where one of them comes true, its block takes the passes of the batch. If none does, its block takes passes of its
    own, after the round has ended and the pass that runs then.

    Args:
        chances: that each comes true, the likeliest first; at least one.
        length: draft tokens of each block.
        times: of a pass.
        outcome_s: how long it takes from sending a block until it is known how its round ended, seconds.
        num_rows_beside: of other sessions, in the same passes.
    """

    def expected_s(count: int, chance: float) -> float:
        pass_s, alone_s = times.seconds(count + num_rows_beside), times.seconds(1 + num_rows_beside)
        hit_s = length * pass_s + alone_s  # which reads the last token of the block before
        miss_s = outcome_s + pass_s / 2.0 + length * alone_s
        return chance * hit_s + (1.0 - chance) * miss_s

    together = list(accumulate(chances))
    return min(range(1, len(together) + 1), key=lambda count: (expected_s(count, together[count - 1]), -count))
