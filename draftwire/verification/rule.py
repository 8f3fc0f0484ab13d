"""What a verification rule is: the law of how many draft tokens it accepts, and what the extra token is drawn from.

A rule judges a *block*: draft tokens x_1 .. x_n with the distributions that they were drawn from. It keeps a prefix of
the block and adds one token, such that the result is distributed as if the target had been sampled token by token.

Every rule here is stated by two tensors instead of by coin flips: the probability of each number of accepted tokens
given the block, and the scale of the residual that the extra token is drawn from. That makes a rule a page of tensor
code without randomness, which a test can enumerate exactly, and leaves drawing to one function shared by all rules.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwire.distributions import draw


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks of different lengths, padded to the longest; padded entries may hold anything finite."""

    target_probs: Tensor
    """`[batch, max_len + 1, vocab]` float: the target's distribution before each draft token, then after the last."""
    draft_probs: Tensor
    """`[batch, max_len, vocab]` float: the distribution that each draft token was drawn from."""
    draft_tokens: Tensor
    """`[batch, max_len] int64`, each below `vocab`."""
    lengths: Tensor
    """`[batch] int64`: draft tokens in each block, 0 to `max_len`; 0 is plain decoding."""

    @property
    def inside(self) -> Tensor:
        """`[batch, max_len] bool`: which entries are no padding."""
        return torch.arange(self.draft_tokens.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def ratios(self) -> Tensor:
        """Returns target over draft probability of each draft token, `[batch, max_len] float64`; 0 in the padding.

        A draft token of draft probability 0 cannot have been drawn. `verify` cuts such a block, so none is left here.
        """
        index = self.draft_tokens.unsqueeze(-1)
        target = self.target_probs[:, :-1].gather(-1, index).squeeze(-1).to(torch.float64)
        draft = self.draft_probs.gather(-1, index).squeeze(-1).to(torch.float64)
        return torch.where(self.inside, target / torch.where(draft > 0.0, draft, 1.0), 0.0)


@dataclass(frozen=True, slots=True)
class StopLaw:
    """How a rule decides, given its blocks."""

    accepted_probs: Tensor
    """`[batch, max_len + 1] float64`: probability that exactly i draft tokens are accepted; 0 beyond the length."""
    residual_scales: Tensor
    """`[batch, max_len + 1] float64`: s_i such that the extra token after i < length accepted ones is drawn from
    norm([s_i * target - draft]+). After a fully accepted block it is drawn from the target."""

    def expected_accepted(self) -> Tensor:
        """Returns the mean number of accepted tokens of each block, `[batch] float64`."""
        counts = torch.arange(self.accepted_probs.shape[1], dtype=torch.float64, device=self.accepted_probs.device)
        return self.accepted_probs @ counts


class VerificationRule(Protocol):
    """A lossless rule for chains of draft tokens."""

    @property
    def name(self) -> str:
        """What requests call it."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """Returns how the rule decides. Pure: no randomness, no state, and no block affects another."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule decided about each block."""

    num_accepted: Tensor
    """`[batch] int64`."""
    extra_tokens: Tensor
    """`[batch] int64`: the token after the accepted ones."""


def verify(rule: VerificationRule, blocks: BlockBatch, uniforms: Tensor) -> Outcome:
    """Applies a rule.

    Args:
        rule: how to decide.
        blocks: what to decide about.
        uniforms: `[batch, 2] float64` in [0, 1), independent of each other and of how the blocks were drawn.
    """
    blocks = cut_impossible(blocks)
    law = rule.stop_law(blocks)
    num_accepted = draw(law.accepted_probs, uniforms[:, 0])
    weights = extra_token_weights(blocks, law, num_accepted)
    return Outcome(num_accepted, draw(weights, uniforms[:, 1]))


def cut_impossible(blocks: BlockBatch) -> BlockBatch:
    """Cuts each block before its first token of draft probability 0, which no honest drafter can have drawn."""
    drawn_probs = blocks.draft_probs.gather(-1, blocks.draft_tokens.unsqueeze(-1)).squeeze(-1)
    possible = (drawn_probs > 0.0) & blocks.inside
    lengths = possible.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return BlockBatch(blocks.target_probs, blocks.draft_probs, blocks.draft_tokens, lengths)


def extra_token_weights(blocks: BlockBatch, law: StopLaw, num_accepted: Tensor) -> Tensor:
    """Returns what the extra token is drawn from after `num_accepted` tokens, `[batch, vocab]`, not normalised.

    Reads one row of each block. A residual without mass is only reachable by rounding (the two distributions are
    equal there); the target's own row then stands in for it.
    """
    batch = torch.arange(len(blocks.lengths), device=blocks.lengths.device)
    target = blocks.target_probs[batch, num_accepted]
    max_len = blocks.draft_tokens.shape[1]
    if max_len == 0:
        return target
    draft = blocks.draft_probs[batch, num_accepted.clamp(max=max_len - 1)]
    scale = law.residual_scales[batch, num_accepted].unsqueeze(1).to(target.dtype)
    residual = (scale * target - draft).clamp(min=0.0)
    stopped_inside = (num_accepted < blocks.lengths).unsqueeze(1)
    has_mass = residual.sum(dim=1, keepdim=True) > 0.0
    return torch.where(stopped_inside & has_mass, residual, target)
