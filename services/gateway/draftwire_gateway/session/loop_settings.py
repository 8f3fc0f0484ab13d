"""Settings of the outer loop."""

from dataclasses import dataclass

from draftwire.runtime.settings import require


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Timeouts of the outer loop, and lengths of plain runs."""

    plain_run_rounds: int = 32
    """Rounds asked for at once where there is no drafter."""
    bridge_rounds: int = 2
    """Rounds asked for at once while the drafter still reads the prompt or is late; more, if it may have begun more."""
    block_timeout_s: float = 5.0
    """A drafter that is slower than its blocks usually are is asked for what it has drawn, at the latest after this
    time. If it does not reply soon, at the latest after this time again, the session goes on without it until it does;
    after this time once more, another drafter takes over if there is one."""
    verdict_timeout_s: float = 120.0
    """A verifier that is silent for this long during its own work is lost."""
    prompt_timeout_s: float = 900.0
    """How long the verifier may take for the first token: a long prompt is read beside running sessions."""
    failover_timeout_s: float = 30.0
    """How long another verifier is sought for a session whose verifier was lost; it may be the same one, restarted."""

    def __post_init__(self) -> None:
        require(self.plain_run_rounds >= 1, "plain_run_rounds must be at least 1")
        require(self.bridge_rounds >= 1, "bridge_rounds must be at least 1")
        require(self.block_timeout_s > 0.0, "block_timeout_s must be positive")
        require(self.verdict_timeout_s > 0.0, "verdict_timeout_s must be positive")
        require(self.prompt_timeout_s > 0.0, "prompt_timeout_s must be positive")
        require(self.failover_timeout_s >= 0.0, "failover_timeout_s must not be negative")
