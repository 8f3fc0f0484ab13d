"""What the metrics of drafter and verifier have in common."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwire.engine.session_book import SessionBook
from draftwire.errors import NoRoomError
from draftwire.runtime.metrics import PREFIX, ServiceMetrics

DROPPED = ("stale", "unknown_session", "other_lease")
"""Reasons why messages have no effect; a verifier knows more. There from the start: growth is seen from 0 on."""
COUNTS = tuple(float(2**power) for power in range(11))
"""Buckets of small numbers, 1 to 1,024."""


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

    def watch(self, scheduler: SessionBook[Any, Any], model_name: str) -> None:
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

    def __init__(self, scheduler: SessionBook[Any, Any]) -> None:
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

    def __init__(self, scheduler: SessionBook[Any, Any]) -> None:
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
