"""Metrics that all services have in common. Where vLLM has the metric, the name after the prefix is vLLM's."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from draftwire.runtime.histogram import Histogram, Tally
from draftwire.runtime.log_stream import WRITE_ERRORS

PREFIX = "draftwire:"
ENGINE = "0"
"""Value of the label `engine`: a process has one. Labels of the scraper distinguish processes."""
SECONDS = tuple(10.0 ** (power / 4) for power in range(-16, 5))
"""Histogram buckets of durations within a round, 0.1 ms to 10 s: four for each power of ten."""
LONG_SECONDS = tuple(10.0 ** (power / 4) for power in range(-12, 11))
"""Histogram buckets of user-visible latencies, 1 ms to 316 s: four for each power of ten."""


class ServiceMetrics:
    """Metrics of one service, in a registry of its own, so that several services can run in one process.

    Metrics that exist in vLLM have its labels, `model_name` and `engine`, and are exported once the model is known. See
    docs/metrics.md.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}
        """Label names of each metric, without those of the model, by the metric's name."""
        self.of_model = OfModel()
        self.registry.register(self.of_model)
        self.startup_s = Gauge(
            PREFIX + "startup_seconds",
            "From the start of the process until it served.",
            registry=self.registry,
        )
        self.grpc_requests = self.counter(
            "grpc_requests", "Calls over gRPC ended, by method and status.", ("method", "code")
        )
        self.registry.register(_LogCollector())
        ProcessCollector(registry=self.registry)

    def count_call(self, method: str, code: str) -> None:
        """Counts a gRPC call that has ended, under its status and the name of its method without the package."""
        self.grpc_requests.labels(method.rpartition(".")[2], code).inc()

    def watch_certificates(self, expiries: Callable[[], Mapping[str, float]]) -> None:
        """Exports when the certificates of each option expire, seconds since 1970. Asks at each scrape, on a thread."""
        self.registry.register(_CertificateCollector(expiries))

    def counter(
        self, name: str, documentation: str, labels: tuple[str, ...] = (), *, of_model: bool = False
    ) -> Counter:
        """Registers a counter; `of_model` adds the labels of metrics that exist in vLLM."""
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
        """Registers a histogram, by default of durations in seconds; `of_model` as for `counter`."""
        self.labels[PREFIX + name] = labels
        histogram = Histogram(PREFIX + name, documentation, bounds, labels)
        (self.of_model.registry if of_model else self.registry).register(histogram)
        return histogram

    def tally(
        self, name: str, documentation: str, bounds: Sequence[float] = SECONDS, *, of_model: bool = False
    ) -> Tally:
        """Registers a histogram without labels."""
        return self.histogram(name, documentation, bounds, of_model=of_model).labels()


class OfModel:
    """Collector that adds the labels `model_name` and `engine` to the metrics of its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name: str | None = None
        """Value of the label; while it is None, no series are exported."""

    def collect(self) -> Iterable[Metric]:
        """Yields the registry's metric families with the labels added, for `/metrics`."""
        for family in self.registry.collect():
            samples, family.samples = family.samples, []
            if self.model_name is not None:
                labels = {"model_name": self.model_name, "engine": ENGINE}
                family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in samples]
            yield family


class _LogCollector(Collector):
    """Reads at each scrape what the process could not log: the log cannot say so."""

    @override
    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            PREFIX + "log_write_errors",
            "Lines of the log that were lost because standard error could not be written, as on a full disk.",
            WRITE_ERRORS.count,
        )


class _CertificateCollector(Collector):
    """Collects the expiries of certificates at each scrape of `/metrics`."""

    def __init__(self, expiries: Callable[[], Mapping[str, float]]) -> None:
        self._expiries = expiries

    @override
    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            PREFIX + "certificate_expiry_timestamp_seconds",
            "When the certificates of a file expire: of tls_cert the first of the chain, of tls_ca the last issuer.",
            labels=["option"],
        )
        for option, expiry in self._expiries().items():
            family.add_metric([option], expiry)
        yield family
