"""Traced sessions of a service, with the progress of their prefill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import AnySpec
from draftwire.runtime.tracing import PREFIX, sampled

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from draftwire.runtime.open_telemetry import Attributes, OtlpTracer


@dataclass(slots=True)
class TracedSession:
    """Tracing state of one session. Used on the event loop only."""

    parent: SpanContext
    """Parent span, in the gateway."""
    num_tokens: int
    """Tokens of the prompt and of what was generated before."""
    reads_since: float | None = None
    """Start of its first step, by `time.perf_counter`."""
    num_steps: int = 0
    """Steps until the end of its prefill."""
    has_read: bool = False
    """Whether its prefill is over and recorded."""


class TracedSessions(ABC):
    """The traced sessions, by key. Subclasses add spans of their own. Used on the event loop only."""

    def __init__(self, tracer: OtlpTracer) -> None:
        """Starts without sessions; `tracer` makes the spans."""
        self.tracer = tracer
        self._sessions: dict[SessionKey, TracedSession] = {}

    @abstractmethod
    def add(self, step: Any, completed: Any, started_at: float, ended_at: float) -> None:
        """Records the spans of a completed step.

        Args:
            step: the sessions in it.
            completed: its results, as `EngineService._complete` returned them.
            started_at: by `time.perf_counter`.
            ended_at: the same.
        """

    def open(self, spec: AnySpec) -> None:
        """Adds a session that was opened, if its request is sampled."""
        parent = sampled(spec.parameters.traceparent)
        if parent is not None:
            self._sessions[spec.session_id, spec.epoch] = TracedSession(parent, len(spec.token_ids))

    def close(self, key: SessionKey) -> None:
        """Removes a session, if it is traced."""
        self._sessions.pop(key, None)

    def note_step(self, key: SessionKey, started_at: float) -> None:
        """Counts a step of a session, if it is traced and in prefill."""
        session = self._sessions.get(key)
        if session is not None and not session.has_read:
            session.num_steps += 1
            if session.reads_since is None:
                session.reads_since = started_at

    def end_reading(self, session: TracedSession, ended_at: float, num_reused: int) -> None:
        """Records the span of a session's prefill. Only the first call has an effect.

        Args:
            session: the session.
            ended_at: end of the step that read the last of the prompt, by `time.perf_counter`.
            num_reused: prefix cache hits, tokens.
        """
        if session.has_read or session.reads_since is None:
            return
        session.has_read = True
        attributes: Attributes = {
            PREFIX + "num_prompt_tokens": session.num_tokens,
            PREFIX + "num_reused_tokens": num_reused,
            PREFIX + "num_steps": session.num_steps,
        }
        self.tracer.record("read prompt", session.parent, session.reads_since, ended_at, attributes)
