"""What users wait for: the first token, each further one, and the end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.runtime.histogram import Tally


class LatencyTallies(Protocol):
    """Where waiting is counted, seconds."""

    time_to_first_token_s: Tally
    inter_token_latency_s: Tally
    e2e_request_latency_s: Tally


@dataclass(slots=True)
class Latencies:
    """Times the choices of one request, from when it was taken on. All that a round brings comes at once, so the time
    since the round before is shared equally among its tokens: each counts as one value.
    """

    tallies: LatencyTallies
    clock: Callable[[], float] = time.perf_counter
    _began_at: float = field(init=False)
    _last_at: dict[int, float] = field(default_factory=dict)
    """When the last tokens of each choice came."""

    def __post_init__(self) -> None:
        self._began_at = self.clock()

    def count_tokens(self, choice: int, num_tokens: int) -> None:
        """Notes that tokens of a choice have come."""
        if not num_tokens:
            return
        now, last = self.clock(), self._last_at.get(choice)
        self._last_at[choice] = now
        if last is None:
            self.tallies.time_to_first_token_s.observe(now - self._began_at)
        else:
            self.tallies.inter_token_latency_s.observe((now - last) / num_tokens, num_tokens)

    def count_end(self) -> None:
        """Notes that a choice is complete."""
        self.tallies.e2e_request_latency_s.observe(self.clock() - self._began_at)
