"""k-sequential selection: k paths that were drawn independently, judged by one threshold at each node.

At a node where m paths are still followed, with p the target's and q the drafter's distribution,

    b(r) = sum over tokens of min(q, p / r),  r the least in [1, m] with 1 - (1 - b(r))^m <= r b(r)

each path's next token x is accepted with probability min(1, p(x) / (r q(x))), one path after the other. After the first
accepted one the paths that have the same token there are followed; after the last rejection the extra token follows

    p - min(q, p / r) (1 - (1 - b)^m) / b

At a node it accepts at least 1 - 1/e of what is possible. With one path it is the rule `token`.

    draftwire check-rule examples.rules.k_seq:KSeqRule

Source: Sun et al. 2023, SpecTr (arXiv 2310.15141), Algorithm 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_rule import TreeLaw, TreeLawRule
from draftwire.options.trees.trees import TreeBatch

BISECTIONS = 60
"""Steps to find r from above, where every r is exact."""


class KSeqRule(TreeLawRule):
    """SpecTr's rule, for trees of independent paths: only the root has several children, which may be equal tokens.

    All trees of a batch have the same shape. Of equal beginnings the first path's nodes stand for all.

    Raises:
        ValueError: the trees are others.
    """

    name = "k_seq"
    sibling_schemes = (False,)
    takes_paths_alone = True

    @override
    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        reach = trees.target_probs.new_zeros(trees.batch_size, trees.max_nodes + 1, dtype=torch.float64)
        reach[:, 0] = 1.0
        stops = reach.clone()
        paths = _Paths.of(trees)
        for node in range(ROOT, trees.max_nodes):
            step = paths.step(node)
            left = reach[:, node + 1]
            for path, child in enumerate(step.children):
                chances = torch.where(step.is_followed[:, path], step.chances(child), 0.0)
                reach.scatter_add_(1, step.first_alike(path).unsqueeze(1) + 1, (left * chances).unsqueeze(1))
                left = left * (1.0 - chances)
            stops[:, node + 1] = left
        return TreeLaw(stops, torch.ones_like(stops))

    @override
    def extra_weights(self, trees: TreeBatch, law: TreeLaw, last_nodes: Tensor) -> Tensor:
        paths = _Paths.of(trees)
        weights = torch.zeros(trees.batch_size, trees.target_probs.shape[1], dtype=torch.float64)
        for node in range(ROOT, trees.max_nodes):
            is_last = last_nodes == node
            if bool(is_last.any()):
                weights[is_last] = paths.step(node).residual()[is_last]
        return weights


@dataclass(frozen=True, slots=True)
class _Step:
    """Input of the decisions after one node of each tree."""

    target: Tensor
    """`[batch, vocab] float64`."""
    draft: Tensor
    """The same of the drafter; zeros where no path goes on."""
    tokens: Tensor
    """`[batch, nodes] int64`."""
    children: tuple[int, ...]
    """The next nodes of the paths that are as long."""
    is_followed: Tensor
    """`[batch, children] bool`: whether each path begins as the node's own."""
    ratio: Tensor
    """`[batch] float64`: r."""

    def chances(self, child: int) -> Tensor:
        """Returns the chance of a path's next token, `[batch] float64`."""
        own = self.tokens[:, child : child + 1]
        target, draft = (rows.gather(1, own).squeeze(1) for rows in (self.target, self.draft))
        return (target / (self.ratio * draft)).clamp(max=1.0)

    def first_alike(self, path: int) -> Tensor:
        """Returns the first followed path's next node that is the same token, `[batch] int64`."""
        own = self.tokens[:, list(self.children)]
        is_alike = self.is_followed & (own == own[:, path : path + 1])
        nodes = torch.tensor(self.children)
        return torch.where(is_alike, nodes, self.tokens.shape[1]).amin(dim=1).clamp(max=self.tokens.shape[1] - 1)

    def residual(self) -> Tensor:
        """Returns the weights of the extra token, `[batch, vocab] float64`."""
        taken = _overlap(self.target, self.draft, self.ratio)
        mass = taken.sum(dim=1)
        accepted = _accepted(mass, self.is_followed.sum(dim=1))
        scale = torch.where(mass > 0.0, accepted / torch.where(mass > 0.0, mass, 1.0), 0.0)
        left = (self.target - taken * scale.unsqueeze(1)).clamp(min=0.0)
        return torch.where(left.sum(dim=1, keepdim=True) > 0.0, left, self.target)


@dataclass(frozen=True, slots=True)
class _Paths:
    """Trees of one shape whose nodes are on paths from the root."""

    trees: TreeBatch
    shape: TokenTree

    @classmethod
    def of(cls, trees: TreeBatch) -> "_Paths":
        shapes = set(trees.shapes)
        if trees.is_distinct or len(shapes) > 1:
            raise ValueError("k_seq needs independent paths, in trees of the same shape")
        shape = shapes.pop() if shapes else TokenTree(())
        if any(len(shape.children(node)) > 1 for node in range(len(shape))):
            raise ValueError("k_seq needs paths: only the root may have several children")
        return cls(trees, shape)

    def step(self, node: int) -> _Step:
        """Returns what is judged after a node."""
        trees, own = self.trees, self.shape.path_to(node)
        paths = [self.shape.path_to(child) for child in range(len(self.shape))]
        following = [path for path in paths if len(path) == len(own) + 1]
        tokens = trees.draft_tokens
        is_followed = torch.ones(trees.batch_size, len(following), dtype=torch.bool)
        for place, step in enumerate(own):
            is_followed &= tokens[:, [path[place] for path in following]] == tokens[:, step : step + 1]
        target = trees.target_probs[trees.target_rows[:, node + 1]].to(torch.float64)
        draft = torch.zeros_like(target)
        if following:
            first = torch.tensor([path[-1] for path in following])[is_followed.to(torch.int8).argmax(dim=1)]
            rows = trees.draft_rows.gather(1, first.unsqueeze(1)).squeeze(1)
            draft = trees.draft.dense()[rows].to(torch.float64) * is_followed.any(dim=1, keepdim=True)
        ratio = _ratio(target, draft, is_followed.sum(dim=1))
        return _Step(target, draft, tokens, tuple(path[-1] for path in following), is_followed, ratio)


def _overlap(target: Tensor, draft: Tensor, ratio: Tensor) -> Tensor:
    return torch.minimum(draft, target / ratio.unsqueeze(1))


def _accepted(mass: Tensor, num_paths: Tensor) -> Tensor:
    """Returns the probability that a path is accepted, before they are drawn, `[batch] float64`."""
    return 1.0 - (1.0 - mass).clamp(min=0.0) ** num_paths


def _ratio(target: Tensor, draft: Tensor, num_paths: Tensor) -> Tensor:
    """Returns r for each row, `[batch] float64`."""
    low = torch.ones(len(target), dtype=torch.float64)
    high = num_paths.to(torch.float64).clamp(min=1.0)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        mass = _overlap(target, draft, middle).sum(dim=1)
        is_enough = _accepted(mass, num_paths) <= middle * mass
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high
