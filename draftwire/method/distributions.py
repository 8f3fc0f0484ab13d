"""The distributions that draft tokens are drawn from, as tensors.

The output is exact because of an invariant that this module keeps: a drafter first quantizes its distribution, as
`Quantization` specifies, and then draws from the very numbers that it sends. `draftwire.method.encoding` encodes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwire.method.encoding import TOTAL_WEIGHT, Decoded, Supports
from draftwire.method.quantization import Quantization

WHOLE_ROW = 8192
"""Up to this many weights, `draw` uses one running sum."""

CHUNK = 128
"""Above `WHOLE_ROW`, `draw` first sums chunks of this many weights."""


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Distributions of draft tokens with an entry for every token."""

    probs: Tensor
    """`[rows, vocab]` float, each row summing to 1."""

    @property
    def vocab_size(self) -> int:
        """Entries of a row."""
        return self.probs.shape[1]

    def probs_of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Returns the probability of `tokens` in `rows`, both `[...] int64`."""
        return self.probs[rows, tokens]

    def residual_mass(self, target_probs: Tensor, target_rows: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        """Returns sum over tokens of [scale * target - draft]+.

        Args:
            target_probs: `[any, vocab]` distributions of the target.
            target_rows: `[...] int64`, rows of `target_probs`.
            rows: `[...] int64`, rows of the drafter's distributions.
            scales: `[...] float64`.

        Returns:
            `[...] float64`.
        """
        excess = target_probs[target_rows]  # a copy, changed in place
        excess *= scales.unsqueeze(-1).to(excess.dtype)
        excess -= self.probs[rows]
        return excess.clamp_(min=0.0).sum(dim=-1).to(torch.float64)

    def subtract_(self, weights: Tensor, rows: Tensor, scales: Tensor) -> None:
        """Replaces `weights` by [weights - scale * draft]+, in place.

        Args:
            weights: `[batch, vocab]`, >= 0.
            rows: `[batch] int64`.
            scales: `[batch] float64`; 0 leaves the weights as they are.
        """
        scaled = self.probs.index_select(0, rows)
        weights.sub_(scaled.mul_(scales.unsqueeze(1).to(scaled.dtype))).clamp_(min=0.0)

    def to(self, device: torch.device) -> "DenseRows":
        """Returns the same on another device."""
        return DenseRows(self.probs.to(device))

    def dense(self) -> Tensor:
        """Returns `[rows, vocab]`."""
        return self.probs


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Distributions of draft tokens that are 0 except for a few tokens each."""

    token_ids: Tensor
    """`[rows, support] int64`: the tokens of each row, each once; unused places hold any valid id."""
    probs: Tensor
    """`[rows, support]` float: their probabilities, above 0 in used places and 0 in unused ones."""
    vocab_size: int

    def probs_of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Returns the probability of `tokens` in `rows`, both `[...] int64`; 0 outside the support."""
        is_token = self.token_ids[rows] == tokens.unsqueeze(-1)
        return torch.where(is_token, self.probs[rows], 0.0).sum(dim=-1)

    def beside(self, target_probs: Tensor, target_rows: Tensor, rows: Tensor) -> "SupportProbs":
        """Returns `rows`, `[...] int64`, beside as many `target_rows` of `target_probs`, `[any, vocab]`."""
        draft, token_ids = self.probs[rows].to(torch.float64), self.token_ids[rows]
        target = target_probs[target_rows.unsqueeze(-1), token_ids].to(torch.float64)
        return SupportProbs(token_ids, draft, target.masked_fill_(draft <= 0.0, 0.0))

    def subtract_(self, weights: Tensor, rows: Tensor, scales: Tensor) -> None:
        """Changes `weights` as `DenseRows` does, writing only the tokens of the support."""
        token_ids = self.token_ids.index_select(0, rows)
        taken = (self.probs.index_select(0, rows) * scales.unsqueeze(1)).to(weights.dtype)  # a product in float64
        # No more than there is. Each token is taken from once: in unused places nothing is taken.
        weights.scatter_add_(1, token_ids, taken.minimum(weights.gather(1, token_ids)).neg_())

    def to(self, device: torch.device) -> "SparseRows":
        """Returns the same on another device."""
        return SparseRows(self.token_ids.to(device), self.probs.to(device), self.vocab_size)

    def dense(self) -> Tensor:
        """Returns `[rows, vocab]`, a copy."""
        result = self.probs.new_zeros(len(self.probs), self.vocab_size)
        return result.scatter_add_(1, self.token_ids, self.probs)


@dataclass(frozen=True, slots=True)
class SupportProbs:
    """Sparse rows of the drafter beside rows of the target: what rules and audit compute with, read once."""

    token_ids: Tensor
    """`[..., support] int64`, as of `SparseRows`."""
    draft: Tensor
    target: Tensor
    """`[..., support] float64` both: probabilities of these tokens, 0 in unused places."""

    def draft_probs_of(self, tokens: Tensor) -> Tensor:
        """Returns the drafter's probability of `tokens`, `[...] int64`; 0 outside the support."""
        return (self.draft * (self.token_ids == tokens.unsqueeze(-1))).sum(dim=-1)

    def residual_mass(self, scales: Tensor) -> Tensor:
        """Returns the same as `DenseRows` of the rows: outside the support the whole target mass remains."""
        inside = (self.target * scales.unsqueeze(-1)).sub_(self.draft).clamp_(min=0.0).sum(dim=-1)
        return inside + scales * (1.0 - self.target.sum(dim=-1)).clamp_(min=0.0)


DraftRows = DenseRows | SparseRows
"""The distributions that the draft tokens of a batch were drawn from, one row per token."""


def no_rows(vocab_size: int) -> DraftRows:
    """Returns empty rows, for blocks without tokens."""
    return SparseRows(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1), vocab_size)


def joined(parts: Sequence[DraftRows]) -> DraftRows:
    """Returns the concatenated rows of several blocks, which are all dense or all sparse."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, DenseRows) for part in parts):
        return DenseRows(torch.cat([part.probs for part in parts]))
    sparse = [part for part in parts if isinstance(part, SparseRows)]
    assert len(sparse) == len(parts), "dense and sparse blocks are verified apart"
    sparse = [part for part in sparse if len(part.probs)] or sparse[:1]
    support = max(part.probs.shape[1] for part in sparse)

    def widened(rows: Tensor) -> Tensor:
        return pad(rows, (0, support - rows.shape[1])) if rows.shape[1] < support else rows

    token_ids, probs = zip(*((widened(part.token_ids), widened(part.probs)) for part in sparse), strict=True)
    return SparseRows(torch.cat(token_ids), torch.cat(probs), sparse[0].vocab_size)


def rows_of(decoded: Decoded) -> DraftRows:
    """Returns decoded distributions as tensors on the CPU. Weights divided by 65,536 are exact in float32."""
    if not isinstance(decoded, Supports):
        own = torch.from_numpy(decoded.probs)
        return DenseRows(pad(own, (0, decoded.vocab_size - own.shape[1])))
    probs = decoded.weights.astype(np.float32) * np.float32(1.0 / TOTAL_WEIGHT)
    return SparseRows(torch.from_numpy(decoded.token_ids), torch.from_numpy(probs), decoded.vocab_size)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Distributions with integer weights."""

    token_ids: Tensor
    """`[rows, support] int64`: each row's likeliest tokens; any valid id in unused places."""
    weights: Tensor
    """`[rows, support] int64`: 1 or more in used places, 0 in unused ones, the same sum in each row."""

    def draw(self, uniforms: Tensor) -> Tensor:
        """Draws a token from each row, with a probability of exactly weight / sum if the sum is a power of 2.

        Args:
            uniforms: `[rows] float64` in [0, 1), multiples of 2^-53; their leading bits are used.

        Returns:
            `[rows] int64`.
        """
        places, _ = _drawn_places(self.weights, uniforms)
        return self.token_ids.gather(1, places).squeeze(1)

    def draw_distinct(self, uniforms: Tensor) -> Tensor:
        """Draws tokens from each row without replacement: each from the weights of those that are left.

        The sum of these is no power of 2, so probabilities are weight / sum up to a relative error of 2^-37 for sums of
        65,536 at most.

        Args:
            uniforms: `[rows, count] float64` in [0, 1), multiples of 2^-53.

        Returns:
            `[rows, count] int64`; -1 where no token is left.
        """
        weights = self.weights.clone()
        drawn = torch.full(uniforms.shape, -1, dtype=torch.int64, device=weights.device)
        for rank in range(uniforms.shape[1]):
            places, totals = _drawn_places(weights, uniforms[:, rank])
            places.clamp_(max=weights.shape[1] - 1)  # where no weight is left
            tokens = self.token_ids.gather(1, places).squeeze(1)
            drawn[:, rank] = torch.where(totals > 0, tokens, -1)
            weights.scatter_(1, places, 0)
        return drawn


def _drawn_places(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a place from each row of integer weights; returns them, `[rows, 1]`, and the sums of the rows, `[rows]`."""
    cumulated = weights.cumsum(dim=1)
    threshold = (uniforms.unsqueeze(1) * cumulated[:, -1:]).to(torch.int64)
    return (cumulated <= threshold).sum(dim=1, keepdim=True), cumulated[:, -1]


def quantize(probs: Tensor, quantization: Quantization, total: int = TOTAL_WEIGHT) -> QuantizedRows:
    """Returns distributions over the likeliest tokens alone, rounded to integer weights.

    Each kept token gets a weight of 1 and its share of the rest, rounded down; the remainder goes to the likeliest.

    Args:
        probs: `[rows, vocab]` float, each row summing to 1 up to rounding.
        quantization: which tokens are kept.
        total: sum of the weights of a row, at least `max_support`.
    """
    top = probs.topk(min(quantization.max_support, probs.shape[1]), dim=1)
    values = top.values.to(torch.float64)  # few operations: CPU caches are cold here, full of weights
    is_kept = (values.cumsum(dim=1).sub_(values) < quantization.mass).logical_and_(values)  # a prefix of the row
    values *= is_kept
    spare = total - is_kept.sum(dim=1, keepdim=True)
    weights = values.mul_(spare / values.sum(dim=1, keepdim=True)).to(torch.int64).add_(is_kept)
    weights[:, 0] += total - weights.sum(dim=1)
    return QuantizedRows(top.indices, weights)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one index from each row of unnormalised weights.

    Args:
        weights: `[batch, vocab]`, >= 0, each row with a positive sum.
        uniforms: `[batch] float64` in [0, 1).

    Returns:
        `[batch] int64`; an index of weight 0 is never drawn. Probabilities are proportional to the weights up to the
        rounding of sums of 128 of them.
    """
    if weights.shape[1] <= WHOLE_ROW:
        cumulated = weights.cumsum(dim=1, dtype=torch.float64)
        total = cumulated[:, -1:]
        return _first_above(cumulated, total, total * uniforms.unsqueeze(1)).squeeze(1)
    # First the chunk, then the index in it: a sum is much faster than a running sum.
    chunks = weights[:, : weights.shape[1] // CHUNK * CHUNK].unflatten(1, (-1, CHUNK)).sum(dim=2)
    rest = weights[:, chunks.shape[1] * CHUNK :].sum(dim=1, keepdim=True)
    cumulated = torch.cat([chunks, rest], dim=1).cumsum(dim=1, dtype=torch.float64)
    total = cumulated[:, -1:]
    threshold = total * uniforms.unsqueeze(1)
    chunk = _first_above(cumulated, total, threshold)
    before = pad(cumulated, (1, 0)).gather(1, chunk)
    index = chunk * CHUNK + torch.arange(CHUNK, device=weights.device)
    inside = weights.gather(1, index.clamp(max=weights.shape[1] - 1)) * (index < weights.shape[1])
    inside_cumulated = inside.cumsum(dim=1, dtype=torch.float64)
    return index.gather(1, _first_above(inside_cumulated, inside_cumulated[:, -1:], threshold - before)).squeeze(1)


def _first_above(cumulated: Tensor, total: Tensor, threshold: Tensor) -> Tensor:
    """Returns the first index where a running sum is above a threshold, `[batch, 1]`; always valid, despite rounding.

    Args:
        cumulated: `[batch, n] float64`.
        total: `[batch, 1] float64`: its last entry, above 0.
        threshold: `[batch, 1] float64`, 0 or more.
    """
    # u * total may round up to total, where no index is left; the largest number below total always has one.
    return torch.searchsorted(cumulated, threshold.minimum(torch.nextafter(total, -total)), right=True)


@dataclass(frozen=True, slots=True)
class RaceOutcome:
    """Result of `race`."""

    winners: Tensor
    """`[batch] int64`: distributed as the normalised weights, if the times are independent exponentials."""
    leads: Tensor
    """`[batch] float64`: by how much the winner's log-weight could fall before another index would win, >= 0."""


def race(weights: Tensor, times: Tensor) -> RaceOutcome:
    """Draws one index from each row of unnormalised weights by the Gumbel-max trick.

    With times e the winner is argmax (log weight - log e), where -log e is Gumbel noise.

    Args:
        weights: `[batch, vocab]`, >= 0, each row with a positive sum.
        times: `[batch, vocab] float64`, > 0.
    """
    best = torch.topk(weights.to(torch.float64) / times, min(2, weights.shape[1]), dim=-1)
    # With a single index the second best is 0: no other index can win.
    seconds = best.values[:, 1] if weights.shape[1] > 1 else torch.zeros_like(best.values[:, 0])
    return RaceOutcome(best.indices[:, 0], best.values[:, 0].log() - seconds.log())
