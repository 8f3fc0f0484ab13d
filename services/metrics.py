"""Prometheus metrics of the services. Names after the prefix are those that dashboards read from vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftwire.audit import AuditSums, DrafterAudit
from draftwire.rounds import Verdict
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


class Audited(Protocol):
    """What is known of one drafter."""

    @property
    def id(self) -> int:
        """Names its process."""

    @property
    def model_name(self) -> str:
        """Its model."""

    @property
    def audit(self) -> DrafterAudit:
        """How honest it is."""


class VerifierMetrics(EngineMetrics):
    """What a verifier counts."""

    def __init__(self, drafters: Iterable[Audited] = ()) -> None:
        super().__init__()
        self._num_draft_bytes = self._num_tokens = 0
        self.blocks_received = self.counter("blocks_received", "Draft blocks that drafters sent to this verifier.")
        self.blocks_refused = self.counter("blocks_refused", "Draft blocks that broke the protocol.", ("violation",))
        self.draft_bytes = self.counter(
            "spec_decode_num_draft_bytes",
            "Bytes of the messages with draft blocks, heads of HTTP/2 frames included.",
        )
        bytes_per_token = Gauge(
            PREFIX + "draft_bytes_per_emitted_token",
            "The same for each token that rounds committed, since the start.",
            registry=self.registry,
        )
        bytes_per_token.set_function(lambda: self._num_draft_bytes / max(1, self._num_tokens))
        self.registry.register(_AuditWatcher(drafters))
        self.target_passes = self.counter("target_passes", "Rounds decided: forward passes of the target per session.")
        self.tokens = self.counter("generation_tokens", "Tokens committed by rounds.")
        self.drafts = self.counter("spec_decode_num_drafts", "Rounds that judged a draft block.")
        self.draft_tokens = self.counter("spec_decode_num_draft_tokens", "Draft tokens judged.")
        self.accepted = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.near_ties = self.counter("near_ties", "Tokens that rounding could have changed, under the rule coupled.")
        self.drafted_per_position = self.counter(
            "spec_decode_num_draft_tokens_per_pos", "Draft tokens judged, by position in the block.", ("position",)
        )
        self.accepted_per_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the block.", ("position",)
        )

    def count_bytes(self, count: int) -> None:
        """Counts what carried draft blocks."""
        self._num_draft_bytes += count
        self.draft_bytes.inc(count)

    def count(self, verdict: Verdict) -> None:
        """Counts one decided round."""
        self.target_passes.inc()
        self._num_tokens += len(verdict.token_ids)
        self.tokens.inc(len(verdict.token_ids))
        self.near_ties.inc(verdict.num_near_ties)
        if verdict.num_draft_tokens:
            self.drafts.inc()
            self.draft_tokens.inc(verdict.num_draft_tokens)
            self.accepted.inc(verdict.num_accepted_tokens)
            for position in range(verdict.num_draft_tokens):
                self.drafted_per_position.labels(position).inc()
            for position in range(verdict.num_accepted_tokens):
                self.accepted_per_position.labels(position).inc()


class DraftTimes(Protocol):
    """What a step of a drafter took."""

    @property
    def num_read(self) -> int:
        """Tokens that were read before drafting."""

    @property
    def calibration_s(self) -> float:
        """How long that took, seconds."""

    @property
    def draft_s(self) -> float:
        """How long drafting took, seconds."""

    @property
    def num_passes(self) -> int:
        """Forward passes that it took."""


class DrafterMetrics(EngineMetrics):
    """What a drafter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_sent = self.counter("blocks_sent", "Draft blocks sent to verifiers.")
        self.draft_tokens = self.counter("draft_tokens_sent", "Draft tokens sent to verifiers.")
        self.calibration_s = self.histogram(
            "calibration_seconds",
            "Reading what was committed since the last block, for all sessions of a step; exact unless bonus "
            "calibration is off. Steps that read prompts are left out. On a GPU, the time of sending the work.",
        )
        self.draft_pass_s = self.histogram(
            "draft_pass_seconds",
            "What drafting took in a step, over its forward passes for drafted tokens: with each, the drawing of a "
            "token, and once the first draw and the encoding of blocks. On a GPU also what is left of calibration.",
        )

    def time(self, result: DraftTimes, reads_prompts: bool) -> None:
        """Notes how long the parts of a step took."""
        if result.num_read and not reads_prompts:
            self.calibration_s.observe(result.calibration_s)
        if result.num_passes:
            self.draft_pass_s.observe(result.draft_s / result.num_passes)


class GatewayMetrics(ServiceMetrics):
    """What a gateway counts."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("requests", "Requests ended, by result.", ("result",))
        self.lossy_requests = self.counter(
            "lossy_requests", "Requests ended that asked for a rule that changes the distribution.", ("method",)
        )
        self.drafters_lost = self.counter("drafters_lost", "Times that a session went on without its drafter.")
        self.verifiers_lost = self.counter("verifiers_lost", "Times that a session lost its verifier.")


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


class _AuditWatcher:
    """Reads the audit's own numbers whenever `/metrics` is read."""

    def __init__(self, drafters: Iterable[Audited]) -> None:
        self._drafters = drafters

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        labels = ["drafter", "model_name"]
        tokens = GaugeMetricFamily(
            PREFIX + "audit_draft_tokens", "Draft tokens that the audit has seen.", labels=[*labels, "span"]
        )
        sums = GaugeMetricFamily(
            PREFIX + "audit_sum",
            "Sum over draft tokens of acceptance, or surprise in nats, less its mean; near 0 for an honest drafter.",
            labels=[*labels, "span", "statistic"],
        )
        variances = GaugeMetricFamily(
            PREFIX + "audit_variance",
            "Variance of that sum, if tokens are drawn as declared.",
            labels=[*labels, "span", "statistic"],
        )
        evidence = GaugeMetricFamily(
            PREFIX + "audit_evidence", "Powers of ten of evidence against the drafter; quarantine at 0.", labels=labels
        )
        quarantined = GaugeMetricFamily(
            PREFIX + "drafter_quarantined", "1 if blocks of the drafter are refused.", labels=labels
        )
        for drafter in self._drafters:
            names = [f"{drafter.id:016x}", drafter.model_name]
            audit = drafter.audit
            spans: dict[str, AuditSums] = {"total": audit.total, "recent": audit.recent}
            for span, own in spans.items():
                tokens.add_metric([*names, span], own.num_positions)
                sums.add_metric([*names, span, "acceptance"], own.acceptance_sum)
                sums.add_metric([*names, span, "surprise"], own.surprise_sum)
                variances.add_metric([*names, span, "acceptance"], own.acceptance_variance)
                variances.add_metric([*names, span, "surprise"], own.surprise_variance)
            evidence.add_metric(names, audit.evidence)
            quarantined.add_metric(names, float(audit.alarm is not None))
        yield from (tokens, sums, variances, evidence, quarantined)
