"""What a verifier records of the traced sessions: the reading of the prompt, and each round that it decided."""

from collections.abc import Sequence

from draftwire.engine.leases import SessionKey
from draftwire.engine.traced_sessions import TracedSession, TracedSessions
from draftwire.method.rounds import TargetSessionSpec, Verdict
from draftwire.runtime.tracing import PREFIX, Tracer
from draftwire_verifier.scheduler import Completed, Step


class VerifierSpans:
    """Makes the spans when a step is over. Used on the event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        """Takes what makes spans."""
        self._sessions = TracedSessions(tracer)

    def open(self, spec: TargetSessionSpec) -> None:
        """Notes a session that was opened."""
        self._sessions.open((spec.session_id, spec.epoch), spec.traceparent, len(spec.token_ids))

    def close(self, key: SessionKey) -> None:
        """Forgets a session."""
        self._sessions.close(key)

    def add(self, step: Step, told: Sequence[Completed], ended_at: float) -> None:
        """Records what a step did.

        Args:
            step: which sessions had part in it.
            told: what came of it.
            ended_at: when it was over, by `time.perf_counter`.
        """
        if not self._sessions:
            return
        for item in step.items:
            self._sessions.note_step(item.session.key, step.started_at)
        for session, event in told:
            traced = self._sessions.get(session.key)
            if traced is not None and isinstance(event, Verdict):
                self._sessions.end_reading(traced, ended_at, event.num_cached_tokens)
                self._add_round(traced, event, step, ended_at)

    def _add_round(self, traced: TracedSession, verdict: Verdict, step: Step, ended_at: float) -> None:
        attributes = {
            PREFIX + "round": verdict.fence.round,
            PREFIX + "epoch": verdict.fence.epoch,
            PREFIX + "num_draft_tokens": verdict.num_draft_tokens,
            PREFIX + "num_accepted_tokens": verdict.num_accepted_tokens,
            PREFIX + "extra_token": verdict.extra.value,
            PREFIX + "num_sessions": len(step.items),
            PREFIX + "queue_us": verdict.queue_us,
            PREFIX + "verify_us": verdict.verify_us,
        }
        self._sessions.tracer.record("verify", traced.parent, step.started_at, ended_at, attributes)
