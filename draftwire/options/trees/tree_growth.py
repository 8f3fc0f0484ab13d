"""Token trees that grow by one forward pass of the drafter after the other, found from the drafter's distributions.

Only for the walk (greedy, `target_only`, `coupled`), which is exact for any tree. `frontier` names the nodes that the
drafter reads next, `ROOT` first; `expand` takes what follows them; an empty frontier ends the tree, and `grown` is the
result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.options.trees.growth_plan import GrowthPlan
from draftwire.options.trees.token_tree import ROOT


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A drafted tree."""

    token_ids: list[int]
    """The token of each node."""
    parents: tuple[int, ...]
    """Its shape, as `TokenTree.parents`."""
    numbers: tuple[int, ...]
    """Numbers of the nodes in the growth."""


class BestFirstGrowth:
    """Grows the tree of the best chances."""

    def __init__(self, plan: GrowthPlan) -> None:
        self._plan = plan
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []  # logarithms of chances
        self._depths: list[int] = []
        self._read: set[int] = set()
        self._best: list[int] = []  # of the best tree so far, the best first, of equal ones the older
        self._passes = 0
        self._first_new = 0
        self._is_over = plan.num_nodes == 0 or plan.depth == 0

    def frontier(self) -> list[int]:
        """Returns the nodes that the drafter reads next, the best first."""
        if self._is_over or self._passes == self._plan.num_passes:
            return []
        if not self._passes:
            return [ROOT]
        open_nodes = [
            node
            for node in self._best
            if node not in self._read and self._depths[node] < self._plan.depth and self._may_read(node)
        ]
        return open_nodes[: self._plan.per_pass]

    def _may_read(self, node: int) -> bool:
        """Whether a node can be in the frontier: it was found by the last pass."""
        return node >= self._first_new

    def token(self, node: int) -> int:
        """Returns the token of a node."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """Returns the parent of a node."""
        return self._parents[node]

    def expand(self, nodes: Sequence[int], log_chances: Tensor) -> None:
        """Looks at the likeliest children of the nodes of the frontier.

        Args:
            nodes: the frontier.
            log_chances: `[len(nodes), vocab]` logarithms of the estimated chances that each token is accepted there,
                whose sum is at most 1; -inf for tokens that cannot be.
        """
        self._passes += 1
        self._read.update(nodes)
        self._first_new = len(self._tokens)
        top = log_chances.topk(min(self._plan.width, log_chances.shape[1]), dim=1)
        before = [0.0 if node == ROOT else self._scores[node] for node in nodes]
        scores = (top.values.double().cpu() + torch.tensor(before, dtype=torch.float64).unsqueeze(1)).flatten()
        best = scores.topk(min(self._plan.num_nodes, len(scores)))  # no others can be kept
        tokens = top.indices.flatten()[best.indices.to(top.indices.device)].tolist()
        owners = (best.indices // top.indices.shape[1]).tolist()
        for score, token, owner in zip(best.values.tolist(), tokens, owners, strict=True):
            if score == -math.inf:
                break
            self._tokens.append(token)
            self._parents.append(nodes[owner])
            self._scores.append(score)
            self._depths.append(1 if nodes[owner] == ROOT else self._depths[nodes[owner]] + 1)
        order = sorted(range(len(self._scores)), key=lambda node: (-self._scores[node], node))
        self._best = order[: self._plan.num_nodes]

    def found(self) -> GrownTree:
        """Returns all nodes that were looked at and could have been kept, the older first."""
        return GrownTree(list(self._tokens), tuple(self._parents), tuple(range(len(self._tokens))))

    def grown(self) -> GrownTree:
        """Returns the best nodes. No node is better than its parent, which is older: with each its parent is kept."""
        numbers = tuple(sorted(self._best))
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(numbers)}
        parents = tuple(place[self._parents[node]] for node in numbers)
        return GrownTree([self._tokens[node] for node in numbers], parents, numbers)


def log_race_chances(log_probs: Tensor, times: Tensor, sharpness: float) -> Tensor:
    """Returns estimated chances that tokens win the target's race, from the drafter's, `[nodes, vocab]` logarithms.

    The first racers of the drafter are the likeliest: the target's log-weights differ from the drafter's by little, so
    a racer that is far ahead wins there too. Estimated as the softmax of the drafter's scores log q - log e.

    Args:
        log_probs: `[nodes, vocab]`, of the drafter after each node; -inf for impossible tokens.
        times: `[nodes, vocab]`, the exponentials e of the position after each node, the same for nodes of a depth.
        sharpness: factor of the scores, higher for drafters that are closer to their targets.
    """
    return (sharpness * (log_probs - times.log())).log_softmax(dim=1)
