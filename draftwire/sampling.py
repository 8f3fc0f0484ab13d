"""Logits to probabilities: the one definition of what "the target's distribution" means.

The verifier applies it to the target's logits at every draft position and at the bonus position; the drafter applies
it to its own logits before it draws. A parameter that is not listed here is refused, never ignored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0

SMALLEST = 1e-30
"""Smaller temperatures and masses are taken as this: float32 would round them to 0, which means something else."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become a distribution, in the order of the fields.

    Raises:
        InvalidRequestError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    """0 is greedy decoding; at most 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:  # NaN fails every comparison
            raise InvalidRequestError(f"temperature must be in [0, {MAX_TEMPERATURE:g}], not {self.temperature}")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], not {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether one token has all the mass."""
        return self.temperature == 0.0 or self.top_k == 1


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns the distribution of the next token at each position.

    Args:
        logits: `[..., vocab]`, any float dtype; -inf marks impossible tokens.
        params: applied in the order temperature, top-k, top-p.

    Returns:
        `[..., vocab]` probabilities, float64 for float64 logits, else float32. A greedy row is one-hot at the first
        largest logit, so every verification rule turns into exact matching without a case of its own.

    Raises:
        ValueError: a row has a NaN or no finite logit, which is a failure of the model.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    largest = logits.amax(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("a row of logits has a NaN, a +inf, or no finite entry")
    if params.greedy:
        choice = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, choice, 1.0)
    if params.temperature != 1.0:
        # Shifting first keeps tiny temperatures from overflowing; it changes no ratio.
        logits = (logits - largest.unsqueeze(-1)) / max(params.temperature, SMALLEST)
    if 0 < params.top_k < logits.shape[-1]:
        threshold = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    result = logits.softmax(dim=-1)
    return result if params.top_p == 1.0 else _keep_top_mass(result, params.top_p)


def probabilities_by_row(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Returns `probabilities` of rows that each have parameters of their own; see there.

    Args:
        logits: `[rows, vocab]`.
        params: one per row; rows with equal ones are computed together.
    """
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, wanted in enumerate(params):
        rows_of.setdefault(wanted, []).append(row)
    if len(rows_of) == 1:
        return probabilities(logits, params[0])
    result = torch.empty_like(logits, dtype=logits.dtype if logits.dtype == torch.float64 else torch.float32)
    for wanted, rows in rows_of.items():
        result[rows] = probabilities(logits[rows], wanted)
    return result


def _keep_top_mass(probs: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the smallest set of most likely tokens whose mass reaches `top_p`, and renormalises."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(mass_before < max(top_p, SMALLEST), ordered, 0.0)
    result = torch.zeros_like(probs).scatter_(-1, order, kept)
    return result / result.sum(dim=-1, keepdim=True)
