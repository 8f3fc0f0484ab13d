"""Prometheus metrics of the services. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftwire.rounds import Verdict
from draftwire.services.admission import Room

PREFIX = "draftwire:"


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

    def counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        """Registers a counter."""
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

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


class VerifierMetrics(EngineMetrics):
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
        self.near_ties = self.counter("near_ties", "Tokens that rounding could have changed, under the rule coupled.")
        self.accepted_per_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the block.", ("position",)
        )

    def count(self, verdict: Verdict) -> None:
        """Counts one decided round."""
        self.target_passes.inc()
        self.tokens.inc(len(verdict.token_ids))
        self.near_ties.inc(verdict.num_near_ties)
        if verdict.num_draft_tokens:
            self.drafts.inc()
            self.draft_tokens.inc(verdict.num_draft_tokens)
            self.accepted.inc(verdict.num_accepted_tokens)
            for position in range(verdict.num_accepted_tokens):
                self.accepted_per_position.labels(position).inc()


class DrafterMetrics(EngineMetrics):
    """What a drafter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_sent = self.counter("blocks_sent", "Draft blocks sent to verifiers.")
        self.draft_tokens = self.counter("draft_tokens_sent", "Draft tokens sent to verifiers.")


class GatewayMetrics(ServiceMetrics):
    """What a gateway counts."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("requests", "Requests ended, by result.", ("result",))
        self.lossy_requests = self.counter(
            "lossy_requests", "Requests ended that asked for a rule that changes the distribution.", ("method",)
        )
        self.drafters_lost = self.counter("drafters_lost", "Sessions that went on without their drafter.")


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
