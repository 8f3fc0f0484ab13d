"""Prometheus metrics of a gateway."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from draftwire.errors import NoRoomError
from draftwire.options.confidence.bucket_counts import fates_of
from draftwire.runtime.metrics import LONG_SECONDS, PREFIX, ServiceMetrics
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain

if TYPE_CHECKING:
    from draftwire_gateway.peers.roster import Roster  # needs grpc, which the core does without

RESULTS = ("stop", "length", "cancelled", "invalid", "refused", "failed")
"""Values of the label `result`: how a choice of a request ended."""
GENERATING_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Routes that are exported at 0 from the start, so that rates see the first increase."""
AHEAD_OUTCOMES = ("hit", "late", "missed")
"""Values of the label `outcome` of rounds for which a drafter may draft ahead."""
PARTS = ("lost", "prefill", "draft", "wire", "queue", "verify", "gateway")
"""Parts of a round's time; see `RoundTimes`. `draft` includes the drafter's calibration here."""


class GatewayMetrics(ServiceMetrics):
    """The metrics of a gateway."""

    def __init__(self, *, counts_callers: bool = False) -> None:
        """`counts_callers`: whether tokens are counted by caller, which makes two series of each."""
        super().__init__()
        self._counts_callers = counts_callers
        self.http_requests = self.counter(
            "http_requests", "HTTP requests ended, by the pattern of their route and status.", ("route", "status")
        )
        self.requests = self.counter("requests", "Choices of requests ended, by result.", ("result",))
        self.requests_refused = self.counter(
            "requests_refused", "Choices of requests for which there was no room, by who had none.", ("by",)
        )
        self._caller_requests_refused = self.counter(
            "caller_requests_refused",
            "The same by the name of the caller's token, where there are tokens.",
            ("caller", "by"),
        )
        self._caller_tokens = self.counter(
            "caller_tokens",
            "Tokens of prompts and completions, by the name of the caller's token; only with caller_metrics.",
            ("caller", "kind"),
        )
        self.ahead_rounds = self.counter(
            "ahead_rounds",
            'Rounds for which a drafter could draft ahead, of choices that ended: "hit", its block was there when they '
            'began; "late", it came after that; "missed", it had none.',
            ("outcome",),
        )
        self.lossy_requests = self.counter(
            "lossy_requests",
            "Choices of requests ended that asked for a rule that changes the distribution.",
            ("method",),
        )
        self.drafters_lost = self.counter("drafters_lost", "Times that a session went on without its drafter.")
        self.verifiers_lost = self.counter("verifiers_lost", "Times that a session lost its verifier.")
        for route in GENERATING_ROUTES:
            self.http_requests.labels(route, "200")
        for result in RESULTS:
            self.requests.labels(result)  # exported as 0 from the start, so that rates see the first increase
        for outcome in AHEAD_OUTCOMES:
            self.ahead_rounds.labels(outcome)
        for role in ("gateway", "verifier", "caller"):
            self.requests_refused.labels(role)
        self._count_rounds()
        self._count_waiting()

    def _count_rounds(self) -> None:
        self.rounds = self.counter(
            "rounds",
            "Rounds committed: speculative ones, and plain ones by why nothing was drafted.",
            ("kind", "reason"),
        )
        self.draft_lengths = self.counter(
            "rounds_by_draft_length", "Rounds committed, by how many draft tokens they judged.", ("length",)
        )
        self.places = self.counter(
            "draft_places",
            "Places of blocks that say how sure their drafters were, by the eighth of 0 to 1 in which that is, 0 to 7: "
            '"accepted"; "rejected", the first one; "ended", the block ended before it. Only with stop_below.',
            ("bucket", "outcome"),
        )
        self.round_tokens = self.counter("round_tokens", "Tokens committed by rounds: over rounds, block efficiency.")
        self.round_s = self.histogram(
            "round_seconds",
            "Parts of each round, and in part prefill the whole of a session's first round at a verifier. A round is "
            "counted once in each part that it has.",
            labels=("part",),
        )
        self._parts = {part: self.round_s.labels(part) for part in PARTS}
        self._by_kind: dict[WhyPlain | None, Counter] = {None: self.rounds.labels("speculative", "")}
        for why in WhyPlain:
            self._by_kind[why] = self.rounds.labels("plain", why.value)

    def _count_waiting(self) -> None:
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of the prompts of requests.", of_model=True)
        self.tokens = self.counter("generation_tokens", "Tokens of completions, as users get them.", of_model=True)
        self.time_to_first_token_s = self.tally(
            "time_to_first_token_seconds",
            "From when a request was taken on, its prompt tokenised, until the first token of each choice.",
            LONG_SECONDS,
            of_model=True,
        )
        self.inter_token_latency_s = self.tally(
            "inter_token_latency_seconds",
            "Time between two rounds' tokens, shared equally among the later's: a value for each token after the first "
            "round's.",
            of_model=True,
        )
        self.e2e_request_latency_s = self.tally(
            "e2e_request_latency_seconds",
            "From when a request was taken on until each choice was complete; of those cut short, nothing.",
            LONG_SECONDS,
            of_model=True,
        )
        registry = self.of_model.registry
        self.num_running = Gauge(
            PREFIX + "num_requests_running", "Choices of requests that run or are prepared.", registry=registry
        )
        self.num_waiting = Gauge(
            PREFIX + "num_requests_waiting",
            "Choices of requests that wait for a place, or for room at a verifier.",
            registry=registry,
        )

    @contextmanager
    def counting_refusals(self, by: str, caller: str, num_choices: int = 1) -> Iterator[None]:
        """Counts the choices of a request, as far as they are known, if it is refused with `NoRoomError`; the error
        propagates. `by` says who has no room: the gateway, the verifier, or the caller, at a limit of its token.
        """
        try:
            yield
        except NoRoomError:
            self.count_refused(by, caller, num_choices)
            raise

    def count_refused(self, by: str, caller: str, num_choices: int) -> None:
        """Counts the choices of a refused request; see `counting_refusals`."""
        self.requests_refused.labels(by).inc(num_choices)
        if caller:
            self._caller_requests_refused.labels(caller, by).inc(num_choices)

    def count_prompts(self, num_tokens: int, caller: str) -> None:
        """Counts the tokens of a request's prompts."""
        self.prompt_tokens.inc(num_tokens)
        if self._counts_callers:
            self._caller_tokens.labels(caller, "prompt").inc(num_tokens)

    def count_generated(self, num_tokens: int, caller: str) -> None:
        """Counts tokens that a caller gets."""
        self.tokens.inc(num_tokens)
        if self._counts_callers:
            self._caller_tokens.labels(caller, "generation").inc(num_tokens)

    def observe_round(self, times: RoundTimes) -> None:
        """Counts a committed round; see `RoundObserver`."""
        self._by_kind[times.why_plain].inc()
        self.draft_lengths.labels(str(times.verdict.num_draft_tokens)).inc()
        self.round_tokens.inc(times.num_tokens)
        for bucket, fate in fates_of(times.verdict):
            self.places.labels(str(bucket), fate.value).inc()
        parts = self._parts
        if times.lost_s:
            parts["lost"].observe(times.lost_s)
        if times.is_first:
            parts["prefill"].observe(times.prefill_s)
        else:
            if times.verdict.num_draft_tokens:
                parts["draft"].observe(times.calibration_s + times.draft_s)
            parts["wire"].observe(times.wire_s)
            parts["queue"].observe(times.queue_s)
            parts["verify"].observe(times.verify_s)
        parts["gateway"].observe(times.gateway_s)

    def watch(self, rosters: "Iterable[Roster[Any]]") -> None:
        """Exports the numbers of verifiers and drafters and the state of their discovery."""
        self.registry.register(_PeerCollector(tuple(rosters)))


class _PeerCollector(Collector):
    """Counts verifiers and drafters whenever `/metrics` is read."""

    def __init__(self, rosters: "tuple[Roster[Any], ...]") -> None:
        self._rosters = rosters

    @override
    def collect(self) -> Iterable[Metric]:
        known = GaugeMetricFamily(
            PREFIX + "num_peers", "Verifiers and drafters that this gateway knows, by state.", labels=["role", "state"]
        )
        failures = CounterMetricFamily(
            PREFIX + "discovery_failures", "Times that nobody could say where services are.", labels=["role"]
        )
        age = GaugeMetricFamily(
            PREFIX + "discovery_age_seconds",
            "For how long what is known of services may be out of date; none where their addresses are given.",
            labels=["role"],
        )
        for roster in self._rosters:
            for state, count in roster.num_by_state().items():
                known.add_metric([roster.role, state], count)
            failures.add_metric([roster.role], roster.status.num_failures)
            if roster.status.synced_at is not None:
                age.add_metric([roster.role], time.monotonic() - roster.status.synced_at)
        yield from (known, failures, age)
