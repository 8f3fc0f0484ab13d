"""Estimate of a drafter's times, to distinguish a slow drafter from one that does not answer."""

LEAST_TIMEOUT_S = 0.1
"""Least timeout of a block: delays of this size occur on any busy machine."""
FIRST_TIMEOUT_S = 1.0
"""Timeout of a block, and of the reply to a flush, before anything is known. Source: RFC 6298, 2.1."""

FLUSH_PASSES = 8
"""Forward passes that a drafter may take, beside a trip, to reply to a flush: it ends its own block after the running
one, but waits for longer blocks of the same step."""
LEAST_FLUSH_S = 0.25
"""Least timeout of that reply."""
LEAST_SENT_S = 1.0
"""Least timeout of the verdict after that reply: the block is on its way, or waits at the verifier."""


class RoundTripEstimate:
    """A running estimate of the time from the request of a block to its verdict, of its deviation, and of a pass.

    The time of a block is a fixed one and that of a pass for each of its tokens: lengths may change with every round.
    Includes the verifier's time, as does the wait that it is compared with. The estimator is TCP's for round-trip
    times. Source: RFC 6298.
    """

    def __init__(self) -> None:
        self._fixed_s: float | None = None
        self._deviation_s = 0.0
        self._pass_s: float | None = None

    def add(self, seconds: float, num_tokens: int, pass_s: float | None = None) -> None:
        """Adds the time of one block, from the request of so many tokens to its verdict, and that of a forward pass of
        the drafter in it, if it is known.
        """
        if pass_s is not None:
            self._pass_s = pass_s if self._pass_s is None else self._pass_s + (pass_s - self._pass_s) / 8
        fixed_s = max(0.0, seconds - num_tokens * (self._pass_s or 0.0))
        if self._fixed_s is None:
            self._fixed_s, self._deviation_s = fixed_s, seconds / 2
            return
        self._deviation_s += (abs(fixed_s - self._fixed_s) - self._deviation_s) / 4
        self._fixed_s += (fixed_s - self._fixed_s) / 8

    def timeout_s(self, num_tokens: int, most: float) -> float:
        """Returns how long a block may take before the drafter is asked for its partial block; at most `most`."""
        mean_s = self._mean_s(num_tokens)
        if mean_s is None:
            return min(most, FIRST_TIMEOUT_S)
        return min(most, max(LEAST_TIMEOUT_S, 2.0 * mean_s + 4.0 * self._deviation_s))

    def flush_timeout_s(self, num_tokens: int, most: float, mask_s: float = 0.0) -> float:
        """Returns how long the drafter may then take to reply, at most `most`: `FLUSH_PASSES` passes, a trip and a
        mask.

        `mask_s` is the longest time of a mask of the text's form; 0 without a form. The token that is being drawn needs
        one, and how long that takes depends on the tokens before it, which must not matter.
        """
        mean_s, wait_s = self._mean_s(num_tokens), FIRST_TIMEOUT_S
        if mean_s is not None:
            wait_s = max(LEAST_FLUSH_S, FLUSH_PASSES * (self._pass_s or 0.0) + mean_s)
        return min(most, wait_s + mask_s)

    def sent_timeout_s(self, num_tokens: int, most: float) -> float:
        """Returns how long the verdict may take after that reply; at most `most`."""
        return min(most, max(LEAST_SENT_S, self.flush_timeout_s(num_tokens, most)))

    def _mean_s(self, num_tokens: int) -> float | None:
        """Returns the mean time of a block, seconds; None before anything is known."""
        return None if self._fixed_s is None else self._fixed_s + num_tokens * (self._pass_s or 0.0)
