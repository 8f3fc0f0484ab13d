"""How to train a head."""

from dataclasses import dataclass

from draftwire.drafting.heads.head_names import HeadKind
from draftwire.training.plan import Phase, TrainingPlan


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How to train a head."""

    kind: HeadKind
    total_tokens: int
    """Tokens of text to train on, repeats included."""
    num_steps: int = 4
    """Draft tokens in a row; of Medusa and Hydra also their number of MLPs."""
    taps: tuple[int, ...] | None = None
    """Of EAGLE-3: see `HeadConfig.taps`; None is the third layer, the middle one and the third from the end."""
    draft_vocab_size: int | None = None
    """Of EAGLE-3: so many of the tokens that are most frequent in the texts can be drafted; None is all."""
    intermediate_size: int | None = None
    """Of EAGLE-3: width of its MLP; None is the target's."""
    batch_tokens: int = 4_096
    """Tokens of one optimiser step."""
    phases: tuple[Phase, ...] = (Phase(0.85, 256), Phase(0.15, 1024))
    """Lengths of windows. Long ones at the end: a head knows nothing of positions that it was not trained on."""
    seed: int = 21

    def plan(self) -> TrainingPlan:
        """Returns the plan of the training loop."""
        return TrainingPlan(
            self.total_tokens, self.phases, self.batch_tokens, micro_batch_tokens=self.batch_tokens, seed=self.seed
        )
