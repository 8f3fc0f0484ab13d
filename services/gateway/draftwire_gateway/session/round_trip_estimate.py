"""Estimate of a drafter's block time, to distinguish a slow drafter from a lost one."""

LEAST_TIMEOUT_S = 0.1
"""Least timeout of a block: delays of this size occur on any busy machine."""


class RoundTripEstimate:
    """A running estimate of the time from the request of a block to its verdict, and of its deviation.

    Includes the verifier's time, as does the wait that it is compared with. The estimator is TCP's for round-trip
    times. Source: RFC 6298.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def add(self, seconds: float) -> None:
        """Adds the time of one block."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8

    def timeout_s(self, most: float) -> float:
        """Returns how long a block may take before the drafter is asked for its partial block; at most `most`."""
        if self._mean_s is None:
            return most
        return min(most, max(LEAST_TIMEOUT_S, 2.0 * self._mean_s + 4.0 * self._deviation_s))
