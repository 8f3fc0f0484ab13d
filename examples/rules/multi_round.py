"""Multi-round verification: the children of each node are judged one after the other, from the root downwards.

With a_j and T_j as in `draftwire.options.trees.sibling_residuals`, where every node's weight is 1, child c_j is
accepted with probability a_j = min(1, T_{j-1}(c_j) / D_j(c_j)), and the path goes on there; after a rejection the next
child is judged against T_j = norm([T_{j-1} - D_j]+). After the last rejection the extra token follows T_k. On a chain
this is the rule `token`.

    draftwire check-rule examples.rules.multi_round:MultiRoundRule examples.rules.multi_round:WithoutReplacementRule

Source: Miao et al. 2023, SpecInfer (arXiv 2305.09781), Algorithm 2, for children that were drawn independently, by
several drafters or by one; Chen et al. 2024, Sequoia (arXiv 2402.12374), Algorithm 2, for those that were drawn without
replacement.
"""

import torch
from typing_extensions import override

from draftwire.options.trees.sibling_residuals import DrawnTreeRule, residuals_of
from draftwire.options.trees.tree_rule import TreeLaw
from draftwire.options.trees.trees import TreeBatch


class MultiRoundRule(DrawnTreeRule):
    """SpecInfer's rule, for children that were drawn independently of each other."""

    name = "multi_round"
    sibling_schemes = (False, True)

    @override
    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        weights = trees.target_probs.new_ones(trees.batch_size, trees.max_nodes + 1, dtype=torch.float64)
        reach = torch.zeros_like(weights)
        reach[:, 0] = 1.0
        stops = reach.clone()
        for level in trees.levels:
            nodes = level.blocks, level.nodes + 1
            residuals, left = residuals_of(trees, level, weights[nodes]), reach[nodes]
            for rank, count in enumerate(level.counts):
                children, chances = (level.blocks[:count], level.children[:count, rank] + 1), residuals.chances(rank)
                reach[children] = stops[children] = left[:count] * chances
                left[:count] *= 1.0 - chances
                residuals.take(rank)
            stops[nodes] = left
        return TreeLaw(stops, weights)


class WithoutReplacementRule(MultiRoundRule):
    """Sequoia's: the same for children that were drawn without replacement."""

    name = "without_replacement"
    sibling_schemes = (True, False)
