"""Metrics that drafter and verifier have in common."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from draftwire.engine.session_book import SessionBook
from draftwire.errors import NoRoomError
from draftwire.runtime.metrics import PREFIX, ServiceMetrics

DROPPED = ("stale", "unknown_session", "other_lease")
"""Values of the label `reason`; a verifier adds more. Exported at 0 from the start, so that `rate` sees the first."""
COUNTS = tuple(float(2**power) for power in range(11))
"""Histogram buckets of small counts, 1 to 1,024: the powers of two."""


class EngineMetrics(ServiceMetrics):
    """Metrics of a service with an engine."""

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
        """Counts a session that is refused with `NoRoomError`; the error propagates."""
        try:
            yield
        except NoRoomError:
            self.sessions_refused.inc()
            raise

    def count_step(self, num_sessions: int, seconds: float) -> None:
        """Counts a step of the engine that served so many sessions and took so many seconds."""
        self._steps.inc()
        self._busy_s.inc(seconds)
        self._step_s.observe(seconds)
        self._step_sessions.observe(num_sessions)

    def watch(self, scheduler: SessionBook[Any, Any], model_name: str, dtype: str) -> None:
        """Exports the counters and gauges that a scheduler keeps itself, read at each scrape, and what its model is."""
        self.of_model.model_name = model_name
        self.registry.register(_SchedulerCollector(scheduler, dtype))
        self.of_model.registry.register(_CacheCollector(scheduler))


class _SchedulerCollector(Collector):
    """Collects a scheduler's values at each scrape of `/metrics`."""

    def __init__(self, scheduler: SessionBook[Any, Any], dtype: str) -> None:
        self._scheduler, self._dtype = scheduler, dtype

    @override
    def collect(self) -> Iterable[Metric]:
        scheduler = self._scheduler
        sessions = list(scheduler.sessions.values())
        model = GaugeMetricFamily(
            PREFIX + "model_info", "Numerics of the model, in a label of the value 1.", labels=["dtype"]
        )
        model.add_metric([self._dtype], 1.0)
        yield model
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


class _CacheCollector(Collector):
    """Collects the KV cache values that have names in vLLM."""

    def __init__(self, scheduler: SessionBook[Any, Any]) -> None:
        self._scheduler = scheduler

    @override
    def collect(self) -> Iterable[Metric]:
        scheduler = self._scheduler
        yield GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "Share of the KV cache that is reserved, 0 to 1.", scheduler.room.usage
        )
        for name, key, documentation in (
            ("prefix_cache_queries", "queried", "Tokens that sessions were opened with."),
            ("prefix_cache_hits", "reused", "Tokens of these that did not have to be read, as another session had."),
        ):
            yield CounterMetricFamily(PREFIX + name, documentation, scheduler.prefix_tokens.get(key, 0))
