"""Time of a step of one process by its size: recursive least squares."""

import math
from collections.abc import Sequence

NOISE = 0.1
"""Standard deviation of a step's time, and of what a machine's speed changes by in `REMEMBERED_S`, as a share."""
REMEMBERED_S = 60.0
"""Seconds after which a third is left of the weight of what was measured: machines and texts change."""
PRICE = 0.05
"""Share of a step of one row that a further row, session or hundred tokens may take before it is known: between a
hundredth, of a GPU, and a fifth, of a CPU."""


class StepPrices:
    """`a + b rows + c sessions + d hundreds of text tokens`: a Gaussian of the four prices. They drift together, since
    all of a machine becomes slower where others use it too, and each by itself hardly.
    """

    def __init__(self) -> None:
        """Knows nothing: the first step says how large prices may be."""
        self.prices = [0.0, 0.0, 0.0, 0.0]
        """Seconds; any may be below 0 by chance."""
        self._covariance: list[list[float]] = []
        self._drifts: list[float] = []
        """Variances that each price gains in a second by itself."""
        self._at = 0.0
        self._latest_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return bool(self._covariance)

    def add(self, size: Sequence[float], seconds: float, now: float) -> None:
        """Adds a step, once where several sessions report it.

        Args:
            size: 1, rows, sessions and hundreds of text tokens; of several passes, times their number.
            seconds: that it took.
            now: when it ended; 0 at the warm-up, after which the clock begins.
        """
        if self._latest_s == seconds:
            return
        self._latest_s = seconds
        prices, covariance = self.prices, self._covariance
        if not covariance:
            variances = [(share * seconds / size[0]) ** 2 for share in (1.0, PRICE, PRICE, PRICE)]
            covariance += [
                [variance * (row == at) for at in range(len(prices))] for row, variance in enumerate(variances)
            ]
            self._drifts = [variance * (NOISE * PRICE) ** 2 / REMEMBERED_S for variance in variances]
            self._at = now
        passed_s = max(0.0, now - self._at) if self._at else 0.0
        drift = NOISE**2 / REMEMBERED_S * passed_s
        self._at = max(now, self._at)
        for row, line in enumerate(covariance):
            for at, price in enumerate(prices):
                line[at] += drift * prices[row] * price
            line[row] += self._drifts[row] * passed_s
        known = [sum(map(float.__mul__, line, size)) for line in covariance]
        variance = sum(map(float.__mul__, known, size)) + (NOISE * seconds) ** 2
        surprise = (seconds - sum(map(float.__mul__, prices, size))) / variance
        for row, line in enumerate(covariance):
            prices[row] += known[row] * surprise
            for at, other in enumerate(known):
                line[at] -= known[row] / variance * other

    def predict(self, size: Sequence[float]) -> float:
        """Returns the seconds that a step of some size takes; 0 before any was measured."""
        seconds = 0.0  # no generator: this is computed for many ways at once
        for price, each in zip(self.prices, size, strict=True):
            if price > 0.0:
                seconds += price * each
        return seconds


class RecentMean:
    """Mean of what was measured lately, and how much that weighs."""

    def __init__(self) -> None:
        """Knows nothing."""
        self.value, self._weight, self._at = 0.0, 0.0, 0.0

    def add(self, value: float, weight: float, now: float, most: float) -> None:
        """Adds a value. All weigh `most` together at most."""
        weight = min(weight, most)
        total = self.weight(now) + weight
        self._weight, self._at = total if total < most else most, now
        if total > 0.0:
            self.value += weight * (value - self.value) / self._weight

    def weight(self, now: float) -> float:
        """Returns what all values weigh by a time."""
        passed_s = now - self._at
        return self._weight if passed_s < 1.0 else self._weight * math.exp(-passed_s / REMEMBERED_S)

    def drawn_to(self, expected: float, trust: float, now: float) -> float:
        """Returns the mean, drawn to what is expected by a weight."""
        weight = self.weight(now)
        return (weight * self.value + trust * expected) / (weight + trust)
