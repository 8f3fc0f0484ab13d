"""Statistics of draft tokens that show whether they were drawn from the declared distributions.

With q the declared and p the target's distribution, two numbers of a draft token x have mean zero if x is drawn from q:

    acceptance   min(1, p(x) / q(x)) - sum over y of min(p(y), q(y))
    surprise     -log q(x) - sum over y of -q(y) log q(y)

Both distributions are known before x is drawn, so the variances are known too. That holds whatever a rule decides.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from draftwire.verification.blocks import BlockBatch

SMALLEST_PROB = 2.0**-16
"""Probabilities are clamped to this in the surprise and in its mean alike, so their difference keeps mean zero. It is
the smallest that 16-bit weights can express."""

MAX_SURPRISE = -math.log(SMALLEST_PROB)
"""Nats."""


class Statistic(Enum):
    """A statistic of a draft token."""

    ACCEPTANCE = "acceptance"
    """Probability that token verification accepts the token: 0 to 1."""
    SURPRISE = "surprise"
    """Negative log of the declared probability: 0 to `MAX_SURPRISE` nats."""


@dataclass(frozen=True, slots=True)
class AuditSums:
    """Sums over draft tokens. The sums of consecutive blocks of one drafter can be added."""

    num_positions: int = 0
    """Draft tokens that count: those whose declared distribution is not one-hot."""
    acceptance_sum: float = 0.0
    """Sum of acceptance minus its mean."""
    acceptance_variance: float = 0.0
    """Sum of the variances of acceptance if the tokens were drawn as declared."""
    surprise_sum: float = 0.0
    """Sum of surprise minus its mean, nats."""
    surprise_variance: float = 0.0
    """Sum of the variances of surprise, nats squared."""

    def __add__(self, other: "AuditSums") -> "AuditSums":
        return AuditSums(
            self.num_positions + other.num_positions,
            self.acceptance_sum + other.acceptance_sum,
            self.acceptance_variance + other.acceptance_variance,
            self.surprise_sum + other.surprise_sum,
            self.surprise_variance + other.surprise_variance,
        )

    def excess(self, statistic: Statistic) -> float:
        """Returns by how much a statistic is above its mean, per position; 0 for an honest drafter in the long run."""
        total = self.acceptance_sum if statistic is Statistic.ACCEPTANCE else self.surprise_sum
        return total / self.num_positions if self.num_positions else 0.0


@torch.inference_mode()
def audit_sums(blocks: BlockBatch) -> list[AuditSums]:
    """Returns the audit sums of each block of a batch, whichever of its tokens are accepted.

    Runs on the torch thread. Reads the support of sparse rows, and of dense rows the vocabulary, block by block.
    Computes in float64 with one transfer to the host.

    The rows need not sum to 1 exactly: means and variances are those of a draw from the row divided by its sum, which
    is how `distributions.draw` draws. A token of declared probability 0 counts as drawn with the smallest.

    Args:
        blocks: as received, not cut before impossible tokens.

    Returns:
        Sums for each of the `batch_size` blocks, all finite; zeros for empty blocks.
    """
    rows = blocks.draft.probs
    if not blocks.has_drafts or len(rows) == 0:
        return [AuditSums()] * blocks.batch_size
    if blocks.support is not None:
        is_choice, means, variances = _moments(blocks.support.target, blocks.support.draft)
    else:  # block by block: a copy of all the rows would be large
        per_block = [
            _moments(blocks.target_probs[target_rows], rows[draft_rows])
            for target_rows, draft_rows in zip(blocks.target_rows[:, :-1], blocks.draft_rows, strict=True)
        ]
        is_choice, means, variances = (torch.stack(parts, dim=-2) for parts in zip(*per_block, strict=True))
    drawn = _statistics(blocks.target_probs_of_drafts(), blocks.draft_probs_of_drafts())
    if blocks.is_ragged:
        is_choice = is_choice & blocks.inside
    terms = torch.cat([is_choice.unsqueeze(0), drawn - means, variances])
    sums = terms.masked_fill_(~is_choice, 0.0).sum(dim=-1)  # padding may be NaN
    return [
        AuditSums(int(count), acceptance, acceptance_variance, surprise, surprise_variance)
        for count, acceptance, surprise, acceptance_variance, surprise_variance in sums.T.tolist()
    ]


def _statistics(target: Tensor, draft: Tensor) -> Tensor:
    """Returns acceptance and surprise of tokens.

    Args:
        target: `[...] float64`, their probabilities under the target.
        draft: `[...] float64`, their declared probabilities.

    Returns:
        `[2, ...] float64`, finite.
    """
    tiny = torch.finfo(torch.float64).tiny
    return torch.stack([(target / draft.clamp(min=tiny)).clamp_(max=1.0), -draft.clamp(SMALLEST_PROB, 1.0).log_()])


def _moments(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns whether a row has several possible tokens, and means and variances of the statistics of a draw from it.

    Args:
        target: `[..., entries]` target probabilities of the tokens of each row.
        draft: `[..., entries]` their declared weights; tokens of weight 0 do not count.

    Returns:
        `[...] bool`, `[2, ...] float64`, `[2, ...] float64`.
    """
    weights = draft.to(torch.float64)
    values = _statistics(target.to(torch.float64), weights)
    is_choice = (weights > 0.0).sum(dim=-1) > 1
    weights = weights / weights.sum(dim=-1, keepdim=True)
    means = (values * weights).sum(dim=-1)
    values -= means.unsqueeze(-1)  # centred before squaring: the variance cannot become negative
    return is_choice, means, values.square_().mul_(weights).sum(dim=-1)
