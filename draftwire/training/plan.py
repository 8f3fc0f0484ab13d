"""How long and how fast to train, and on windows of which length."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a training run with windows of one length.

    Attention costs time in proportion to the length, and most of what a small model learns lies within a few hundred
    tokens, so a run begins with short windows.
    """

    share: float
    """Share of the run's tokens, in (0, 1]."""
    sequence_length: int
    """Tokens of context in each training window."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to train. Two runs with equal plans and data see the same batches in the same order."""

    total_tokens: int
    """Tokens to train on, repeats included."""
    phases: tuple[Phase, ...] = (Phase(1.0, 256),)
    """Phases in order; their shares sum up to 1."""
    batch_tokens: int = 8_192
    """Tokens in one optimiser step."""
    micro_batch_tokens: int = 4_096
    """Tokens in one forward and backward pass."""
    matrix_learning_rate: float = 0.02
    """Peak rate of Muon, which trains the layers' weight matrices."""
    embedding_learning_rate: float = 3e-3
    """Peak rate of AdamW, which trains embeddings and norms."""
    warmup_fraction: float = 0.02
    """Share of the steps over which the rates rise from zero."""
    decay_fraction: float = 0.6
    """Share of the steps, at the end, over which the rates fall to zero."""
    seed: int = 0
    """Orders the training windows."""

    def __post_init__(self) -> None:
        for phase in self.phases:
            if not phase.sequence_length <= self.micro_batch_tokens <= self.batch_tokens:
                raise ValueError("sequence_length <= micro_batch_tokens <= batch_tokens must hold")
        if not (0.0 < self.warmup_fraction <= 1.0 and 0.0 < self.decay_fraction <= 1.0):
            raise ValueError("warmup_fraction and decay_fraction must be in (0, 1]")
        if min((phase.share for phase in self.phases), default=0.0) <= 0.0:
            raise ValueError("every phase has a share above 0")
        if abs(sum(phase.share for phase in self.phases) - 1.0) > 1e-9:
            raise ValueError("the shares of the phases must sum up to 1")

    def shortened(self, share: float) -> "TrainingPlan":
        """Returns the same plan for a share of the tokens."""
        return replace(self, total_tokens=round(share * self.total_tokens))

    @property
    def steps(self) -> int:
        """Optimiser steps in the whole run."""
        return max(1, self.total_tokens // self.batch_tokens)

    @property
    def phase_ends(self) -> list[int]:
        """The step at which each phase is over."""
        done, ends = 0.0, []
        for phase in self.phases:
            done += phase.share
            ends.append(round(done * self.steps))
        return ends

    def rate(self, step: int) -> float:
        """Learning rate of `step` as a share of the peak: warm-up, plateau, linear decay."""
        done = step / self.steps
        return min(1.0, (done + 1 / self.steps) / self.warmup_fraction, (1.0 - done) / self.decay_fraction)
