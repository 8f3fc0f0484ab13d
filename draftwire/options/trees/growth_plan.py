"""Plans of token trees that have no shape in advance. No torch here."""

from dataclasses import dataclass

from draftwire.drafting.strategy import DraftRequest
from draftwire.method.tree_limits import NODES_PER_PASS
from draftwire.options.trees.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """How a tree is found by the chances of its nodes, the product of the drafter's estimates along their paths."""

    num_nodes: int
    """Draft tokens; those with the best chances of all that were found are kept."""
    depth: int
    """Draft tokens on a path."""
    width: int
    """Children of a node that are looked at."""
    per_pass: int
    """Nodes that the drafter reads in one forward pass."""
    num_passes: int
    """Forward passes, the first, after the committed tokens, included."""

    @classmethod
    def eagle2(cls, num_nodes: int, depth: int, per_pass: int = NODES_PER_PASS) -> "GrowthPlan":
        """Returns the plan of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): the best few nodes of each depth
        get as many children each, and the best of all are kept.
        """
        return cls(num_nodes, depth, per_pass, per_pass, depth)


@dataclass(frozen=True, slots=True)
class WantedTree:
    """The `TreeRequest` of drafters: a tree of a shape, or one that is looked for."""

    shape: TokenTree | None = None
    """Its parents are ascending, that is depth by depth."""
    growth: GrowthPlan | None = None
    """How to find a tree, where there is no shape; only if `is_walked`."""

    @property
    def depth(self) -> int:
        """Draft tokens on a path, at most."""
        if self.shape is not None:
            return self.shape.depth
        return 0 if self.growth is None else self.growth.depth


def is_walked(request: DraftRequest) -> bool:
    """Whether the rule looks the target's own tokens up in a tree: no distribution is sent, and the tree may be any."""
    return request.is_coupled or request.sampling.greedy or not request.needs_probs
