"""Spans of a verifier: the prefill of each traced session, and each round that it decided."""

from collections.abc import Sequence
from dataclasses import asdict

from draftwire.engine.target_session import Step
from draftwire.engine.traced_sessions import TracedSessions
from draftwire.method.rounds import Verdict
from draftwire.runtime.tracing import PREFIX
from draftwire_verifier.scheduler import Completed


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
                attributes = {PREFIX + "num_sessions": len(step.items), **_attributes_of(event)}
                if event.ahead is not None:
                    attributes |= {PREFIX + name: value for name, value in asdict(event.ahead).items()}
                self.tracer.record("verify", traced.parent, started_at, ended_at, attributes)


def _attributes_of(verdict: Verdict) -> dict[str, int | str]:
    return {
        PREFIX + "round": verdict.fence.round,
        PREFIX + "epoch": verdict.fence.epoch,
        PREFIX + "num_draft_tokens": verdict.num_draft_tokens,
        PREFIX + "num_accepted_tokens": verdict.num_accepted_tokens,
        PREFIX + "extra_token": verdict.extra.value,
        PREFIX + "queue_us": verdict.queue_us,
        PREFIX + "verify_us": verdict.verify_us,
    }
