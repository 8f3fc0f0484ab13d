"""What the metrics of all services have in common. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftwire.services.admission import Room

PREFIX = "draftwire:"
SECONDS = tuple(10.0 ** (power / 4) for power in range(-16, 1))
"""Buckets of durations, 0.1 ms to 1 s: four in each power of ten."""


class Scheduled(Protocol):
    """What a scheduler counts itself."""

    @property
    def sessions(self) -> Mapping[Any, Any]:
        """The open ones."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that had no effect, by reason."""

    @property
    def prefix_tokens(self) -> Mapping[str, int]:
        """Tokens "queried" and "reused"."""

    @property
    def room(self) -> Room:
        """What is reserved."""


class ServiceMetrics:
    """A registry of its own, so that two services can live in one test process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.startup_s = Gauge(
            PREFIX + "startup_seconds",
            "From the start of the process until it served.",
            registry=self.registry,
        )

    def counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        """Registers a counter."""
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def histogram(self, name: str, documentation: str) -> Histogram:
        """Registers a histogram of durations, seconds."""
        return Histogram(PREFIX + name, documentation, buckets=SECONDS, registry=self.registry)

    def serve(self, port: int, host: str) -> int:
        """Serves `/metrics` on a thread and returns the port."""
        server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)


class EngineMetrics(ServiceMetrics):
    """What a service with an engine counts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.counter("engine_steps", "Steps of the engine; each serves all sessions that are ready.")

    def watch(self, scheduler: Scheduled) -> None:
        """Exports the numbers that a scheduler keeps itself."""
        self.registry.register(_Watcher(scheduler))


class _Watcher:
    """Reads a scheduler's own numbers whenever `/metrics` is read."""

    def __init__(self, scheduler: Scheduled) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        scheduler = self._scheduler
        yield GaugeMetricFamily(PREFIX + "num_sessions", "Open sessions.", value=len(scheduler.sessions))
        dropped = CounterMetricFamily(PREFIX + "messages_dropped", "Messages without effect.", labels=["reason"])
        for reason, count in sorted(scheduler.dropped.items()):
            dropped.add_metric([reason], count)
        yield dropped
        yield GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "Share of the KV cache that is reserved, 0 to 1.", scheduler.room.usage
        )
        for name, key in (("prefix_cache_queries", "queried"), ("prefix_cache_hits", "reused")):
            documentation = f"Prompt tokens of opened sessions: {key}."
            yield CounterMetricFamily(PREFIX + name, documentation, scheduler.prefix_tokens.get(key, 0))
