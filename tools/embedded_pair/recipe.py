"""Texts, length and rates of the training of the embedded pair."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from draftwire.options.heads.head_names import HeadKind
from draftwire.training.batches import Repetition, TrainingTexts
from draftwire.training.heads.head_recipe import HeadRecipe
from draftwire.training.plan import Phase, TrainingPlan
from tools.embedded_pair.pair import DrafterName

END_OF_TEXT_ID = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the texts in what a model reads. The library's are most frequent: the held-out files are of it."""

    library: float
    packages: float
    conversations: float
    copies: dict[Repetition, float]
    """Shares of windows of the library that repeat a passage, by how."""

    def sources(self, work: Path) -> list[TrainingTexts]:
        """Returns the texts in the folder `work`, with their shares."""
        library, packages, conversations = (
            np.load(work / f"{name}.npy") for name in ("library", "packages", "conversations")
        )
        return [
            TrainingTexts(library, self.library),
            *(TrainingTexts(library, share, how) for how, share in self.copies.items()),
            TrainingTexts(packages, self.packages),
            TrainingTexts(conversations, self.conversations),
        ]


@dataclass(frozen=True, slots=True)
class Stage:
    """A training run from the weights of the stage before."""

    name: str
    mix: Mix
    plan: TrainingPlan


def copies(text: float, few_tokens: float) -> dict[Repetition, float]:
    """Shares of windows that are copies all through: of text, and of random tokens out of a few."""
    of_text = Repetition(END_OF_TEXT_ID, (0.0,), shortest=0.125, copies=7)
    return {of_text: text, replace(of_text, alphabet=(3, 64)): few_tokens}


READING = Mix(0.68, 0.10, 0.08, {Repetition(END_OF_TEXT_ID, (0.0, 0.01, 0.03)): 0.14})
COPYING = Mix(0.30, 0.06, 0.10, {Repetition(END_OF_TEXT_ID, (0.0, 0.0, 0.02), shortest=0.125, copies=7): 0.54})
TELLING_APART = Mix(0.32, 0.06, 0.10, copies(0.30, 0.22))
FEWER_COPIES = Mix(0.40, 0.06, 0.10, copies(0.26, 0.18))
MORE_COPIES = Mix(0.27, 0.05, 0.10, copies(0.32, 0.26))

train_further = partial(TrainingPlan, matrix_learning_rate=0.01, embedding_learning_rate=1.5e-3, warmup_fraction=0.05)

TARGET_STAGES = (
    Stage(
        "reading",
        READING,
        TrainingPlan(15_000_000, (Phase(0.65, 256), Phase(0.2, 512), Phase(0.15, 1024)), seed=1),
    ),
    Stage("copying", COPYING, train_further(6_000_000, (Phase(0.3, 512), Phase(0.7, 1024)), seed=11)),
    Stage("telling apart", TELLING_APART, train_further(3_000_000, (Phase(0.6, 512), Phase(0.4, 1024)), seed=12)),
)
"""After the first, the target copies with a slip every dozen tokens; after the second, where two or three tokens in a
row come at several places of what it copies, it goes on from the wrong one."""

LAST_STAGES = (
    Stage(
        "fewer copies",
        FEWER_COPIES,
        replace(
            TARGET_STAGES[-1].plan,
            total_tokens=2_500_000,
            matrix_learning_rate=0.007,
            embedding_learning_rate=1e-3,
            seed=13,
        ),
    ),
    Stage("more copies", MORE_COPIES, replace(TARGET_STAGES[-1].plan, seed=13)),
)
"""Each from the weights after `TARGET_STAGES`. The target is the mean of the three, which copies and reads better than
each of them."""

LESSONS = TrainingPlan(2_400_000, (Phase(0.8, 256), Phase(0.2, 1024)), batch_tokens=4_096, seed=3)
"""Plan of drafters' lessons, half of them the target's own text. Long windows at the end too: a model knows nothing of
positions that it was not trained on."""

DRAFTER_TOKENS = {DrafterName.DRAFTER: 20_000_000, DrafterName.EIGHT_LAYERS: 5_000_000}
"""The lessons are read several times over."""

EMBEDDED_HEAD = HeadRecipe(HeadKind.EAGLE3, 2_400_000)
