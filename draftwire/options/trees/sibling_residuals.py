"""The step that rules for drawn trees share: what is left of the target's law after each child of a node.

With p the target's distribution after a node, w the node's weight, c_1, c_2, ... its children and D_j the distribution
that c_j was drawn from:

    T_0 = p
    a_j = min(1, w_{j-1} T_{j-1}(c_j) / D_j(c_j))                the chance of the child, given that it is judged
    R_j = [w_{j-1} T_{j-1} - D_j]+,  S_j = sum of R_j            the residual and its mass
    w_j = S_j / (S_j + 1 - w_{j-1}),  T_j = R_j / S_j            if S_j = 0: T_j = T_{j-1}, and 0 / 0 = 1

Of siblings that were drawn without replacement, D_j is the drafter's distribution without c_1 .. c_{j-1}, normalised.
Only the product w_j T_j is kept: it is R_j / (S_j + 1 - w_{j-1}).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.method.distributions import DenseRows, SparseRows
from draftwire.options.trees.tree_rule import TreeLaw, TreeLawRule
from draftwire.options.trees.trees import NOTHING, TreeBatch, TreeLevel


class SiblingResiduals(ABC):
    """The products w_j T_j of some nodes, which judge their children one after the other."""

    def __init__(self, trees: TreeBatch, level: TreeLevel, weights: Tensor) -> None:
        """Starts before the first child; see `residuals_of`."""
        self.weights = weights.clone()
        """`[inner] float64`: w_j of each."""
        self._is_distinct = trees.is_distinct
        self._counts = level.counts
        children = torch.where(level.children == NOTHING, 0, level.children)
        blocks = level.blocks.unsqueeze(1)
        self._tokens = trees.draft_tokens[blocks, children]
        self._draft_rows = trees.draft_rows[blocks, children]
        self._target_rows = trees.target_rows[level.blocks, level.nodes + 1]

    @abstractmethod
    def chances(self, rank: int) -> Tensor:
        """Returns a_j of the children of a rank, from 0, `[counts[rank]] float64`."""

    @abstractmethod
    def take(self, rank: int) -> None:
        """Goes on from w_{j-1} T_{j-1} to w_j T_j for the nodes that have a child of a rank."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Returns w_j T_j, `[inner, vocab]`."""

    def _next(self, mass: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Sets w_j of the first nodes from S_j; returns S_j + 1 - w_{j-1}, or 1 where that is 0, and where it is.

        It is to be divided by: its inverse may be infinite, and a residual times that is no number where it is 0.
        """
        weights = self.weights[:count]
        total = mass + (1.0 - weights)  # in this order: (mass + 1) - weight would lose a small mass
        is_equal = total <= 0.0  # the target's law is the drafter's, and the child is accepted with certainty
        self.weights[:count] = torch.where(is_equal, 1.0, mass / total)
        return torch.where(is_equal, 1.0, total), is_equal


def residuals_of(trees: TreeBatch, level: TreeLevel, weights: Tensor) -> SiblingResiduals:
    """Returns the residuals of nodes before their first child.

    Args:
        trees: the batch.
        level: the nodes, each with a child.
        weights: `[inner] float64`, their w_0.
    """
    if isinstance(trees.draft, SparseRows):
        return _SparseResiduals(trees, trees.draft, level, weights)
    return _DenseResiduals(trees, trees.draft, level, weights)


class DrawnTreeRule(TreeLawRule):
    """A rule for drawn trees whose extra token follows T_k, of the k children of the last accepted node."""

    @override
    def extra_weights(self, trees: TreeBatch, law: TreeLaw, last_nodes: Tensor) -> Tensor:
        level = trees.level_of(last_nodes.tolist())
        rows = trees.target_rows.gather(1, last_nodes.unsqueeze(1) + 1).squeeze(1)
        weights = trees.target_probs.index_select(0, rows)
        if len(level.blocks):
            residuals = residuals_of(trees, level, law.start_weights[level.blocks, level.nodes + 1])
            for rank in range(len(level.counts)):
                residuals.take(rank)
            left = residuals.rows()
            is_empty = left.sum(dim=1, keepdim=True) <= 0.0  # which only rounding can cause where this is drawn from
            weights[level.blocks] = torch.where(is_empty, weights[level.blocks], left)
        return weights


class _DenseResiduals(SiblingResiduals):
    def __init__(self, trees: TreeBatch, draft: DenseRows, level: TreeLevel, weights: Tensor) -> None:
        super().__init__(trees, level, weights)
        self._draft = draft
        self._scaled = trees.target_probs[self._target_rows]  # a copy, changed in place
        self._scaled *= weights.unsqueeze(1).to(self._scaled.dtype)
        self._own = draft.probs[self._draft_rows[:, 0]]  # a copy: D_j times a constant
        self._rest = torch.ones_like(weights)  # its sum

    def chances(self, rank: int) -> Tensor:
        count = self._counts[rank]
        tokens = self._tokens[:count, rank : rank + 1]
        target = self._scaled[:count].gather(1, tokens).squeeze(1).to(torch.float64)
        draft = self._own[:count].gather(1, tokens).squeeze(1).to(torch.float64) / self._rest[:count]
        return (target / draft).clamp_(max=1.0)

    def take(self, rank: int) -> None:
        count = self._counts[rank]
        own, scaled = self._own[:count], self._scaled[:count]
        # A sum of a few float32 is one, also below the normal ones, where its inverse would be infinite.
        residual = (scaled - own / self._rest[:count].unsqueeze(1).to(own.dtype)).clamp_(min=0.0)
        mass = residual.sum(dim=1, dtype=torch.float64)
        total, is_equal = self._next(mass, count)
        residual /= total.unsqueeze(1).to(residual.dtype)
        self._scaled[:count] = torch.where(is_equal.unsqueeze(1), scaled, residual)
        following = self._counts[rank + 1] if rank + 1 < len(self._counts) else 0
        if not following:
            return
        if self._is_distinct:
            own.scatter_(1, self._tokens[:count, rank : rank + 1], 0.0)
            self._rest[:count] = own.sum(dim=1, dtype=torch.float64)
        else:
            self._own[:following] = self._draft.probs[self._draft_rows[:following, rank + 1]]

    def rows(self) -> Tensor:
        return self._scaled


class _SparseResiduals(SiblingResiduals):
    """Reads the target on the support of the drafter's distribution alone: elsewhere w_j T_j stays in proportion."""

    def __init__(self, trees: TreeBatch, draft: SparseRows, level: TreeLevel, weights: Tensor) -> None:
        super().__init__(trees, level, weights)
        rows = self._draft_rows[:, 0]
        self._target_probs = trees.target_probs
        self._ids = draft.token_ids[rows]  # those of unused places may stand there twice
        self._own = draft.probs[rows].to(torch.float64)
        self._is_used = self._own > 0.0
        self._rest = torch.ones_like(weights)
        target = trees.target_probs[self._target_rows.unsqueeze(1), self._ids].to(torch.float64)
        target = torch.where(self._is_used, target, 0.0)
        self._outside = (1.0 - target.sum(dim=1)).clamp_(min=0.0)  # mass of p where the drafter draws nothing
        self._factor = weights.clone()  # w_j T_j / p there
        self._scaled = target * weights.unsqueeze(1)

    def _at(self, values: Tensor, rank: int) -> Tensor:
        """Returns the values of the children's tokens, `[counts[rank]]`."""
        count = self._counts[rank]
        is_token = self._ids[:count] == self._tokens[:count, rank : rank + 1]
        return torch.where(is_token, values[:count], 0.0).sum(dim=1)

    def chances(self, rank: int) -> Tensor:
        draft = self._at(self._own, rank) / self._rest[: self._counts[rank]]
        return (self._at(self._scaled, rank) / draft).clamp_(max=1.0)

    def take(self, rank: int) -> None:
        count = self._counts[rank]
        own, scaled = self._own[:count], self._scaled[:count]
        residual = (scaled - own / self._rest[:count].unsqueeze(1)).clamp_(min=0.0)
        mass = residual.sum(dim=1) + self._factor[:count] * self._outside[:count]
        total, is_equal = self._next(mass, count)
        self._scaled[:count] = torch.where(is_equal.unsqueeze(1), scaled, residual / total.unsqueeze(1))
        self._factor[:count] /= total
        if self._is_distinct:
            own.masked_fill_(self._ids[:count] == self._tokens[:count, rank : rank + 1], 0.0)
            self._rest[:count] = own.sum(dim=1)

    def rows(self) -> Tensor:
        target = self._target_probs[self._target_rows]
        outside = target * self._factor.unsqueeze(1).to(target.dtype)
        inside = torch.zeros_like(target).scatter_add_(1, self._ids, self._scaled.to(target.dtype))
        is_inside = torch.zeros_like(target).scatter_add_(1, self._ids, self._is_used.to(target.dtype)) > 0.0
        return torch.where(is_inside, inside, outside)
