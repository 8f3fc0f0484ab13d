"""Prometheus metrics of a drafter."""

from draftwire.engine.draft_session import StepResult
from draftwire.engine.engine_metrics import EngineMetrics


class DrafterMetrics(EngineMetrics):
    """Metrics of a drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks_sent = self.counter("blocks_sent", "Draft blocks sent to verifiers.")
        self.draft_tokens = self.counter("draft_tokens_sent", "Draft tokens sent to verifiers.")
        self.draft_bytes = self.counter(
            "draft_bytes_sent", "Bytes of the messages with draft blocks, heads of HTTP/2 frames included."
        )
        self.branches = self.counter(
            "branches",
            'Texts that were drafted for ahead: "hit" came true, "missed" did not, "abandoned" had no time or no room.',
            ("outcome",),
        )
        self.branch_passes = self.counter(
            "branch_passes",
            "Forward passes for texts that were drafted for ahead, one for each text of a batch, by the same: all but "
            'those of "hit" were wasted.',
            ("outcome",),
        )
        for outcome in ("hit", "missed", "abandoned"):
            self.branches.labels(outcome)  # exported at 0 from the start, so that `rate` sees the first
            self.branch_passes.labels(outcome)
        self.calibration_s = self.tally(
            "calibration_seconds",
            "Reading what was committed since the last block, for all sessions of a step; exact unless bonus "
            "calibration is off. Steps that read prompts are left out. On a GPU, the time of sending the work.",
        )
        self.draft_pass_s = self.tally(
            "draft_pass_seconds",
            "What drafting took in a step, over its forward passes for drafted tokens: with each, the drawing of a "
            "token, and once the first draw and the encoding of blocks. On a GPU also what is left of calibration.",
        )

    def count_branches(self, outcome: str, num_branches: int, num_passes: int) -> None:
        """Counts branches, and their passes, by what became of them."""
        self.branches.labels(outcome).inc(num_branches)
        self.branch_passes.labels(outcome).inc(num_passes)

    def time(self, result: StepResult, reads_prompts: bool) -> None:
        """Observes the durations of calibration and drafting in a step."""
        if result.num_read and not reads_prompts:
            self.calibration_s.observe(result.calibration_s)
        if result.num_passes:
            self.draft_pass_s.observe(result.draft_s / result.num_passes)
