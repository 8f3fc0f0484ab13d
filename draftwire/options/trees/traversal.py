"""Traversal verification: block verification on trees of drawn tokens.

Nodes are judged from the leaves to the root, each after its children, siblings in the order in which they were drafted.
With w_j and T_j as in `draftwire.options.trees.sibling_residuals`, where the weight w_0 of the root is 1 and that of a
node its own chance a as a child, a node of k children is accepted with probability w_k. The first node that is accepted
ends the path, and the extra token follows its T_k. The root is accepted with certainty.

Weights do not depend on coins, so the law of the last accepted node has a closed form: with nodes in that order, the
product of its w_k and all 1 - w_k before it.

A chain is decided by the rule `block` itself, from the same random numbers.

Source: Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding" (arXiv 2505.12398), Algorithm 1.
"""

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.options.trees.sibling_residuals import DrawnTreeRule, residuals_of
from draftwire.options.trees.tree_rule import TreeLaw
from draftwire.options.trees.trees import TreeBatch
from draftwire.verification.block import BlockRule

_BLOCK = BlockRule()


class TraversalRule(DrawnTreeRule):
    """Accept the first node, leaves first, whose test succeeds."""

    name = "traversal"

    @override
    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        chains = [block for block, shape in enumerate(trees.shapes) if shape.is_chain]
        if not chains:
            return _law_of_trees(trees)
        stops = trees.target_probs.new_zeros(trees.batch_size, trees.max_nodes + 1, dtype=torch.float64)
        weights = torch.zeros_like(stops)
        of_block = _BLOCK.stop_law(trees.chosen(chains).chains())
        stops[chains], weights[chains] = of_block.accepted_probs, of_block.residual_scales
        others = [block for block, shape in enumerate(trees.shapes) if not shape.is_chain]
        if others:
            law = _law_of_trees(trees.chosen(others))
            stops[others], weights[others] = law.stop_probs, law.start_weights
        return TreeLaw(stops, weights)

    @override
    def extra_weights(self, trees: TreeBatch, law: TreeLaw, last_nodes: Tensor) -> Tensor:
        chains = [block for block, shape in enumerate(trees.shapes) if shape.is_chain]
        weights = super().extra_weights(trees, law, last_nodes)
        if chains:
            scales = law.start_weights.gather(1, last_nodes.unsqueeze(1) + 1).squeeze(1)
            weights[chains] = trees.chosen(chains).chains().residual(last_nodes[chains] + 1, scales[chains])
        return weights


def _law_of_trees(trees: TreeBatch) -> TreeLaw:
    """Returns the law for trees of any shape, level by level from the root."""
    starts = trees.target_probs.new_zeros(trees.batch_size, trees.max_nodes + 1, dtype=torch.float64)
    starts[:, 0] = 1.0
    tests = starts.clone()
    for level in trees.levels:
        residuals = residuals_of(trees, level, starts[level.blocks, level.nodes + 1])
        for rank, count in enumerate(level.counts):
            children = level.blocks[:count], level.children[:count, rank] + 1
            starts[children] = tests[children] = residuals.chances(rank)
            residuals.take(rank)
        tests[level.blocks, level.nodes + 1] = residuals.weights
    in_order = tests[:, 1:].gather(1, trees.post_order)
    none_before = (1.0 - in_order).cumprod(dim=1)
    reach = torch.cat([torch.ones_like(starts[:, :1]), none_before], dim=1)
    stops = torch.zeros_like(starts).scatter_(1, trees.post_order + 1, in_order * reach[:, :-1])
    stops[:, 0] = reach[:, -1]
    return TreeLaw(stops, starts)
