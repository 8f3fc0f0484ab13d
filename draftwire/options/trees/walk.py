"""Walk verification: the target draws its own token at each node and goes to the child that is this token.

The walk begins after the committed tokens and ends at the first token of the target that is no child; that token is
added. So the text is the target's own, whatever the tree: its shape and what was pruned may depend on anything, the
drafted tokens included, and no distribution is sent. `target_only` draws with fresh random numbers, `coupled` with the
noise of each position; a greedy target's token is the likeliest.

Source: Miao et al. 2023, SpecInfer (arXiv 2305.09781), section 4.3, "naive sampling"; for greedy targets Algorithm 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from draftwire.method.distributions import draw
from draftwire.options.trees.token_tree import ROOT
from draftwire.options.trees.tree_rule import TreeOutcome, TreeRule
from draftwire.options.trees.trees import TreeBatch
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.coupled import CoupledRule, raced
from draftwire.verification.rule import Noise, Outcome, VerificationRule


@dataclass(frozen=True, slots=True)
class Choice:
    """The target's own tokens at some nodes."""

    tokens: Tensor
    """`[nodes] int64`."""
    leads: Tensor | None = None
    """`[nodes] float64`, as in `Outcome`; None for tokens that are not chosen by weights."""


Choose = Callable[[Tensor, Tensor, int], Choice]
"""Takes rows of `TreeBatch.target_probs`, `[nodes] int64`, the trees that they belong to, `[nodes] int64`, and their
depth: draft tokens before them. All nodes of a call are of different trees."""


def walk(trees: TreeBatch, choose: Choose) -> TreeOutcome:
    """Walks down each tree, and reads the target's distributions along its path alone."""
    going = torch.arange(trees.batch_size, device=trees.target_rows.device)
    last_nodes = torch.full_like(going, ROOT)
    extra_tokens = torch.zeros_like(going)
    leads: Tensor | None = None
    for depth in range(trees.depth + 1):
        choice = choose(trees.target_rows[going, last_nodes[going] + 1], going, depth)
        extra_tokens[going] = choice.tokens
        if choice.leads is not None:
            if leads is None:
                leads = choice.leads.new_full((trees.batch_size, trees.depth + 1), torch.inf)
            leads[going, depth] = choice.leads
        children = trees.child_with(going, last_nodes[going], choice.tokens)
        is_found = children > ROOT
        going = going[is_found]
        if not len(going):
            break
        last_nodes[going] = children[is_found]
    return TreeOutcome(last_nodes, extra_tokens, leads)


def walking_rule(rule: VerificationRule, sampling: SamplingParams) -> TreeRule | None:
    """Returns the rule that decides about trees without distributions; None if there is none.

    Args:
        rule: the session's. If it reads no draft distributions and decides about trees, it is used.
        sampling: of the target. The walk is every rule's decision about a greedy target.
    """
    if not rule.needs_draft_probs and callable(getattr(rule, "decide_trees", None)):
        return cast(TreeRule, rule)
    if isinstance(rule, CoupledRule):
        return COUPLED_WALK
    return GREEDY_WALK if sampling.greedy else None


class CoupledWalkRule(CoupledRule):
    """Accept the nodes that are the target's draws with the noise of each position: `coupled` on trees."""

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        """Walks each tree with the target's winner at each position. Reads no draft distributions."""

        def choose(rows: Tensor, blocks: Tensor, depth: int) -> Choice:
            found = raced(trees.target_probs, rows, noise, blocks, torch.full_like(blocks, depth))
            return Choice(found.winners, found.leads)

        return walk(trees, choose)


class TargetOnlyRule:
    """Accept draft tokens while the target, which draws as if nothing had been drafted, draws the same."""

    name = "target_only"
    is_lossless = True
    needs_draft_probs = False
    is_coupled = False

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        """Draws with one uniform for each depth."""
        uniforms = noise.uniforms(trees.depth + 1)

        def choose(rows: Tensor, blocks: Tensor, depth: int) -> Choice:
            return Choice(draw(trees.target_probs.index_select(0, rows), uniforms[blocks, depth]))

        return walk(trees, choose)

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        """Decides about blocks as about trees of one path."""
        outcome = self.decide_trees(TreeBatch.of_chains(blocks), noise)
        return Outcome(outcome.last_nodes + 1, outcome.extra_tokens)


COUPLED_WALK = CoupledWalkRule()
"""Decides where chains are decided by `coupled`."""

GREEDY_WALK = TargetOnlyRule()
"""Decides about trees of greedy sessions: one-hot distributions leave nothing to chance."""
