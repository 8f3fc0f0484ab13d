"""What the metrics of all services have in common. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Iterable, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import Metric

from draftwire.runtime.histogram import Histogram, Tally

PREFIX = "draftwire:"
ENGINE = "0"
"""What the label `engine` says: a process has one. Processes are told apart by the labels of whoever reads them."""
SECONDS = tuple(10.0 ** (power / 4) for power in range(-16, 5))
"""Buckets of durations within a round, 0.1 ms to 10 s: four in each power of ten."""
LONG_SECONDS = tuple(10.0 ** (power / 4) for power in range(-12, 11))
"""Buckets of what a user waits for, 1 ms to 316 s: four in each power of ten."""


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
        """Yields the registry's series with the labels, for `/metrics`."""
        for family in self.registry.collect():
            samples, family.samples = family.samples, []
            if self.model_name is not None:
                labels = {"model_name": self.model_name, "engine": ENGINE}
                family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in samples]
            yield family
