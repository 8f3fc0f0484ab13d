"""Rules that remember what they decided, and with it change what later rounds decide."""

from abc import abstractmethod

from torch import Tensor

from draftwire.checking.toy_models import Pair
from draftwire.verification.rule import LawRule


class StatefulRule(LawRule):
    """A rule with a memory. It states the law of a first round, and computes what follows of it itself.

    It is used by one run over the same texts, with blocks of one length, and cannot be served.
    """

    is_stateful = True

    @abstractmethod
    def law_of_rounds(self, pair: Pair, block_length: int, length: int) -> Tensor:
        """Returns the law of the first `length` tokens, `[contexts, vocab ** length]`, of rounds from the first on."""

    @abstractmethod
    def drawing_deviation(self, pair: Pair, block_length: int) -> float:
        """Returns by how much the decisions of some rounds in succession differ from the stated law, at most."""

    @abstractmethod
    def expectation(self, pair: Pair, length: int) -> Tensor:
        """Returns the mean number of accepted tokens of a first round after each context, `[contexts] float64`, from
        the models alone.
        """
