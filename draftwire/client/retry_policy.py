"""Decides when an interrupted completion is retried."""

import time

from draftwire.errors import DraftwireError, NoRoomError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses between attempts; each is twice the one before."""

LONGEST_SECONDS = 1e9
"""About 31 years. gRPC treats a deadline that does not fit into 2**63 nanoseconds as passed."""

NOT_BEGUN_SECONDS = 5.0
"""How long a completion that has not begun is retried with several gateways, which may be restarted in turn."""


def seconds_until(deadline: float) -> float:
    """Returns the timeout of a call that must end by a time of the monotonic clock, which may be infinity."""
    return min(max(0.0, deadline - time.monotonic()), LONGEST_SECONDS)


class RetryPolicy:
    """Decides whether and when an interrupted completion is retried.

    A completion that has begun is retried until `seconds` pass without progress. One that has not begun is retried for
    `NOT_BEGUN_SECONDS` with several gateways, each full one once. With one address it is sent once more, at once: a
    gateway that has just begun to stop may not have taken it, and others may share the address. Callers do the
    waiting.
    """

    def __init__(self, num_gateways: int, seconds: float, timeout_s: float | None) -> None:
        """Starts without a deadline: `timeout_s`, of the whole request, counts from `begin` on. None is no timeout."""
        self._num_gateways = num_gateways
        self._tries_left = num_gateways - 1
        self._may_repeat = True
        self._seconds = seconds
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._has_begun = False
        self._until: float | None = None
        self._pause_s = 0.0

    def begin(self) -> None:
        """Sets the deadline, counted from now."""
        self._deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None if there is none."""
        return None if self._deadline is None else seconds_until(self._deadline)

    def renew(self) -> None:
        """Records progress: resets retry time and pause."""
        self._has_begun, self._until, self._pause_s = True, None, 0.0

    def pause_after(self, refusal: DraftwireError) -> float | None:
        """Returns how many seconds to wait before the next attempt; None if there is to be none."""
        now = time.monotonic()
        if not self._has_begun:
            self._tries_left -= 1
            if isinstance(refusal, NoRoomError) and self._tries_left < 0:
                return None
            if self._num_gateways == 1:
                may_repeat, self._may_repeat = self._may_repeat, False
                return 0.0 if may_repeat and now < (self._deadline or LONGEST_SECONDS + now) else None
        if self._until is None:
            self._until = now + (self._seconds if self._has_begun else min(self._seconds, NOT_BEGUN_SECONDS))
        if isinstance(refusal, NoRoomError) and self._has_begun:
            self._pause_s = max(self._pause_s, refusal.retry_after_s)
        if now + self._pause_s >= min(self._until, self._deadline or self._until):
            return None
        pause_s, self._pause_s = self._pause_s, min(max(FIRST_PAUSE_S, 2.0 * self._pause_s), LONGEST_PAUSE_S)
        return pause_s
