"""Interface of verification rules: a rule accepts a prefix of each draft block and adds one token.

With a *lossless* rule the text is distributed as if the target had been sampled token by token.

Most rules here are stated by two tensors instead of by coin flips: the probability of each number of accepted tokens
given the block, and the scale of the residual that the extra token is drawn from. That makes a rule a page of tensor
code without randomness, which a test can enumerate exactly, and leaves drawing to one function that all rules share.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from draftwire.method import randomness
from draftwire.method.devices import upload
from draftwire.method.distributions import draw
from draftwire.method.keys import DrawKey
from draftwire.requests.rules import RuleFacts
from draftwire.verification.blocks import BlockBatch, cut_impossible


class Noise(Protocol):
    """The random numbers of one step. Drafters can compute only those of `exponentials`."""

    def uniforms(self, count: int) -> Tensor:
        """Returns independent uniforms in [0, 1) for each block, fresh in every round, `[batch, count] float64`.

        The use of a number should not depend on the rest of the batch: numbers that are always needed come first,
        then those of the tests, counted from the first draft token.
        """

    def exponentials(self, blocks: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        """Returns an exponential variable for every token at given positions of the text, the same in every round.

        Args:
            blocks: `[rows] int64`, indices of blocks.
            offsets: `[rows] int64`, positions relative to the end of their committed tokens.
            vocab_size: size of the vocabulary.

        Returns:
            `[rows, vocab_size] float64`, above 0.
        """


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class KeyedNoise:
    """Random numbers from the sessions' keys, the same on every device and in every batch."""

    keys: Sequence[DrawKey]
    """One for each block."""
    positions: Sequence[int]
    """Committed tokens before each block."""
    device: torch.device

    def uniforms(self, count: int) -> Tensor:
        """Returns the uniforms of this round, `[batch, count] float64`."""
        return upload(randomness.uniforms(self.keys, count), self.device)

    def exponentials(self, blocks: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        """Returns the exponential variables at positions of the text, `[rows, vocab_size] float64`."""
        words, positions = self._places
        return randomness.exponentials(words[blocks], positions[blocks] + offsets, vocab_size)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        words = upload([key.text_words for key in self.keys], self.device)
        return words, upload(self.positions, self.device)


@dataclass(frozen=True, slots=True)
class FixedNoise:
    """Predetermined numbers, for tests and checks."""

    given_uniforms: Tensor
    """`[batch, at least the requested count] float64`."""
    given_exponentials: Tensor | None = None
    """`[batch, max_len + 1, vocab] float64`."""

    def uniforms(self, count: int) -> Tensor:
        """Returns the first given uniforms, `[batch, count] float64`."""
        assert count <= self.given_uniforms.shape[1], "more uniforms are drawn than were given"
        return self.given_uniforms[:, :count]

    def exponentials(self, blocks: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        """Returns the given exponentials of the positions, `[rows, vocab_size] float64`."""
        assert self.given_exponentials is not None, "exponentials are drawn but none were given"
        return self.given_exponentials[blocks, offsets, :vocab_size]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rule's decision about each block."""

    num_accepted: Tensor
    """`[batch] int64`."""
    extra_tokens: Tensor
    """`[batch] int64`: the token after the accepted ones."""
    leads: Tensor | None = None
    """`[batch, max_len + 1] float64`: by how much the log-weight of each emitted token was ahead of the next best,
    infinite beyond the emitted ones; None for rules that do not choose by weights."""

    def num_near_ties(self, bounds: Tensor | float) -> Tensor:
        """Returns how many tokens of each block, `[batch] int64`, were ahead by less than a number or `[batch, 1]`."""
        if self.leads is None:
            return torch.zeros_like(self.num_accepted)
        return (self.leads < bounds).sum(dim=1)


class VerificationRule(Protocol):
    """A rule for chains of draft tokens."""

    @property
    def name(self) -> str:
        """Name of the rule in requests."""

    @property
    def is_lossless(self) -> bool:
        """Whether the output is distributed as the target's."""

    @property
    def needs_draft_probs(self) -> bool:
        """Whether the rule reads the distributions that the draft tokens were drawn from."""

    @property
    def is_coupled(self) -> bool:
        """Whether the drafter should draw with the same `Noise.exponentials` as the target."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Decides about each block, independently of the rest of the batch.

        Args:
            blocks: with positive draft probability for each draft token, if the rule needs draft probabilities.
            noise: the random numbers.
        """


def facts_of(rule: VerificationRule) -> RuleFacts:
    """Returns the declared properties of a rule, for services that do not run it."""
    takes_trees = bool(getattr(rule, "takes_trees", False))  # rules from before there were trees do not say
    return RuleFacts(rule.name, rule.is_lossless, rule.needs_draft_probs, rule.is_coupled, takes_trees)


def is_stateful(rule: VerificationRule) -> bool:
    """Whether a rule says that it remembers what it decided: then each run needs one of its own."""
    return bool(getattr(rule, "is_stateful", False))


def verify(rule: VerificationRule, blocks: BlockBatch, noise: Noise) -> Outcome:
    """Applies a rule to blocks after cutting them before tokens that cannot have been drawn."""
    return rule.decide(cut_impossible(blocks) if rule.needs_draft_probs else blocks, noise)


@dataclass(frozen=True, slots=True)
class StopLaw:
    """Law of a rule's decisions, given the blocks."""

    accepted_probs: Tensor
    """`[batch, max_len + 1] float64`: probability that exactly i draft tokens are accepted; 0 beyond the length."""
    residual_scales: Tensor
    """`[batch, max_len + 1] float64`: s_i such that the extra token after i < length accepted ones is drawn from
    norm([s_i * target - draft]+). After a fully accepted block it is drawn from the target."""

    def expected_accepted(self) -> Tensor:
        """Returns the mean number of accepted tokens of each block, `[batch] float64`."""
        counts = torch.arange(self.accepted_probs.shape[1], dtype=torch.float64, device=self.accepted_probs.device)
        return self.accepted_probs @ counts


class LawRule(ABC):
    """A rule that is stated as a law, and draws from it."""

    name: str
    is_lossless = True
    needs_draft_probs = True
    is_coupled = False

    @abstractmethod
    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        """Returns the law of the rule's decisions. Pure: no randomness, no state, and no block affects another."""

    def extra_weights(self, blocks: BlockBatch, law: StopLaw, num_accepted: Tensor) -> Tensor:
        """Returns the weights of the extra token after `num_accepted` tokens, `[batch, vocab]`, not normalised.

        Reads one row of each block.
        """
        scales = law.residual_scales.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return blocks.residual(num_accepted, scales)

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Decides about each block by two uniforms: one for the number of accepted tokens, one for the extra token."""
        law, (of_stop, of_extra) = self.stop_law(blocks), noise.uniforms(2).unbind(1)
        num_accepted = draw(law.accepted_probs, of_stop) if blocks.has_drafts else torch.zeros_like(blocks.lengths)
        return Outcome(num_accepted, draw(self.extra_weights(blocks, law, num_accepted), of_extra))
