"""Input of verification rules: draft blocks of different lengths with target and draft distributions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.method.distributions import DenseRows, DraftRows, SupportProbs, joined

SMALLEST_SCALE = 1e-30
"""Lower bound of a residual's scale, against division by 0. Smaller scales occur with a probability as small."""


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class BlockBatch:
    """Blocks of different lengths. Numbers per draft token are padded to the longest block; rows over the vocabulary,
    which are large, are neither padded nor copied, but looked up by index.
    """

    target_probs: Tensor
    """`[any, vocab]` float: the target's distributions."""
    draft: DraftRows
    """The distributions that the draft tokens were drawn from."""
    draft_tokens: Tensor
    """`[batch, max_len] int64`, each below `vocab`; any valid id in the padding."""
    lengths: Tensor
    """`[batch] int64`: draft tokens in each block, 0 to `max_len`; 0 is plain decoding."""
    target_rows: Tensor
    """`[batch, max_len + 1] int64`: row in `target_probs` of the distribution before each draft token, then of the one
    after the last; any valid row in the padding."""
    draft_rows: Tensor
    """`[batch, max_len] int64`: row in `draft` of the distribution of each draft token; any valid row in the padding,
    any number if `draft` is empty."""
    is_ragged: bool = True
    """Whether blocks may have different lengths. If not, there is no padding to be left out, as with a single block."""

    @classmethod
    def packed(
        cls,
        target_probs: Tensor,
        drafts: Sequence[DraftRows],
        draft_tokens: Sequence[list[int]],
        target_starts: Sequence[int],
    ) -> "BlockBatch":
        """Returns the batch of blocks of different lengths, on the device of `target_probs`, which are not copied.

        Args:
            target_probs: `[any, vocab]`.
            drafts: `draft_len` rows for each block, all dense or all sparse.
            draft_tokens: `draft_len` tokens for each block.
            target_starts: each block's first row in `target_probs`, of `draft_len + 1` consecutive ones.
        """
        lengths = np.array([len(tokens) for tokens in draft_tokens], dtype=np.int64)
        max_len = int(lengths.max(initial=0))
        numbers = np.zeros((len(lengths), 3 * max_len + 2), dtype=np.int64)  # one transfer for all
        places = np.arange(max_len + 1)
        is_token = places[:-1] < lengths[:, None]
        numbers[:, 0] = lengths
        numbers[:, 1 : max_len + 1][is_token] = list(chain.from_iterable(draft_tokens))
        rows_after = np.minimum(places, lengths[:, None])
        numbers[:, max_len + 1 : 2 * max_len + 2] = rows_after + np.array(target_starts)[:, None]
        numbers[:, 2 * max_len + 2 :][is_token] = np.arange(lengths.sum())
        device = target_probs.device
        parts = upload(numbers, device).split_with_sizes((1, max_len, max_len + 1, max_len), dim=1)
        own_lengths, tokens_of, target_rows, draft_rows = parts
        draft, is_ragged = joined(drafts).to(device), not is_token.all()
        return cls(target_probs, draft, tokens_of, own_lengths[:, 0], target_rows, draft_rows, is_ragged)

    @classmethod
    def padded(cls, target_probs: Tensor, draft_probs: Tensor, draft_tokens: Tensor, lengths: Tensor) -> "BlockBatch":
        """Returns the batch of blocks whose dense rows are padded to the longest block.

        Args:
            target_probs: `[batch, max_len + 1, vocab]`.
            draft_probs: `[batch, max_len, vocab]`.
            draft_tokens: `[batch, max_len] int64`.
            lengths: `[batch] int64`.
        """
        batch, max_len = draft_tokens.shape
        target_rows = torch.arange(batch * (max_len + 1), device=lengths.device).reshape(batch, max_len + 1)
        draft_rows = torch.arange(batch * max_len, device=lengths.device).reshape(batch, max_len)
        rows = DenseRows(draft_probs.flatten(0, 1))
        return cls(target_probs.flatten(0, 1), rows, draft_tokens, lengths, target_rows, draft_rows)

    @property
    def batch_size(self) -> int:
        """Number of blocks."""
        return self.draft_tokens.shape[0]

    @property
    def max_len(self) -> int:
        """Length of the longest block, padding included."""
        return self.draft_tokens.shape[1]

    @property
    def has_drafts(self) -> bool:
        """Whether any block has a draft token."""
        return self.max_len > 0

    @cached_property
    def positions(self) -> Tensor:
        """`[max_len] int64`: 0, 1, ... for the draft tokens of a block."""
        return torch.arange(self.max_len, device=self.lengths.device)

    @cached_property
    def inside(self) -> Tensor:
        """`[batch, max_len] bool`: False in the padding."""
        return self.positions < self.lengths.unsqueeze(1)

    def target_probs_of_drafts(self) -> Tensor:
        """Returns the target's probability of each draft token, `[batch, max_len] float64`; anything in padding."""
        return self.target_probs[self.target_rows[:, :-1], self.draft_tokens].to(torch.float64)

    def draft_probs_of_drafts(self) -> Tensor:
        """Returns the drafter's probability of each draft token, `[batch, max_len] float64`; anything in padding."""
        return self._draft_of_drawn

    @cached_property
    def _draft_of_drawn(self) -> Tensor:
        if self.support is not None:
            return self.support.draft_probs_of(self.draft_tokens)
        return self.draft.probs_of(self.draft_rows, self.draft_tokens).to(torch.float64)

    @cached_property
    def support(self) -> SupportProbs | None:
        """`[batch, max_len, support]`: target and draft where draft tokens may have been drawn; None for dense rows."""
        if isinstance(self.draft, DenseRows):
            return None
        return self.draft.beside(self.target_probs, self.target_rows[:, :-1], self.draft_rows)

    def ratios(self) -> Tensor:
        """Returns target over draft probability of each draft token, `[batch, max_len] float64`; 0 in the padding.

        A draft token of draft probability 0 cannot have been drawn. `verify` cuts blocks before such tokens.
        """
        ratios = self.target_probs_of_drafts() / self.draft_probs_of_drafts()
        return ratios.masked_fill_(~self.inside, 0.0) if self.is_ragged else ratios

    def log_ratios(self) -> Tensor:
        """Returns the logarithms of `ratios`, `[batch, max_len] float64`; -inf in the padding.

        Never infinite or NaN where a ratio overflows, which it does if a draft probability is denormal.
        """
        logs = self.target_probs_of_drafts().log() - self.draft_probs_of_drafts().log()
        return logs.masked_fill_(~self.inside, -torch.inf) if self.is_ragged else logs

    def residual_mass(self, scales: Tensor) -> Tensor:
        """Returns sum over tokens of [scale * target - draft]+ at each position.

        Args:
            scales: `[batch, max_len] float64`, for the distributions before each draft token.

        Returns:
            `[batch, max_len] float64`; 0 in the padding.
        """
        if self.support is not None:
            mass = self.support.residual_mass(scales)
            return mass.masked_fill_(~self.inside, 0.0) if self.is_ragged else mass
        assert isinstance(self.draft, DenseRows), "rows that are not dense have a support"
        if not self.is_ragged:
            return self.draft.residual_mass(self.target_probs, self.target_rows[:, :-1], self.draft_rows, scales)
        inside = self.inside.nonzero(as_tuple=True)  # no rows are read for padding
        rows = self.target_rows[inside], self.draft_rows[inside]
        mass = self.draft.residual_mass(self.target_probs, *rows, scales[inside])
        return torch.zeros_like(scales).index_put_(inside, mass)

    def target_row_after(self, num_accepted: Tensor) -> Tensor:
        """Returns a copy of the target's distribution after so many draft tokens of each block, `[batch, vocab]`.
        `num_accepted` is `[batch] int64`, 0 to the block's length.
        """
        rows = self.target_rows.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return self.target_probs.index_select(0, rows)

    def residual(self, num_accepted: Tensor, scales: Tensor) -> Tensor:
        """Returns the residual after the first `num_accepted` draft tokens: [scale * target - draft]+.

        After a whole block, and where the residual is 0, which only rounding can cause, returns the target's own
        distribution.

        Args:
            num_accepted: `[batch] int64`, 0 to the block's length.
            scales: `[batch] float64`.

        Returns:
            `[batch, vocab]` weights, not normalised.
        """
        weights = self.target_row_after(num_accepted)
        if not self.has_drafts:
            return weights
        is_inside = num_accepted < self.lengths
        rows = self.draft_rows.gather(1, num_accepted.clamp(max=self.max_len - 1).unsqueeze(1)).squeeze(1)
        # [target - draft / scale]+ is the same up to a factor, and does not change tokens that the drafter cannot draw.
        self.draft.subtract_(weights, rows, scales.clamp(min=SMALLEST_SCALE).reciprocal_().mul_(is_inside))
        is_empty = weights.sum(dim=1) <= 0.0
        if bool(is_empty.any()):
            weights[is_empty] = self.target_row_after(num_accepted)[is_empty]
        return weights

    def cut(self, lengths: Tensor) -> "BlockBatch":
        """Returns the blocks shortened to `lengths`, `[batch] int64`."""
        return replace(self, lengths=lengths, is_ragged=True)

    def padded_target_probs(self) -> Tensor:
        """Returns a copy of all of the target's distributions, `[batch, max_len + 1, vocab]`."""
        return self.target_probs[self.target_rows]

    def padded_draft_probs(self) -> Tensor:
        """Returns a copy of all of the drafter's distributions, `[batch, max_len, vocab]`."""
        if not self.has_drafts:
            return self.target_probs.new_zeros(self.batch_size, 0, self.target_probs.shape[1])
        return self.draft.dense()[self.draft_rows]


class ShapedBatch(Protocol):
    """Blocks of draft tokens that are no chains, with target and draft distributions."""

    @property
    def batch_size(self) -> int:
        """Number of blocks."""

    def drawn_one_by_one(self, block: int) -> BlockBatch:
        """Returns the tokens of one block, each as a block of its own with the distribution that it was drawn from."""


def cut_impossible(blocks: BlockBatch) -> BlockBatch:
    """Cuts each block before its first token of draft probability 0, which no honest drafter can have drawn."""
    if not blocks.has_drafts:
        return blocks
    is_possible = blocks.draft_probs_of_drafts() > 0.0
    if blocks.is_ragged:
        is_possible |= ~blocks.inside
    if bool(is_possible.all()):
        return blocks
    return blocks.cut(blocks.lengths.minimum(is_possible.to(torch.int64).cumprod(dim=1).sum(dim=1)))
