"""Recipes for training heads."""

from dataclasses import dataclass, replace

from draftwire.options.heads.head_names import HeadKind
from draftwire.training.plan import Phase, TrainingPlan

EAGLE_RATE = 0.04
"""Peak rate of the matrices of EAGLE-3. In trials of 460,000 tokens, which no command repeats, half of it was as
good, and twice as much worse."""


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """Parameters of the training of a head."""

    kind: HeadKind
    total_tokens: int
    """Tokens of text to train on, repeats included."""
    num_steps: int = 4
    """Draft tokens in a row; for Medusa and Hydra also the number of MLPs."""
    taps: tuple[int, ...] | None = None
    """Taps of EAGLE-3, see `HeadConfig.taps`; None is the third layer, the middle one and the third from the end."""
    draft_vocab_size: int | None = None
    """Number of ids that EAGLE-3 drafts, the most frequent ones of the texts; None is all."""
    intermediate_size: int | None = None
    """Width of the MLP of EAGLE-3; None is the target's."""
    trains_output: bool = True
    """Whether EAGLE-3 has an output layer of its own; else it is the target's rows of the ids that it drafts."""
    batch_tokens: int = 2_048
    """Tokens of one optimiser step."""
    single_share: float = 0.6
    """Share of the steps of EAGLE-3, at the beginning, that are about one draft token alone. They take two thirds of
    the time, and most of what a head learns serves every place in the block."""
    phases: tuple[Phase, ...] = (Phase(0.85, 256), Phase(0.15, 1024))
    """Lengths of windows. Long ones at the end: a head drafts badly at positions that it was not trained on."""
    seed: int = 21

    def plan(self) -> TrainingPlan:
        """Returns the plan of the training loop."""
        plan = TrainingPlan(
            self.total_tokens, self.phases, self.batch_tokens, micro_batch_tokens=self.batch_tokens, seed=self.seed
        )
        if self.kind is not HeadKind.EAGLE3:
            return plan
        return replace(plan, matrix_learning_rate=EAGLE_RATE)

    def num_steps_at(self, step: int) -> int:
        """Returns how many draft tokens in a row a step of the training is about."""
        is_single = self.kind is HeadKind.EAGLE3 and step < self.single_share * self.plan().steps
        return 1 if is_single else self.num_steps
