"""The sessions of a service whose spans are recorded, and how far each has come with its prompt."""

from dataclasses import dataclass

from draftwire.engine.leases import SessionKey
from draftwire.requests.trace_context import TraceContext
from draftwire.runtime.tracing import PREFIX, Attributes, Tracer, sampled


@dataclass(slots=True)
class TracedSession:
    """One session. Used on the event loop only."""

    parent: TraceContext
    """The span of the gateway that its spans are part of."""
    num_tokens: int
    """Of the prompt and of what was generated before."""
    reads_since: float | None = None
    """When the first step began that it had part in, by `time.perf_counter`."""
    num_steps: int = 0
    """Steps until its prompt was read."""
    has_read: bool = False


class TracedSessions:
    """All of them, by key. Others are not in it."""

    def __init__(self, tracer: Tracer) -> None:
        """Takes what makes the spans."""
        self.tracer = tracer
        self._sessions: dict[SessionKey, TracedSession] = {}

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def open(self, key: SessionKey, traceparent: str, num_tokens: int) -> None:
        """Notes a session that was opened, if it is traced."""
        parent = sampled(traceparent)
        if parent is not None:
            self._sessions[key] = TracedSession(parent, num_tokens)

    def close(self, key: SessionKey) -> None:
        """Forgets a session."""
        self._sessions.pop(key, None)

    def get(self, key: SessionKey) -> TracedSession | None:
        """Returns a session, if it is traced."""
        return self._sessions.get(key)

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
