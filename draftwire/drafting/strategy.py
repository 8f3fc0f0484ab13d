"""Interface of drafting strategies.

A chain of draft tokens needs what `DraftRequest` states first. What options ask for beside it are parts of the request,
which are absent where an option is off: a token tree, guesses of other tokens, a text that goes on by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.errors import DraftwireError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.keys import DrawKey
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import SessionParameters


def never() -> bool:
    """Returns False: the default of `DraftRequest.is_cut`."""
    return False


class TreeRequest(Protocol):
    """Asks for a token tree of `DraftRequest.num_tokens` nodes at most in the place of a chain: the option of trees."""

    @property
    def depth(self) -> int:
        """Draft tokens on a path, at most."""


class GuessRequest(Protocol):
    """Asks for other tokens that may stand in the places of a block: the option of drafting ahead."""

    @property
    def most(self) -> int:
        """Guesses for each place, at most."""


class Continuation(Protocol):
    """Knows how a text may go on without the model: the cascade."""

    def takes_over(self, drawn: list[int]) -> bool:
        """Whether the block ends after some drawn tokens; asked with all of them before the next one is drawn. It may
        look at them, since they are all kept.
        """

    def may_follow(self, drawn: list[int]) -> list[int]:
        """Returns tokens that may follow some drawn ones; asked with all of them. A model reads them beside the last
        drawn token, and so has what it would read one by one if they are drawn. What is drawn does not depend on them.
        """


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for one draft block."""

    num_tokens: int
    """Draft tokens requested, at least 1. A strategy may return fewer, but has to stop before it draws a token. 0, with
    `guesses`, asks for the guesses of the next place alone."""
    sampling: SamplingParams
    """The target's sampling parameters; drafts that apply them too are accepted more often."""
    key: DrawKey
    """Key of the random numbers to use."""
    vocab_size: int
    """Size of the target's vocabulary; ids beyond it are never proposed."""
    is_coupled: bool = False
    """Whether to draw with the noise of the positions in the text, as the target does."""
    needs_probs: bool = True
    """Whether the verifier's rule reads the distributions."""
    prompt_len: int = 0
    """How many of the committed tokens are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` masks."""
    automaton: Automaton | None = None
    """Masks tokens that break the form in `sampling`. Without it, drafts that break the form are rejected."""
    is_cut: Callable[[], bool] = never
    """Whether to end the block early. Called on the torch thread after each token. A block that is cut ends before its
    next token is drawn and keeps all drawn tokens: dropping a token because of its value would bias the output."""
    continuation: Continuation | None = None
    """Only for a strategy that continues guesses: decides whether the block ends, and what is read beside it."""
    guesses: GuessRequest | None = None
    """Only for a strategy that can fork."""
    tree: TreeRequest | None = None
    """Only for a strategy that drafts trees. Nodes may be left out, and a block that is cut has fewer depths."""
    stop_below: float | None = None
    """Only for a strategy that reports its confidence: how sure it has to be of a place; 0 ends no block."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens, each drawn from exactly the distribution sent with it, if there is one."""

    token_ids: list[int]
    distributions: DraftDistributions
    guesses: list[list[int]] = field(default_factory=list)
    """Other tokens that may stand in the place of each token: the likeliest others, the likeliest first, or those that
    come next in the race of the place under a coupled rule. If no token was requested, those of the next place. No
    random number of the round was used for them. Empty unless `DraftRequest.guesses` asks for them."""
    parents: tuple[int, ...] = ()
    """The parent of each token in a tree, as `TokenTree.parents`; empty if each follows the one before it."""
    is_whole: bool = True
    """Whether it ended for another reason than `DraftRequest.is_cut`, so that drafting again would give no more. One
    that is cut where nothing could follow is whole: after its last token, or after a row that is no distribution."""
    confidence_buckets: bytes = b""
    """Sureness of each place, as in `DraftBlock`; empty unless `DraftRequest.stop_below` asks for it."""


class DraftSequence(Protocol):
    """The drafter's state of one session. Belongs to the strategy that opened it; used on the torch thread only."""

    @property
    def num_unread(self) -> int:
        """Committed tokens that have to be read before the next draft."""

    @property
    def num_reused(self) -> int:
        """Prompt tokens that were found in the cache because another session had read them."""

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Sets the committed tokens: the first `base_len` so far, then `token_ids`.

        Drafted tokens that were not committed are forgotten. Nothing is computed yet.
        """

    def close(self) -> None:
        """Frees what the sequence holds."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """One sequence's part in a step: reads committed tokens, and drafts once all of them are read."""

    sequence: DraftSequence
    request: DraftRequest | None
    """The block to draft; None reads only."""
    max_read: int | None = None
    """Limit of unread committed tokens: if there are more, only so many are read and nothing is drafted."""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Result of a step."""

    drafts: list[Draft | DraftwireError | None]
    """One for each drafting; None where it only read, an error where the sequence cannot continue."""
    num_read: int = 0
    """Committed tokens that were read before drafting."""
    calibration_s: float = 0.0
    """How long reading took, seconds."""
    draft_s: float = 0.0
    """How long drawing took, seconds."""
    num_passes: int = 0
    """Forward passes for drafted tokens, each over all unfinished blocks."""


class DraftingStrategy(Protocol):
    """Opens draft sequences and drafts for a batch of them."""

    @property
    def context_length(self) -> int:
        """Tokens that a sequence can hold, drafted ones included."""

    def open(self, token_ids: list[int], parameters: SessionParameters) -> DraftSequence:
        """Starts a sequence whose committed tokens are `token_ids`, at least one.

        Args:
            token_ids: the prompt, and what was generated before.
            parameters: of the session. What a session reads may be shared with others of the same `cache_salt` alone.
        """

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Reads and drafts for a batch of different sequences.

        All drafts are returned together: a block that was cut waits until the others of the batch end. Blocks are
        short, so returning them one by one would gain little.
        """
