"""How much a caller makes others compile: CPU time of its forms, as a token bucket."""

import time
from collections.abc import Callable

from draftwire.errors import NoRoomError

FULL_S = 10.0
"""CPU seconds that a caller may spend at once."""
REFILL_S = 60.0
"""Seconds in which an empty budget is full again."""
CHEAP_S = 0.02
"""CPU seconds of a form that are free when its cost is known already: others do not notice them."""
MAX_CALLERS = 10_000
"""Callers that are remembered. Beyond, those whose budgets are full are forgotten, or else the one nearest to it."""

_S_PER_CPU_S = REFILL_S / FULL_S
"""Seconds in which a CPU second is refilled."""


class FormBudget:
    """Budgets of callers, by name. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}
        """Times at which the budgets are full again that were not when they were last charged."""

    def charge(self, caller: str, cpu_s: float) -> None:
        """Takes CPU seconds out of a caller's budget, below zero if needed."""
        if cpu_s <= 0.0:
            return
        now = self._clock()
        self._full_at[caller] = max(now, self._full_at.get(caller, now)) + cpu_s * _S_PER_CPU_S
        if len(self._full_at) > MAX_CALLERS:
            self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
        if len(self._full_at) > MAX_CALLERS:
            del self._full_at[min(self._full_at, key=self._full_at.__getitem__)]

    def check(self, caller: str) -> None:
        """Refuses a caller whose budget is used up.

        Raises:
            NoRoomError: it is; the error holds when to retry.
        """
        now = self._clock()
        over_s = self._full_at.get(caller, now) - now - REFILL_S
        if over_s >= 0.0:
            wait_s = max(1.0, over_s)
            budget = f"{FULL_S:g} s of CPU time a minute for a caller's forms"
            raise NoRoomError(f"structured_output: {budget} are used up; retry in {wait_s:.1f} s", wait_s)
