"""Prometheus metrics of a gateway."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftwire.services.gateway.round_times import RoundTimes
from draftwire.services.metrics import PREFIX, ServiceMetrics


class Synced(Protocol):
    """How well something is known that others decide."""

    @property
    def num_failures(self) -> int:
        """Times that they could not be asked."""

    @property
    def synced_at(self) -> float | None:
        """When it was last known to be true, by `time.monotonic`."""


class PeersOfOneRole(Protocol):
    """The services of one kind that a gateway knows."""

    @property
    def role(self) -> str:
        """Names the kind."""

    @property
    def status(self) -> Synced:
        """How well they are known."""

    def num_by_state(self) -> Mapping[str, int]:
        """Returns how many are in which state."""


class GatewayMetrics(ServiceMetrics):
    """What a gateway counts."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("requests", "Choices of requests ended, by result.", ("result",))
        self.lossy_requests = self.counter(
            "lossy_requests",
            "Choices of requests ended that asked for a rule that changes the distribution.",
            ("method",),
        )
        self.drafters_lost = self.counter("drafters_lost", "Times that a session went on without its drafter.")
        self.verifiers_lost = self.counter("verifiers_lost", "Times that a session lost its verifier.")
        self.rounds = self.counter("rounds", "Rounds committed, and why those without a draft are.", ("kind", "reason"))

    def observe_round(self, times: RoundTimes) -> None:
        """Counts a committed round; see `RoundObserver`."""
        why = times.why_plain
        kind, reason = ("speculative", "") if why is None else ("plain", why.value)
        self.rounds.labels(kind, reason).inc()

    def watch(self, peers: Iterable[PeersOfOneRole]) -> None:
        """Exports what is known of the other services."""
        self.registry.register(_PeerWatcher(tuple(peers)))


class _PeerWatcher:
    """Counts verifiers and drafters whenever `/metrics` is read."""

    def __init__(self, peers: Sequence[PeersOfOneRole]) -> None:
        self._peers = peers

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        known = GaugeMetricFamily(
            PREFIX + "num_peers", "Verifiers and drafters that this gateway knows, by state.", labels=["role", "state"]
        )
        failures = CounterMetricFamily(
            PREFIX + "discovery_failures", "Times that nobody could say where these services are.", labels=["role"]
        )
        age = GaugeMetricFamily(
            PREFIX + "discovery_age_seconds", "For how long what is known of these may be out of date.", labels=["role"]
        )
        for peers in self._peers:
            for state, count in peers.num_by_state().items():
                known.add_metric([peers.role, state], count)
            failures.add_metric([peers.role], peers.status.num_failures)
            if peers.status.synced_at is not None:
                age.add_metric([peers.role], time.monotonic() - peers.status.synced_at)
        yield from (known, failures, age)
