"""Interface of tree rules: a rule accepts a path of each tree of draft tokens and adds one token.

As with rules for blocks, most are stated by their law, which a test can enumerate: the probability that a node is the
last one accepted, given the tree, and the weights of the token that is then added.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.method.distributions import draw
from draftwire.options.trees.token_tree import ROOT
from draftwire.options.trees.trees import TreeBatch, cut_undrawable
from draftwire.verification.rule import Noise


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """A rule's decision about each tree."""

    last_nodes: Tensor
    """`[batch] int64`: the last accepted node, `ROOT` if none is. `TokenTree.path_to` gives the accepted path."""
    extra_tokens: Tensor
    """`[batch] int64`: the token after the accepted ones."""
    leads: Tensor | None = None
    """`[batch, depth + 1] float64`, as in `Outcome`."""


class TreeRule(Protocol):
    """A rule for trees of draft tokens."""

    @property
    def name(self) -> str:
        """Name of the rule."""

    @property
    def is_lossless(self) -> bool:
        """Whether the output is distributed as the target's."""

    @property
    def needs_draft_probs(self) -> bool:
        """Whether the rule reads the distributions that the draft tokens were drawn from. If so, a tree's shape, and
        what is kept of it, must not depend on the values of tokens that are not kept.
        """

    @property
    def is_coupled(self) -> bool:
        """Whether the drafter should draw with the same `Noise.exponentials` as the target."""

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        """Decides about each tree, independently of the rest of the batch.

        Args:
            trees: with positive draft probability for each draft token, if the rule needs draft probabilities.
            noise: the random numbers. Offsets of `exponentials` are the depths of positions: 0 after the committed
                tokens.
        """


def verify_trees(
    rule: TreeRule, trees: TreeBatch, noise: Noise, ends: Sequence[Collection[int]] | None = None
) -> TreeOutcome:
    """Applies a rule to trees after cutting them before tokens that cannot have been drawn.

    Args:
        rule: the rule.
        trees: the trees.
        noise: the random numbers.
        ends: nodes of each tree after which the target has no distribution; a placeholder stands there. Nothing follows
            them. If the last accepted node is one, its token is committed, and the extra token has no meaning: the next
            round fails there, as plain decoding does. That depends on this token and those before it alone, so that the
            law of the text stays exact.
    """
    kept: list[tuple[int, ...]] | None = None
    judged = trees
    if ends is not None and any(ends):
        kept = [shape.ended_at(own) for shape, own in zip(trees.shapes, ends, strict=True)]
        judged = judged.cut(kept)
    if rule.needs_draft_probs:
        judged, drawable = cut_undrawable(judged)
        if drawable is not None and kept is not None:
            drawable = [tuple(own[node] for node in left) for own, left in zip(kept, drawable, strict=True)]
        kept = drawable or kept
    outcome = rule.decide_trees(judged, noise)
    if kept is None:
        return outcome
    nodes = [[ROOT, *own, *[ROOT] * (trees.max_nodes - len(own))] for own in kept]
    numbers = upload(nodes, outcome.last_nodes.device, torch.int64)
    return replace(outcome, last_nodes=numbers.gather(1, outcome.last_nodes.unsqueeze(1) + 1).squeeze(1))


@dataclass(frozen=True, slots=True)
class TreeLaw:
    """Law of a rule's decisions, given the trees."""

    stop_probs: Tensor
    """`[batch, max_nodes + 1] float64`: probability that the last accepted node is the root (none), then each node."""
    start_weights: Tensor
    """`[batch, max_nodes + 1] float64`: the weight of each with which its children are judged; see the rule."""

    def expected_accepted(self, trees: TreeBatch) -> Tensor:
        """Returns the mean number of accepted tokens of each tree, `[batch] float64`."""
        depths = [[0, *shape.depths, *[0] * (trees.max_nodes - len(shape))] for shape in trees.shapes]
        return (self.stop_probs * upload(depths, self.stop_probs.device, torch.float64)).sum(dim=1)


class TreeLawRule(ABC):
    """A tree rule that is stated as a law, and draws from it."""

    name: str
    is_lossless = True
    needs_draft_probs = True
    is_coupled = False
    sibling_schemes: tuple[bool, ...] = (True, False)
    """How siblings may be drawn: whether without replacement. The first is how they are best drawn."""
    takes_paths_alone = False
    """Whether only the root may have several children."""

    @abstractmethod
    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        """Returns the law of the rule's decisions. Pure: no randomness, no state, and no tree affects another."""

    @abstractmethod
    def extra_weights(self, trees: TreeBatch, law: TreeLaw, last_nodes: Tensor) -> Tensor:
        """Returns the weights of the token after the last accepted nodes, `[batch, vocab]`, not normalised.

        Args:
            trees: the trees.
            law: of `tree_law`.
            last_nodes: `[batch] int64`, a node of each tree or `ROOT`.
        """

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        """Decides about each tree by two uniforms: one for the last accepted node, one for the extra token."""
        law, uniforms = self.tree_law(trees), noise.uniforms(2)
        last_nodes = draw(law.stop_probs, uniforms[:, 0]) - 1
        return TreeOutcome(last_nodes, draw(self.extra_weights(trees, law, last_nodes), uniforms[:, 1]))
