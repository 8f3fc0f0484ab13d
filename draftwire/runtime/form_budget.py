"""How much a caller makes others compile: CPU time of its forms, as a token bucket."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from draftwire.errors import NoRoomError

FULL_S = 10.0
"""CPU seconds that a caller may spend at once."""
REFILL_S = 60.0
"""In which an empty budget is full again, seconds."""
CHEAP_S = 0.02
"""CPU seconds of a form that are free when its cost is known already: others do not notice them."""
MAX_CALLERS = 10_000
"""Callers that are remembered. Beyond, those whose budgets are nearest to full are forgotten."""


@dataclass(slots=True)
class _Spent:
    seconds: float
    at: float


class FormBudget:
    """Budgets of callers, by name. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """All budgets are full.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._spent: dict[str, _Spent] = {}

    def charge(self, caller: str, cpu_s: float) -> None:
        """Takes CPU seconds out of a caller's budget, below zero if needed."""
        spent = max(0.0, self._spent_s(caller)) + cpu_s
        self._spent[caller] = _Spent(spent, self._clock())
        if len(self._spent) > MAX_CALLERS:
            least = min(self._spent, key=self._spent_s)
            del self._spent[least]

    def check(self, caller: str) -> None:
        """Refuses a caller whose budget is used up.

        Raises:
            NoRoomError: it is; the error holds when to retry.
        """
        over_s = self._spent_s(caller) - FULL_S
        if over_s >= 0.0:
            wait_s = max(1.0, over_s * REFILL_S / FULL_S)
            budget = f"{FULL_S:g} s of CPU time a minute for a caller's forms"
            raise NoRoomError(f"structured_output: {budget} are used up; retry in {wait_s:.1f} s", wait_s)

    def _spent_s(self, caller: str) -> float:
        spent = self._spent.get(caller)
        return 0.0 if spent is None else spent.seconds - (self._clock() - spent.at) * FULL_S / REFILL_S
