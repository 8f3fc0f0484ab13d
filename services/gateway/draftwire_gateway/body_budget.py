"""Bounds the memory of all request bodies while they arrive, are parsed, and are made into requests."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftwire.errors import NoRoomError

MAX_BODIES_BYTES = 64 * 2**20
"""Bytes of all bodies together."""
SMALL_BYTES = 64 * 2**10
"""Larger bodies leave a quarter of the budget to those that are no larger, which nearly all requests are."""
PATIENCE_SECONDS = 2.0
"""A body that arrives for longer is given up when others need its room."""

_RETRY_S = 1.0


class BodyBudget:
    """Counts the bytes of all bodies of a gateway. Runs on the event loop."""

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with nothing taken; `clock` returns seconds."""
        self.num_bytes = 0
        """Bytes that are taken."""
        self._most_bytes = most_bytes
        self._clock = clock
        self._of_callers: Counter[str] = Counter()
        self._arriving: dict[BodyShare, float] = {}
        """The bodies that are not complete, and since when they arrive; the oldest first."""

    @contextmanager
    def share(self, caller: str = "") -> Iterator["BodyShare"]:
        """Yields a share of nothing, and gives back at the end whatever was taken for it. One caller takes half of the
        budget at most; the name is empty where callers have none.
        """
        share = BodyShare(self, caller)
        try:
            yield share
        finally:
            share.give_back()

    def _take(self, share: "BodyShare", num_bytes: int) -> None:
        if share.caller and self._of_callers[share.caller] + num_bytes > self._most_bytes // 2:
            raise NoRoomError(f"bodies of {share.caller} take half of the room that there is", _RETRY_S)
        is_small = share.num_bytes + num_bytes <= SMALL_BYTES
        most_bytes = self._most_bytes if is_small else self._most_bytes * 3 // 4
        while self.num_bytes + num_bytes > most_bytes and (late := self._late(share)) is not None:
            late.give_up()
        if self.num_bytes + num_bytes > most_bytes:
            raise NoRoomError("bodies of other requests take all the room that there is; retry in a second", _RETRY_S)
        self._add(share, num_bytes)

    def _add(self, share: "BodyShare", num_bytes: int) -> None:
        """Counts bytes that were taken, or given back if negative."""
        self.num_bytes += num_bytes
        self._of_callers[share.caller] += num_bytes
        share.num_bytes += num_bytes

    def _late(self, newcomer: "BodyShare") -> "BodyShare | None":
        """Returns the body that arrives for longest, if that is too long."""
        late_since = self._clock() - PATIENCE_SECONDS
        return next((one for one, since in self._arriving.items() if since < late_since and one is not newcomer), None)


class BodyShare:
    """Share of a budget that one body holds."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self.caller = caller
        self.num_bytes = 0
        """Bytes that are taken for it."""
        self.is_given_up = False
        self._budget = budget
        self._stop: Callable[[], None] | None = None

    def take(self, num_bytes: int) -> None:
        """Makes the share at least as large; to be called before as much is read.

        Raises:
            NoRoomError: other bodies take too much, or got what this one had.
        """
        if self.is_given_up:
            raise NoRoomError("the body came slowly while others needed its room; retry in a second", _RETRY_S)
        more = num_bytes - self.num_bytes
        if more > 0:
            self._budget._take(self, more)

    def keep(self, num_bytes: int) -> None:
        """Gives back what is taken beyond this."""
        self._budget._add(self, min(0, num_bytes - self.num_bytes))

    def give_back(self) -> None:
        """Gives back all that was taken. May be called again."""
        self.keep(0)

    @contextmanager
    def arriving(self, stop: Callable[[], None]) -> Iterator[None]:
        """Marks the body as incomplete: `stop` is called if it is given up for others, which then have its room."""
        self._stop = stop
        self._budget._arriving[self] = self._budget._clock()
        try:
            yield
        finally:
            self._budget._arriving.pop(self, None)

    def give_up(self) -> None:
        """Ends a body that arrives too slowly while others need the room."""
        assert self._stop is not None, "it arrives"
        self._budget._arriving.pop(self, None)
        self.give_back()
        self.is_given_up = True
        self._stop()
