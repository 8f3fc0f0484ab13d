"""Measures how often the target would accept a head's drafts on given texts, before training and after it."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from draftwire.training.batches import TrainingBatch

INTERVAL = 1.96
"""Standard errors on either side of a mean, of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Chance that a draft token is accepted if those before it were, by its place in the block."""

    temperature: float
    means: list[float]
    margins: list[float]
    """Half the width of the 95 % interval, over texts."""

    @property
    def accepted_per_round(self) -> float:
        """Mean number of accepted tokens of a whole block, if places were independent."""
        return sum(accumulate(self.means, lambda product, mean: product * mean))

    def __str__(self) -> str:
        """Returns one line with means, margins and the sum."""
        places = "  ".join(f"{mean:.3f} ± {margin:.3f}" for mean, margin in zip(self.means, self.margins, strict=True))
        return f"T = {self.temperature:g}: {places}  ({self.accepted_per_round:.2f} of {len(self.means)} a round)"


@torch.no_grad()
def draft_acceptance(
    head: nn.Module, draft_ids: torch.Tensor | None, lessons: Iterable[TrainingBatch]
) -> list[DraftAcceptance]:
    """Measures a head on at least two texts, as if every draft token before were that of the text.

    Acceptance at temperature 0 is whether both choose the same token, at 1 the overlap of both distributions, which is
    the acceptance probability under the rule `token`. Lessons are as `streamed_lessons` yields them, `draft_ids` as for
    `head_loss`.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Corollary 3.6.
    """
    by_text: dict[float, list[torch.Tensor]] = {0.0: [], 1.0: []}
    for ids, features, target_logits in lessons:
        count = features.shape[1]
        target = target_logits.float().softmax(-1)
        same, overlap = [], []
        for step, logits in enumerate(cast(list[torch.Tensor], head(features.float(), ids))):
            wanted = target[:, 1 + step : 1 + step + count]
            drafted = logits.float().softmax(-1)
            likeliest = logits.argmax(-1) if draft_ids is None else draft_ids[logits.argmax(-1)]
            same.append((likeliest == wanted.argmax(-1)).float().mean(1))
            overlap.append(
                torch.minimum(drafted, wanted if draft_ids is None else wanted[..., draft_ids]).sum(-1).mean(1)
            )
        by_text[0.0].append(torch.stack(same, 1))
        by_text[1.0].append(torch.stack(overlap, 1))
    found = []
    for temperature, parts in by_text.items():
        rows = torch.cat(parts)
        margins = INTERVAL * rows.std(0) / len(rows) ** 0.5
        found.append(DraftAcceptance(temperature, rows.mean(0).tolist(), margins.tolist()))
    return found
