"""How many tokens of a token tree are expected to be accepted, before trees of its size were drafted."""

from heapq import heappop, heappush

from draftwire_gateway.speculation.acceptance import AcceptanceEstimate

CHANCES = (0.71, 0.11, 0.04, 0.021, 0.016, 0.014, 0.007, 0.005)
"""How often the child of a rank is accepted, of children that are drawn without replacement: on the embedded pair at
temperature 1, by `calibrate` of benchmarks/tree_efficiency.py."""
SIBLINGS = tuple(chance / (1.0 - CHANCES[0]) for chance in CHANCES[1:])
"""The same of all but the first child, where that one is not accepted."""


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
        num_drafts, rates = self._known
        if num_drafts != self._chains.num_drafts or len(rates) != num_tokens:
            rates = _rates(self._chains.rates(num_tokens), self._num_nodes)
            self._known = self._chains.num_drafts, rates
        return rates


def _rates(chain_rates: list[float], num_nodes: int) -> list[float]:
    """Returns the rates of the tree whose nodes have the largest chances, as `shape_by_rank` finds it."""
    survival = [0.0] * len(chain_rates)
    found = [(-chain_rates[0], 0, 0, 1.0)] if chain_rates else []  # chance, depth, rank, that of the parent
    for _ in range(num_nodes):
        if not found:
            break
        chance, depth, rank, of_parent = heappop(found)
        survival[depth] -= chance
        if depth + 1 < len(chain_rates):
            heappush(found, (chance * chain_rates[depth + 1], depth + 1, 0, -chance))
        if rank < len(SIBLINGS):
            sibling = of_parent * (1.0 - chain_rates[depth]) * SIBLINGS[rank]
            heappush(found, (-sibling, depth, rank + 1, of_parent))
    before = [1.0, *survival]
    return [now / then if then > 0.0 else 0.0 for now, then in zip(survival, before, strict=False)]
