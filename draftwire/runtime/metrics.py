"""What the metrics of all services have in common. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwire.engine.admission import Room
from draftwire.errors import NoRoomError
from draftwire.runtime.histogram import Histogram, Tally

PREFIX = "draftwire:"
ENGINE = "0"
"""What the label `engine` says: a process has one. Processes are told apart by the labels of whoever reads them."""
SECONDS = tuple(10.0 ** (power / 4) for power in range(-16, 5))
"""Buckets of durations within a round, 0.1 ms to 10 s: four in each power of ten."""
LONG_SECONDS = tuple(10.0 ** (power / 4) for power in range(-12, 11))
"""Buckets of what a user waits for, 1 ms to 316 s: four in each power of ten."""
DROPPED = ("stale", "unknown_session", "other_lease")
"""Reasons why messages have no effect; a verifier knows more. There from the start: growth is seen from 0 on."""
COUNTS = tuple(float(2**power) for power in range(11))
"""Buckets of small numbers, 1 to 1,024."""


class Session(Protocol):
    """What a scheduler knows of a session."""

    @property
    def committed(self) -> Any:
        """Its tokens."""

    @property
    def num_unread(self) -> int:
        """How many of them the model has not read."""


class Scheduled(Protocol):
    """What a scheduler counts itself."""

    @property
    def sessions(self) -> Mapping[Any, Session]:
        """The open ones."""

    @property
    def dropped(self) -> dict[str, int]:
        """Messages that had no effect, by reason."""

    @property
    def prefix_tokens(self) -> Mapping[str, int]:
        """Tokens "queried" and "reused"."""

    @property
    def room(self) -> Room:
        """What is reserved."""


class ServiceMetrics:
    """A registry of its own, so that two services can live in one test process.

    Metrics whose names dashboards know from vLLM have the labels that they have there, `model_name` and `engine`, and
    are there once the model is known. See docs/metrics.md.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}
        """Names of the labels that metrics have of their own, by the metrics' names."""
        self.of_model = OfModel()
        self.registry.register(self.of_model)
        self.startup_s = Gauge(
            PREFIX + "startup_seconds",
            "From the start of the process until it served.",
            registry=self.registry,
        )
        self._server: WSGIServer | None = None

    def counter(
        self, name: str, documentation: str, labels: tuple[str, ...] = (), *, of_model: bool = False
    ) -> Counter:
        """Registers a counter; with `of_model`, one that vLLM knows."""
        self.labels[PREFIX + name] = labels
        registry = self.of_model.registry if of_model else self.registry
        return Counter(PREFIX + name, documentation, labels, registry=registry)

    def histogram(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float] = SECONDS,
        labels: tuple[str, ...] = (),
        *,
        of_model: bool = False,
    ) -> Histogram:
        """Registers a histogram, by default of durations in seconds; with `of_model`, one that vLLM knows."""
        self.labels[PREFIX + name] = labels
        histogram = Histogram(PREFIX + name, documentation, bounds, labels)
        (self.of_model.registry if of_model else self.registry).register(histogram)
        return histogram

    def tally(
        self, name: str, documentation: str, bounds: Sequence[float] = SECONDS, *, of_model: bool = False
    ) -> Tally:
        """Registers a histogram without labels."""
        return self.histogram(name, documentation, bounds, of_model=of_model).labels()

    def serve(self, port: int, host: str) -> int:
        """Serves `/metrics` on a thread and returns the port.

        Always in Prometheus's text format: in OpenMetrics, names could not have colons and would be others.
        """
        server, _ = start_http_server(port, host, self.registry)
        answer = server.get_app()
        assert answer is not None, "the library has just set it"
        server.set_app(lambda environ, start: answer({**environ, "HTTP_ACCEPT": ""}, start))
        self._server = server
        return int(server.server_port)

    def stop_serving(self) -> None:
        """Ends `serve`, if it was called."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class OfModel:
    """Adds the labels `model_name` and `engine` to what a registry of its own collects."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name: str | None = None
        """As long as it is None, there are no series."""

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        for family in self.registry.collect():
            samples, family.samples = family.samples, []
            if self.model_name is not None:
                labels = {"model_name": self.model_name, "engine": ENGINE}
                family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in samples]
            yield family


class EngineMetrics(ServiceMetrics):
    """What a service with an engine counts."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = self.counter("engine_steps", "Steps of the engine; each serves all sessions that are ready.")
        self._busy_s = self.counter("engine_busy_seconds", "Time in steps: its rate is the share that is busy.")
        self._step_s = self.tally("engine_step_seconds", "Time of a step; those that read prompts are the long ones.")
        self._step_sessions = self.tally("engine_step_sessions", "Sessions that a step served.", COUNTS)
        self.sessions_refused = self.counter(
            "sessions_refused", "Sessions that found no room: too many were open, or the KV cache was reserved."
        )

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a session for which there is no room."""
        try:
            yield
        except NoRoomError:
            self.sessions_refused.inc()
            raise

    def count_step(self, num_sessions: int, seconds: float) -> None:
        """Counts a step of the engine."""
        self._steps.inc()
        self._busy_s.inc(seconds)
        self._step_s.observe(seconds)
        self._step_sessions.observe(num_sessions)

    def watch(self, scheduler: Scheduled, model_name: str) -> None:
        """Exports the numbers that a scheduler keeps itself.

        Args:
            scheduler: who keeps them.
            model_name: of the model that is loaded now.
        """
        self.of_model.model_name = model_name
        self.registry.register(_Watcher(scheduler))
        self.of_model.registry.register(_CacheWatcher(scheduler))


class _Watcher(Collector):
    """Reads a scheduler's own numbers whenever `/metrics` is read."""

    def __init__(self, scheduler: Scheduled) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        scheduler = self._scheduler
        sessions = list(scheduler.sessions.values())
        yield GaugeMetricFamily(PREFIX + "num_sessions", "Open sessions.", value=len(sessions))
        dropped = CounterMetricFamily(
            PREFIX + "messages_dropped",
            "Messages without effect, by why: stale ones, say, or of sessions that are closed.",
            labels=["reason"],
        )
        for reason, count in sorted((dict.fromkeys(DROPPED, 0) | scheduler.dropped).items()):
            dropped.add_metric([reason], count)
        yield dropped
        room = scheduler.room
        used = sum(len(session.committed) - session.num_unread for session in sessions)
        for name, documentation, value in (
            ("size", "Tokens that the KV cache has room for.", room.size),
            ("reserved", "Tokens of the KV cache that open sessions may come to use.", room.num_reserved),
            ("used", "Tokens that the model has read of the open sessions, each counted where several share it.", used),
        ):
            yield GaugeMetricFamily(f"{PREFIX}kv_cache_{name}_tokens", documentation, value=value)


class _CacheWatcher(Collector):
    """Reads those of a scheduler's numbers that vLLM has names for."""

    def __init__(self, scheduler: Scheduled) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        scheduler = self._scheduler
        yield GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "Share of the KV cache that is reserved, 0 to 1.", scheduler.room.usage
        )
        for name, key, documentation in (
            ("prefix_cache_queries", "queried", "Tokens that sessions were opened with."),
            ("prefix_cache_hits", "reused", "Tokens of these that did not have to be read, as another session had."),
        ):
            yield CounterMetricFamily(PREFIX + name, documentation, scheduler.prefix_tokens.get(key, 0))
