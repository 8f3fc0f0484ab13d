"""Prometheus metrics of the services. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftwire.rounds import Verdict

PREFIX = "draftwire:"


class ServiceMetrics:
    """A registry of its own, so that two services can live in one test process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        """Registers a counter."""
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def serve(self, port: int, host: str) -> int:
        """Serves `/metrics` on a thread and returns the port."""
        server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)


class VerifierMetrics(ServiceMetrics):
    """What a verifier counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_received = self.counter("blocks_received", "Draft blocks that drafters sent to this verifier.")
        self.blocks_refused = self.counter("blocks_refused", "Draft blocks that broke the protocol.")
        self.target_passes = self.counter("target_passes", "Rounds decided: forward passes of the target per session.")
        self.tokens = self.counter("generation_tokens", "Tokens committed by rounds.")
        self.drafts = self.counter("spec_decode_num_drafts", "Rounds that judged a draft block.")
        self.draft_tokens = self.counter("spec_decode_num_draft_tokens", "Draft tokens judged.")
        self.accepted = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the block.", ("position",)
        )

    def count(self, verdict: Verdict) -> None:
        """Counts one decided round."""
        self.target_passes.inc()
        self.tokens.inc(len(verdict.token_ids))
        if verdict.num_draft_tokens:
            self.drafts.inc()
            self.draft_tokens.inc(verdict.num_draft_tokens)
            self.accepted.inc(verdict.num_accepted_tokens)
            for position in range(verdict.num_accepted_tokens):
                self.accepted_per_position.labels(position).inc()

    def watch(self, num_sessions: Callable[[], int], dropped: Mapping[str, int]) -> None:
        """Exports numbers that the service keeps itself."""
        self.registry.register(_Watcher(num_sessions, dropped))


class DrafterMetrics(ServiceMetrics):
    """What a drafter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_sent = self.counter("blocks_sent", "Draft blocks sent to verifiers.")
        self.draft_tokens = self.counter("draft_tokens_sent", "Draft tokens sent to verifiers.")

    def watch(self, num_sessions: Callable[[], int], dropped: Mapping[str, int]) -> None:
        """Exports numbers that the service keeps itself."""
        self.registry.register(_Watcher(num_sessions, dropped))


class GatewayMetrics(ServiceMetrics):
    """What a gateway counts."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("requests", "Requests ended, by result.", ("result",))
        self.drafters_lost = self.counter("drafters_lost", "Sessions that went on without their drafter.")


class _Watcher:
    """Reads a service's own numbers whenever `/metrics` is read."""

    def __init__(self, num_sessions: Callable[[], int], dropped: Mapping[str, int]) -> None:
        self._num_sessions, self._dropped = num_sessions, dropped

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        yield GaugeMetricFamily(PREFIX + "num_sessions", "Open sessions.", value=self._num_sessions())
        dropped = CounterMetricFamily(PREFIX + "messages_dropped", "Messages without effect.", labels=["reason"])
        for reason, count in sorted(self._dropped.items()):
            dropped.add_metric([reason], count)
        yield dropped
