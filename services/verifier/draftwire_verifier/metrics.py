"""Prometheus metrics of a verifier."""

import threading
from collections.abc import Iterable

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from draftwire.audit import AuditSums
from draftwire.engine.engine_metrics import EngineMetrics
from draftwire.errors import Violation
from draftwire.method.rounds import Verdict
from draftwire.options.ahead.held_blocks import HeldFate, HeldTally
from draftwire.runtime.metrics import PREFIX
from draftwire_verifier.draft_waits import DraftWaits
from draftwire_verifier.drafters import Drafter


class VerifierMetrics(EngineMetrics):
    """Metrics of a verifier."""

    def __init__(self, drafters: Iterable[Drafter] = ()) -> None:
        super().__init__()
        self._num_draft_bytes = self._num_tokens = 0
        self.blocks_received = self.counter("blocks_received", "Draft blocks that drafters sent to this verifier.")
        self.blocks_refused = self.counter("blocks_refused", "Draft blocks that broke the protocol.", ("violation",))
        self.blocks_set_aside = self.counter(
            "blocks_set_aside", "Draft blocks that were audited but not used: their drafters had not proved themselves."
        )
        self.rest_s = self.counter(
            "drafter_rest_seconds", "Time for which streams of blocks were not read, since theirs were for nothing."
        )
        for violation in Violation:
            self.blocks_refused.labels(violation.value)  # exported at 0 from the start, so that `rate` sees the first
        self.draft_bytes = self.counter(
            "spec_decode_num_draft_bytes",
            "Bytes of the messages with draft blocks, heads of HTTP/2 frames included.",
            of_model=True,
        )
        bytes_per_token = Gauge(
            PREFIX + "draft_bytes_per_emitted_token",
            "Bytes of messages with draft blocks for each token that rounds committed, since the start.",
            registry=self.registry,
        )
        bytes_per_token.set_function(lambda: self._num_draft_bytes / max(1, self._num_tokens))
        self.registry.register(_AuditCollector(drafters))
        self.target_passes = self.counter("target_passes", "Rounds decided: forward passes of the target per session.")
        self.tokens = self.counter("generation_tokens", "Tokens committed by rounds.", of_model=True)
        self.drafts = self.counter("spec_decode_num_drafts", "Rounds that judged a draft block.", of_model=True)
        self.draft_tokens = self.counter(
            "spec_decode_num_draft_tokens", "Draft tokens judged, of token trees all of them.", of_model=True
        )
        self.trees = self.counter("draft_trees", "Rounds that judged a token tree.")
        self.accepted = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", of_model=True)
        self._queue_s = self.tally(
            "queue_seconds",
            "Waiting of blocks and plain rounds for a step; first rounds, which wait for their prompts, are left out.",
        )
        self._head_s = self.tally("head_draft_seconds", "Time that the verifier's own head or model drafted in a step.")
        self.local_draft_tokens = self.counter(
            "local_draft_tokens", "Draft tokens judged that the verifier drafted by itself, by how.", ("strategy",)
        )
        self.local_accepted = self.counter(
            "local_accepted_tokens", "Draft tokens accepted that the verifier drafted by itself, by how.", ("strategy",)
        )
        self.feature_bytes = self.counter("feature_bytes", "Bytes of features that were sent to drafters with heads.")
        self.near_ties = self.counter("near_ties", "Tokens that rounding could have changed, under the rule coupled.")
        self.drafted_per_position = self.counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Draft tokens judged, by position in the block.",
            ("position",),
            of_model=True,
        )
        self.accepted_per_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the block.",
            ("position",),
            of_model=True,
        )
        self._per_position: list[tuple[Counter, Counter]] = []
        """Judged and accepted, by position; cached, because looking up a label costs too much for each round."""

    def watch_waits(self, waits: DraftWaits, held: HeldTally) -> None:
        """Exports how long sessions wait for drafts, and what becomes of blocks ahead, read at each scrape."""
        self.registry.register(_WaitCollector(waits, held))

    def watch_local(self, strategies: Iterable[str]) -> None:
        """Exports drafts of the verifier by itself, at 0 from the start, so that `rate` sees the first."""
        for strategy in strategies:
            self.local_draft_tokens.labels(strategy)
            self.local_accepted.labels(strategy)

    def count_bytes(self, count: int) -> None:
        """Counts bytes of messages with draft blocks."""
        self._num_draft_bytes += count
        self.draft_bytes.inc(count)

    def count_head(self, seconds: float) -> None:
        """Counts how long the verifier's own head drafted in a step; 0 if it did not."""
        if seconds:
            self._head_s.observe(seconds)

    def count(self, verdict: Verdict, *, is_first: bool = False) -> None:
        """Counts one decided round. `is_first`: the session's first, whose time in the queue includes its prefill."""
        if not is_first:
            self._queue_s.observe(verdict.queue_us / 1e6)
        self.target_passes.inc()
        self._num_tokens += len(verdict.token_ids)
        self.tokens.inc(len(verdict.token_ids))
        self.near_ties.inc(verdict.num_near_ties)
        if verdict.num_draft_tokens:
            self.drafts.inc()
            self.draft_tokens.inc(verdict.num_draft_tokens)
            self.accepted.inc(verdict.num_accepted_tokens)
            self.trees.inc(verdict.tree is not None)
            if verdict.guess is not None and (strategy := verdict.guess.local_strategy):
                self.local_draft_tokens.labels(strategy).inc(verdict.num_draft_tokens)
                self.local_accepted.labels(strategy).inc(verdict.num_accepted_tokens)
            for position in range(len(self._per_position), verdict.num_draft_positions):
                judged, accepted = self.drafted_per_position, self.accepted_per_position
                self._per_position.append((judged.labels(position), accepted.labels(position)))
            for position, (judged, accepted) in enumerate(self._per_position[: verdict.num_draft_positions]):
                judged.inc()
                if position < verdict.num_accepted_tokens:
                    accepted.inc()


class _WaitCollector(Collector):
    """Collects the times of waiting for drafts at each scrape of `/metrics`."""

    def __init__(self, waits: DraftWaits, held: HeldTally) -> None:
        self._waits, self._held = waits, held
        self._lock = threading.Lock()
        self._exported_s = 0.0
        """Last exported value. An interval may turn out to have ended just before it was read, and a counter must not
        fall."""

    @override
    def collect(self) -> Iterable[Metric]:
        waits, held = self._waits, self._held
        with self._lock:
            self._exported_s = exported_s = max(self._exported_s, waits.idle.waited(waits.clock()))
        yield CounterMetricFamily(
            PREFIX + "draft_wait_seconds",
            "From verdicts to the blocks that followed them, over all sessions: its rate is how many wait for drafts.",
            waits.draft_wait_s,
        )
        yield CounterMetricFamily(
            PREFIX + "engine_waiting_for_drafts_seconds",
            "Time without a step in which a session waited for its drafter, or for the gateway after a verdict.",
            exported_s,
        )
        blocks = CounterMetricFamily(
            PREFIX + "held_blocks",
            'Blocks drafted ahead: "hit" were held when their text came true, "late" came after that; "missed" were '
            'held for another text, "stale" came after it, "no_room" and "repeated" were not held, "ended" no longer.',
            labels=["outcome"],
        )
        for fate in HeldFate:
            blocks.add_metric([fate.value], held.fates[fate])
        yield blocks
        yield GaugeMetricFamily(
            PREFIX + "held_block_bytes",
            "Size of the blocks that are held for coming rounds: tokens and distributions.",
            held.num_bytes,
        )
        yield CounterMetricFamily(
            PREFIX + "engine_gathering_seconds",
            "Part of engine_waiting_for_drafts_seconds in which a step could have begun, and waited to be shared.",
            waits.gathering.held_s,
        )


class _AuditCollector(Collector):
    """Collects the audits of all drafters at each scrape of `/metrics`."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self._drafters = drafters

    @override
    def collect(self) -> Iterable[Metric]:
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
            PREFIX + "drafter_quarantined", "Whether blocks of the drafter are refused.", labels=labels
        )
        proven = GaugeMetricFamily(
            PREFIX + "drafter_proven", "Whether the audit has seen enough of the drafter to trust it.", labels=labels
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
            proven.add_metric(names, float(drafter.is_proven))
        yield from (tokens, sums, variances, evidence, quarantined, proven)
