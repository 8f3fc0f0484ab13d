"""How many tokens of a token tree are expected to be accepted, before trees of its size were drafted."""

from itertools import accumulate
from operator import mul

from draftwire.options.trees.tree_shapes import CHANCES, shape_by_chances, survival_of
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate

SIBLINGS = tuple(chance / (1.0 - CHANCES[0]) for chance in CHANCES[1:])
"""`CHANCES` of all but the first child, where that one is not accepted."""

MOST_EXPONENT = 16.0
EXPONENT_STEPS = 10
"""By which the exponent of a `TreePrior` is narrowed down to a 64th."""


def sibling_chances(rate: float) -> list[float]:
    """Returns how often each further child is expected to be accepted where the first one is with a probability of
    `rate`. Drafters that are worse than the embedded one have worse siblings too: each is less likely than the one
    before.
    """
    likeness = min(1.0, rate / CHANCES[0])
    return [likeness * (1.0 - rate) * share for share in SIBLINGS]


class TreePrior:
    """What a tree of some nodes accepts if its first children fare as the tokens of chains do, and their siblings as
    those of the embedded pair. Says what is worth a try, and nothing to users: drafted trees tell more.
    """

    def __init__(self, chains: AcceptanceEstimate, num_nodes: int) -> None:
        """Follows an estimate that may still change.

        Args:
            chains: of the same drafter.
            num_nodes: draft tokens of the tree.
        """
        self._chains = chains
        self._num_nodes = num_nodes
        self.exponent = 1.0
        """Power of the chance that no child of a token is right: above 1 if trees of another size fared better."""
        self._known: tuple[int, list[float]] = (-1, [])
        """The rates after so many drafts of chains: they are asked for in every round."""

    @property
    def share(self) -> float:
        """P(there is a draft), where one is asked for."""
        return self._chains.share

    def rates(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted, given that k - 1 are) for k = 1 to `num_tokens`, of the best tree
        that is as deep.
        """
        return _with_exponent(self._rates_by_chains(num_tokens), self.exponent)

    def follow(self, near: "TreePrior", num_tokens: int, num_accepted: float) -> None:
        """Takes the exponent with which another size would accept what it was found to.

        Args:
            near: the prior of that size.
            num_tokens: how deep its trees are.
            num_accepted: what they accept, mean.
        """
        rates = near._rates_by_chains(num_tokens)
        low, high = 0.0, MOST_EXPONENT
        for _ in range(EXPONENT_STEPS):
            self.exponent = (low + high) / 2
            if near.share * sum(accumulate(_with_exponent(rates, self.exponent), mul)) < num_accepted:
                low = self.exponent
            else:
                high = self.exponent

    def _rates_by_chains(self, num_tokens: int) -> list[float]:
        num_drafts, rates = self._known
        if num_drafts != self._chains.num_drafts or len(rates) != num_tokens:
            rates = _rates(self._chains.rates(num_tokens), self._num_nodes)
            self._known = self._chains.num_drafts, rates
        return rates


def _with_exponent(rates: list[float], exponent: float) -> list[float]:
    return [1.0 - (1.0 - rate) ** exponent for rate in rates]


def _rates(chain_rates: list[float], num_nodes: int) -> list[float]:
    chances = [[rate, *sibling_chances(rate)] for rate in chain_rates]
    survival = survival_of(shape_by_chances(chances, num_nodes), chances)
    before = [1.0, *survival]
    rates = [now / then if then > 0.0 else 0.0 for now, then in zip(survival, before, strict=False)]
    return rates + [0.0] * (len(chain_rates) - len(rates))
