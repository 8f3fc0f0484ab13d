"""When an interrupted completion is tried again."""

import time

from draftwire.errors import DraftwireError, NoRoomError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between attempts; doubled from one to the next."""

LONGEST_SECONDS = 1e9
"""Some 31 years. gRPC takes a deadline that does not fit into 2**63 nanoseconds for one that has passed."""

NOT_BEGUN_SECONDS = 5.0
"""How long a completion that has not begun is tried where there are several gateways: they may be restarted in turn."""


def seconds_until(deadline: float) -> float:
    """Returns how long a call may take that ends by a time of the monotonic clock, infinity allowed."""
    return min(max(0.0, deadline - time.monotonic()), LONGEST_SECONDS)


class RetryPolicy:
    """How long a completion is tried again: one that has begun until nothing came for `seconds`, one that has not for a
    few seconds, and not at all where there is one gateway. Gateways that are full are asked once each for a new one.

    It only says how long to wait; who waits is the caller.
    """

    def __init__(self, num_gateways: int, seconds: float, timeout_s: float | None) -> None:
        """Prepares.

        Args:
            num_gateways: how many there are to try.
            seconds: how long one that has begun is tried.
            timeout_s: how long all of it may take, from `begin` on.
        """
        self._num_gateways = num_gateways
        self._tries_left = num_gateways - 1
        self._seconds = seconds
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._has_begun = False
        self._until: float | None = None
        self._pause_s = 0.0

    def begin(self) -> None:
        """Time runs from now on."""
        self._deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None if there is none."""
        return None if self._deadline is None else seconds_until(self._deadline)

    def renew(self) -> None:
        """Something came."""
        self._has_begun, self._until, self._pause_s = True, None, 0.0

    def pause_after(self, refusal: DraftwireError) -> float | None:
        """Returns how many seconds to wait before the next attempt; None if it is not worth it any more."""
        now = time.monotonic()
        if not self._has_begun:
            self._tries_left -= 1
            if self._num_gateways == 1 or (isinstance(refusal, NoRoomError) and self._tries_left < 0):
                return None
        if self._until is None:
            self._until = now + (self._seconds if self._has_begun else min(self._seconds, NOT_BEGUN_SECONDS))
        if isinstance(refusal, NoRoomError) and self._has_begun:
            self._pause_s = max(self._pause_s, refusal.retry_after_s)
        if now + self._pause_s >= min(self._until, self._deadline or self._until):
            return None
        pause_s, self._pause_s = self._pause_s, min(max(FIRST_PAUSE_S, 2.0 * self._pause_s), LONGEST_PAUSE_S)
        return pause_s
