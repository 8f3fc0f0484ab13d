"""The sessions of a service whose spans are recorded, and how far each has come with its prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import AnySpec
from draftwire.runtime.tracing import PREFIX, Attributes, Tracer, sampled

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext


@dataclass(slots=True)
class TracedSession:
    """One session. Used on the event loop only."""

    parent: SpanContext
    """The span of the gateway that its spans are part of."""
    num_tokens: int
    """Of the prompt and of what was generated before."""
    reads_since: float | None = None
    """When the first step began that it had part in, by `time.perf_counter`."""
    num_steps: int = 0
    """Steps until its prompt was read."""
    has_read: bool = False


class TracedSessions(ABC):
    """All of them, by key. Others are not in it. A service adds what else it records. Used on the event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        """Takes what makes the spans."""
        self.tracer = tracer
        self._sessions: dict[SessionKey, TracedSession] = {}

    @abstractmethod
    def add(self, step: Any, completed: Any, started_at: float, ended_at: float) -> None:
        """Records what a step did, once it is over.

        Args:
            step: which sessions had part in it.
            completed: what came of it.
            started_at: when it began, by `time.perf_counter`.
            ended_at: when it was over.
        """

    def open(self, spec: AnySpec) -> None:
        """Notes a session that was opened, if it is traced."""
        parent = sampled(spec.parameters.traceparent)
        if parent is not None:
            self._sessions[spec.session_id, spec.epoch] = TracedSession(parent, len(spec.token_ids))

    def close(self, key: SessionKey) -> None:
        """Forgets a session."""
        self._sessions.pop(key, None)

    def note_step(self, key: SessionKey, started_at: float) -> None:
        """Notes that a session had part in a step."""
        session = self._sessions.get(key)
        if session is not None and not session.has_read:
            session.num_steps += 1
            if session.reads_since is None:
                session.reads_since = started_at

    def end_reading(self, session: TracedSession, ended_at: float, num_reused: int) -> None:
        """Records that a session's prompt was read, the first time that this is said.

        Args:
            session: which one.
            ended_at: when the step ended that read the last of it.
            num_reused: tokens that did not have to be read.
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
