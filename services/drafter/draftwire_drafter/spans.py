"""What a drafter records of the traced sessions: the reading of the prompt, and each block that it sent."""

from collections.abc import Sequence

from draftwire.engine.leases import SessionKey
from draftwire.engine.traced_sessions import TracedSession, TracedSessions
from draftwire.method.rounds import DraftBlock, DraftSessionSpec
from draftwire.runtime.tracing import PREFIX, Tracer
from draftwire_drafter.scheduler import Completed, Step, StepItem


class DrafterSpans:
    """Makes the spans when a step is over. Used on the event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        """Takes what makes spans."""
        self._sessions = TracedSessions(tracer)

    def open(self, spec: DraftSessionSpec) -> None:
        """Notes a session that was opened."""
        self._sessions.open((spec.session_id, spec.epoch), spec.traceparent, len(spec.token_ids))

    def close(self, key: SessionKey) -> None:
        """Forgets a session."""
        self._sessions.close(key)

    def add(self, step: Step, completed: Sequence[Completed], started_at: float, ended_at: float) -> None:
        """Records what a step did.

        Args:
            step: which sessions had part in it.
            completed: what came of it.
            started_at: when it began, by `time.perf_counter`.
            ended_at: when it was over.
        """
        if not self._sessions:
            return
        items = {item.session.key: item for item in step.items}
        for key in items:
            self._sessions.note_step(key, started_at)
        for each in completed:
            traced = self._sessions.get(each.session.key)
            if traced is None:
                continue
            if each.is_opened:
                self._sessions.end_reading(traced, ended_at, each.session.num_reused or 0)
            if isinstance(each.outcome, DraftBlock):
                self._add_block(traced, each.outcome, items[each.session.key], len(items), started_at)

    def _add_block(
        self, traced: TracedSession, block: DraftBlock, item: StepItem, num_sessions: int, started_at: float
    ) -> None:
        common = {
            PREFIX + "round": block.fence.round,
            PREFIX + "epoch": block.fence.epoch,
            PREFIX + "attempt": block.attempt,
            PREFIX + "num_sessions": num_sessions,
        }
        calibrated_at = started_at + block.timings.calibration_us / 1e6
        drafted_at = calibrated_at + block.timings.draft_us / 1e6
        read = {**common, PREFIX + "num_tokens": len(item.token_ids)}
        drawn = {**common, PREFIX + "num_draft_tokens": len(block.token_ids)}
        self._sessions.tracer.record("calibrate", traced.parent, started_at, calibrated_at, read)
        self._sessions.tracer.record("draft", traced.parent, calibrated_at, drafted_at, drawn)
