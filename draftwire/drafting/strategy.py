"""The interface that every way of drafting has."""

from dataclasses import dataclass
from typing import Protocol

from draftwire.distributions import DraftDistributions
from draftwire.randomness import DrawKey
from draftwire.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to draft next."""

    num_tokens: int
    """Tokens wanted, at least 1. A strategy may return fewer, decided before it draws the token that it leaves out."""
    sampling: SamplingParams
    """What the target does to its logits; imitating it is accepted more often."""
    key: DrawKey
    """Names the random numbers to use."""
    vocab_size: int
    """Rows of the target's vocabulary; ids beyond it are never proposed."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, each drawn from exactly the distribution that goes with it."""

    token_ids: list[int]
    distributions: DraftDistributions


class DraftSequence(Protocol):
    """The drafter's side of one session. All methods run on the torch thread."""

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Brings the state to exactly the committed tokens: the first `base_len` known ones, then `token_ids`.

        What was drafted and not committed is forgotten. In a new sequence `base_len` is 0.
        """

    def draft(self, request: DraftRequest) -> Draft:
        """Guesses the tokens that follow the committed ones."""


class DraftingStrategy(Protocol):
    """Makes draft sequences."""

    @property
    def context_length(self) -> int:
        """Tokens that a sequence can hold, drafted ones included."""

    def new_sequence(self) -> DraftSequence:
        """Starts an empty sequence."""
