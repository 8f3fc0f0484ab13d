"""Spans of a drafter: the prefill of each traced session, and each block that it drafted."""

from collections.abc import Sequence

from draftwire.engine.draft_session import Step
from draftwire.engine.traced_sessions import TracedSession, TracedSessions
from draftwire.method.rounds import DraftBlock
from draftwire.runtime.tracing import PREFIX
from draftwire_drafter.scheduler import Completed


class DrafterSpans(TracedSessions):
    """Records spans after each step."""

    def add(self, step: Step, completed: Sequence[Completed], started_at: float, ended_at: float) -> None:
        """Records completed prefills and drafted blocks."""
        if not self._sessions:
            return
        read = {item.session.key: len(item.token_ids) for item in step.items}
        for key in read:
            self.note_step(key, started_at)
        for each in completed:
            traced = self._sessions.get(each.session.key)
            if traced is None:
                continue
            if each.is_opened:
                self.end_reading(traced, ended_at, each.session.num_reused or 0)
            if isinstance(each.outcome, DraftBlock):
                self._add_block(traced, each.outcome, read.get(each.session.key, 0), step.num_sessions, started_at)

    def _add_block(
        self, traced: TracedSession, block: DraftBlock, num_read: int, num_sessions: int, started_at: float
    ) -> None:
        common = {
            PREFIX + "round": block.fence.round,
            PREFIX + "epoch": block.fence.epoch,
            PREFIX + "num_sessions": num_sessions,
        }
        calibrated_at = started_at + block.timings.calibration_us / 1e6
        drafted_at = calibrated_at + block.timings.draft_us / 1e6
        read = {**common, PREFIX + "num_tokens": num_read}
        drawn = {**common, PREFIX + "num_draft_tokens": len(block.token_ids), PREFIX + "is_ahead": block.is_ahead}
        if not block.is_ahead:  # nothing is calibrated before a verdict
            self.tracer.record("calibrate", traced.parent, started_at, calibrated_at, read)
        self.tracer.record("draft", traced.parent, calibrated_at, drafted_at, drawn)
