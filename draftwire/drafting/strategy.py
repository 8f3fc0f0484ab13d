"""The interface that every way of drafting has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from draftwire.errors import DraftwireError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.randomness import DrawKey
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams


def never() -> bool:
    """Lets a block become as long as it was asked for."""
    return False


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
    is_coupled: bool = False
    """Draw with the noise of the places in the text, as the target does."""
    needs_probs: bool = True
    """Whether the verifier's rule asks for the distributions."""
    prompt_len: int = 0
    """How many of the committed tokens are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` keeps away."""
    automaton: Automaton | None = None
    """Follows the form that `sampling` asks for. Without it, drafts that break the form are rejected."""
    is_cut: Callable[[], bool] = never
    """Whether nobody waits for more tokens than are drawn. Asked on the torch thread after each token; a block that is
    cut ends before its next token is drawn, and keeps all that was drawn: none is left out for what it is."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, each drawn from exactly the distribution that goes with it, if one does."""

    token_ids: list[int]
    distributions: DraftDistributions


class DraftSequence(Protocol):
    """The drafter's side of one session. Belongs to the strategy that made it; used on the torch thread only."""

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft."""

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that did not have to be read, because another session had read them."""

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Tells which tokens are committed: the first `base_len` known ones, then `token_ids`.

        What was drafted and not committed is forgotten. Nothing is computed yet.
        """

    def close(self) -> None:
        """Frees what the sequence holds."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """One sequence's part in a step: reads committed tokens, and drafts if it has read all of them."""

    sequence: DraftSequence
    request: DraftRequest | None
    """What to draft; None reads only."""
    max_read: int | None = None
    """If more committed tokens are unread than this, only so many are read and nothing is drafted."""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a step gave."""

    drafts: list[Draft | DraftwireError | None]
    """One for each drafting; None where nothing was to be drafted yet, an error where the sequence cannot go on."""
    num_read: int = 0
    """Tokens that were read before anything was drawn."""
    calibration_s: float = 0.0
    """How long that took, seconds."""
    draft_s: float = 0.0
    """How long drawing took, seconds."""
    num_passes: int = 0
    """Forward passes for drafted tokens, each of them for all blocks that are not done."""


class DraftingStrategy(Protocol):
    """Makes draft sequences and drafts for many of them at once."""

    @property
    def context_length(self) -> int:
        """Tokens that a sequence can hold, drafted ones included."""

    def open(self, token_ids: list[int], cache_salt: str = "") -> DraftSequence:
        """Starts a sequence whose committed tokens are `token_ids`, at least one.

        Args:
            token_ids: the prompt.
            cache_salt: what was read for a sequence of the same salt need not be read again.
        """

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Carries out the parts of different sequences together.

        All drafts are returned together: a block that was cut waits until the others of the step end, which takes less
        long without it. Blocks are short, so that ending steps block by block would gain little.
        """
