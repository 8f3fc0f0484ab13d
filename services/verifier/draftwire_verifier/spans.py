"""Spans of a verifier: the prefill of each traced session, and each round that it decided."""

from collections.abc import Sequence

from draftwire.engine.traced_sessions import TracedSession, TracedSessions
from draftwire.method.rounds import Verdict
from draftwire.runtime.tracing import PREFIX
from draftwire_verifier.scheduler import Completed, Step


class VerifierSpans(TracedSessions):
    """Records spans after each step."""

    def add(self, step: Step, completed: Sequence[Completed], started_at: float, ended_at: float) -> None:
        """Records completed prefills and decided rounds."""
        if not self._sessions:
            return
        for item in step.items:
            self.note_step(item.session.key, started_at)
        for session, event in completed:
            traced = self._sessions.get(session.key)
            if traced is not None and isinstance(event, Verdict):
                self.end_reading(traced, ended_at, event.num_cached_tokens)
                self._add_round(traced, event, len(step.items), started_at, ended_at)

    def _add_round(
        self, traced: TracedSession, verdict: Verdict, num_sessions: int, started_at: float, ended_at: float
    ) -> None:
        attributes = {
            PREFIX + "round": verdict.fence.round,
            PREFIX + "epoch": verdict.fence.epoch,
            PREFIX + "num_draft_tokens": verdict.num_draft_tokens,
            PREFIX + "num_accepted_tokens": verdict.num_accepted_tokens,
            PREFIX + "extra_token": verdict.extra.value,
            PREFIX + "num_sessions": num_sessions,
            PREFIX + "queue_us": verdict.queue_us,
            PREFIX + "verify_us": verdict.verify_us,
        }
        self.tracer.record("verify", traced.parent, started_at, ended_at, attributes)
