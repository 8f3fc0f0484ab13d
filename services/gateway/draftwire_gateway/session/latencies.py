"""Latencies of requests: time to first token, inter-token latency, end-to-end latency."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.runtime.histogram import Tally


class LatencyTallies(Protocol):
    """Histograms of latencies, seconds."""

    time_to_first_token_s: Tally
    inter_token_latency_s: Tally
    e2e_request_latency_s: Tally


@dataclass(slots=True)
class Latencies:
    """Measures the choices of one request, from when its prompts were tokenised. The tokens of a round arrive together,
    so the time since the round before is divided equally among them: each counts as one value.
    """

    tallies: LatencyTallies
    clock: Callable[[], float] = time.perf_counter
    _began_at: float = field(init=False)
    _last_at: dict[int, float] = field(default_factory=dict)
    """Time of the last tokens of each choice."""

    def __post_init__(self) -> None:
        self._began_at = self.clock()

    def count_tokens(self, choice: int, num_tokens: int) -> None:
        """Observes the latency of new tokens of a choice."""
        if not num_tokens:
            return
        now, last = self.clock(), self._last_at.get(choice)
        self._last_at[choice] = now
        if last is None:
            self.tallies.time_to_first_token_s.observe(now - self._began_at)
        else:
            self.tallies.inter_token_latency_s.observe((now - last) / num_tokens, num_tokens)

    def count_end(self) -> None:
        """Observes the latency of a complete choice."""
        self.tallies.e2e_request_latency_s.observe(self.clock() - self._began_at)
