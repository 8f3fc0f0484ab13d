"""When an interrupted completion is tried again."""

import time

from draftwire.errors import DraftwireError, NoRoomError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between attempts; doubled from one to the next."""

NOT_BEGUN_SECONDS = 5.0
"""How long a completion that has not begun is tried where there are several gateways: they may be restarted in turn."""


class Patience:
    """How long a completion is tried again: one that has begun until nothing came for `seconds`, one that has not for a
    few seconds, and not at all where there is one gateway. Gateways that are full are asked once each for a new one.
    """

    def __init__(self, num_gateways: int, seconds: float, deadline: float | None) -> None:
        """Starts.

        Args:
            num_gateways: how many there are to try.
            seconds: how long one that has begun is tried.
            deadline: when the completion has to be there, by `time.monotonic`.
        """
        self._num_gateways = num_gateways
        self._tries_left = num_gateways - 1
        self._seconds = seconds
        self._deadline = deadline
        self._has_begun = False
        self._until: float | None = None
        self._pause_s = 0.0

    def renew(self) -> None:
        """Something came."""
        self._has_begun, self._until, self._pause_s = True, None, 0.0

    def wait(self, refusal: DraftwireError) -> bool:
        """Waits until it is time to try again; returns False if it is not worth it any more."""
        now = time.monotonic()
        if not self._has_begun:
            self._tries_left -= 1
            if self._num_gateways == 1 or (isinstance(refusal, NoRoomError) and self._tries_left < 0):
                return False
        if self._until is None:
            self._until = now + (self._seconds if self._has_begun else min(self._seconds, NOT_BEGUN_SECONDS))
        if isinstance(refusal, NoRoomError) and self._has_begun:
            self._pause_s = max(self._pause_s, refusal.retry_after_s)
        if now + self._pause_s >= min(self._until, self._deadline or self._until):
            return False
        time.sleep(self._pause_s)
        self._pause_s = min(max(FIRST_PAUSE_S, 2.0 * self._pause_s), LONGEST_PAUSE_S)
        return True
