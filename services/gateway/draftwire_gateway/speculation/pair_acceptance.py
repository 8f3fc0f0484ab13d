"""How many of a pair's draft tokens are accepted, by who drafts them, and of token trees by size."""

from collections.abc import Iterable, Mapping
from functools import partial

from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate
from draftwire_gateway.speculation.round_costs import distance
from draftwire_gateway.speculation.tree_acceptance import TreePrior

FOLLOWED_EVERY = 4
"""Trees of a size, after which those of sizes that were not tried are expected to fare as it does by then."""


def estimates_of(
    sources: Iterable[DraftSource], priors: Mapping[DraftSource, AcceptanceEstimate] | None = None
) -> dict[DraftSource, AcceptanceEstimate]:
    """Returns an estimate for each source. A drafter's drafts are the same whether they are drawn ahead or not.

    Args:
        sources: who could draft chains.
        priors: by source; None has none.
    """
    estimates = {source: AcceptanceEstimate(prior=priors[source] if priors else None) for source in sources}
    if DraftSource.AHEAD in estimates:
        estimates[DraftSource.AHEAD] = estimates[DraftSource.DRAFTER]
    return estimates


class PairAcceptance:
    """What all sessions of a pair have shown so far of their drafts."""

    def __init__(self, sources: Iterable[DraftSource], trees: Iterable[Arm]) -> None:
        """Knows nothing yet.

        Args:
            sources: who could draft chains; the drafter, if there are trees.
            trees: arms of trees.
        """
        self.chains = estimates_of(sources)
        """By source."""
        self._priors = {arm: TreePrior(self.chains[DraftSource.DRAFTER], arm.num_nodes) for arm in trees}
        self.trees = {arm: AcceptanceEstimate(prior) for arm, prior in self._priors.items()}
        """Of trees, whose tokens fare by their size."""

    def mean_tokens(self, arm: Arm) -> float:
        """Returns the mean number of tokens that a round commits."""
        known = self._of(arm)
        return 1.0 if known is None else known.mean_tokens(arm.length)

    def num_surprises(self, arm: Arm) -> int:
        """Returns how often drafts of an arm fared differently than those before."""
        known = self._of(arm)
        return 0 if known is None else known.num_surprises

    def is_unknown(self, arm: Arm) -> bool:
        """Whether nothing tells what an arm that was not measured is worth: all else is inferred from plain decoding,
        and a length from others of its source. A tree is as good as chains and siblings say.
        """
        known = self._of(arm)
        return known is None or (known.num_rounds == 0 and not arm.num_nodes)

    def count_tree(self, arm: Arm, depth: int, num_accepted: int) -> None:
        """Adds a token tree to what is known of its size; trees of sizes that were not drafted yet are expected to fare
        as much better or worse than their prior as those of the nearest size that were.

        Args:
            arm: of `trees`.
            depth: how deep the tree could be; what was not drafted counts as not accepted.
            num_accepted: tokens of its path.
        """
        known = self.trees[arm]
        num_surprises = known.num_surprises
        known.add(depth, num_accepted)
        if known.num_surprises > num_surprises:
            self.forget_trees(arm)
        if known.num_drafts % FOLLOWED_EVERY:
            return
        tried = [size for size, one in self.trees.items() if one.num_drafts]
        for untried in self.trees.keys() - tried:
            near = min(tried, key=partial(distance, untried))
            accepted = self.trees[near].mean_tokens(near.length) - 1.0
            self._priors[untried].follow(self._priors[near], near.length, accepted)

    def forget_trees(self, but: Arm | None = None) -> None:
        """Forgets what trees accepted, since drafts of the same drafter fare differently now.

        Args:
            but: a size that is remembered; None of chains, which trees are expected to fare like.
        """
        for arm in self.trees:
            if arm != but:
                self._priors[arm].exponent = 1.0
                self.trees[arm] = AcceptanceEstimate(self._priors[arm])

    def _of(self, arm: Arm) -> AcceptanceEstimate | None:
        """Returns what is known of the drafts of an arm; None of plain decoding."""
        if arm.num_nodes:
            return self.trees[arm]
        return None if arm.source is None else self.chains[arm.source]
