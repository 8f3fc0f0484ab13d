"""How long a drafter usually takes, so that one that is slow can be told from one that is lost."""

LEAST_PATIENCE_S = 0.1
"""A drafter is never hurried sooner: what a busy machine can take away from it at any time."""


class RoundTripEstimate:
    """A running estimate of the time from asking for a block to its verdict, and of its spread.

    The verifier's time is part of it, as it is part of the wait that is to be judged. The estimate is the one that TCP
    makes of its round-trip time. Source: RFC 6298.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def learn(self, seconds: float) -> None:
        """Takes the time of one block."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8

    def timeout_s(self, most: float) -> float:
        """Returns how long a block may take before the drafter is asked to send what it has, at most `most`."""
        if self._mean_s is None:
            return most
        return min(most, max(LEAST_PATIENCE_S, 2.0 * self._mean_s + 4.0 * self._deviation_s))
