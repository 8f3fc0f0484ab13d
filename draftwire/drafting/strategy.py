"""Interface of drafting strategies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from draftwire.drafting.growth_plan import GrowthPlan
from draftwire.errors import DraftwireError
from draftwire.method.block_shape import CHAIN
from draftwire.method.draw_key import DrawKey
from draftwire.method.encoding import DraftDistributions
from draftwire.method.features import FeatureNeed, SessionFeatures
from draftwire.method.token_tree import TokenTree
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams


def never() -> bool:
    """Returns False: the default of `DraftRequest.is_cut`."""
    return False


def nothing_ahead(_drawn: list[int]) -> list[int]:
    """Returns no tokens: the default of `DraftRequest.ahead`."""
    return []


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for one draft block."""

    num_tokens: int
    """Draft tokens requested, at least 1. A strategy may return fewer, but has to stop before it draws a token. 0, with
    `num_guesses`, asks for the guesses of the next place alone."""
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
    ends_after: Callable[[list[int]], bool] | None = None
    """Whether the block ends after some drawn tokens; asked with all of them before the next one is drawn. It may look
    at them, since they are all kept."""
    ahead: Callable[[list[int]], list[int]] = nothing_ahead
    """Tokens that may follow some drawn ones; asked with all of them. A model reads them beside the last drawn token,
    and so has what it would read one by one if they are drawn. What is drawn does not depend on them."""
    num_guesses: int = 0
    """How many guesses to return for each place; only for a `ForkingStrategy`."""
    shape: TokenTree | None = None
    """A tree of `num_tokens` nodes to draft in the place of a chain; its parents are ascending, that is depth by depth.
    Only for a `TreeStrategy`. Nodes may be left out, and a block that is cut has fewer depths."""
    growth: GrowthPlan | None = None
    """How to find a tree of at most `num_tokens` nodes. Only for a `TreeStrategy`, and if `is_walked`."""
    is_cut: Callable[[], bool] = never
    """Whether to end the block early. Called on the torch thread after each token. A block that is cut ends before its
    next token is drawn and keeps all drawn tokens: dropping a token because of its value would bias the output."""

    @property
    def is_tree(self) -> bool:
        """Whether a token tree is to be drafted."""
        return self.shape is not None or self.growth is not None

    @property
    def is_walked(self) -> bool:
        """Whether the rule looks the target's own tokens up in a tree: no distribution is sent, and the tree may be
        any.
        """
        return self.is_coupled or self.sampling.greedy or not self.needs_probs


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens, each drawn from exactly the distribution sent with it, if there is one."""

    token_ids: list[int]
    distributions: DraftDistributions
    guesses: list[list[int]] = field(default_factory=list)
    """Other tokens that may stand in the place of each token: the likeliest others, the likeliest first, or those that
    come next in the race of the place under a coupled rule. If no token was requested, those of the next place. No
    random number of the round was used for them. Empty unless `DraftRequest.num_guesses` asks for them."""
    parents: tuple[int, ...] = CHAIN
    """The parent of each token in a tree, as `TokenTree.parents`; `CHAIN` if each follows the one before it."""
    is_whole: bool = True
    """Whether it ended for another reason than `DraftRequest.is_cut`, so that drafting again would give no more. One
    that is cut where nothing could follow is whole: after its last token, or after a row that is no distribution."""


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

    def open(self, token_ids: list[int], cache_salt: str = "", *, shares_text: bool = False) -> DraftSequence:
        """Starts a sequence whose committed tokens are `token_ids`, at least one.

        Args:
            token_ids: the prompt.
            cache_salt: cached prefixes are shared only between sequences of the same salt.
            shares_text: see `SessionParameters.shares_text`.
        """

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Reads and drafts for a batch of different sequences.

        All drafts are returned together: a block that was cut waits until the others of the batch end. Blocks are
        short, so returning them one by one would gain little.
        """


@runtime_checkable
class FedStrategy(DraftingStrategy, Protocol):
    """A strategy that drafts from features of the target, which it is fed with."""

    @property
    def need(self) -> FeatureNeed:
        """The features that it reads, and how they come."""

    def feed(self, sequence: Any, features: SessionFeatures) -> None:
        """Adds features to a sequence of this strategy, in the order of the text. It drafts once those of all committed
        tokens but the last are there.

        Args:
            sequence: is changed.
            features: of the sizes that `need` states.
        """

    def rehearse(self, sequence: Any) -> None:
        """Feeds a sequence of this strategy with features that stand for any."""


@runtime_checkable
class TreeStrategy(DraftingStrategy, Protocol):
    """A strategy that can draft token trees."""

    @property
    def draws_trees(self) -> bool:
        """Whether it also can where the rule reads distributions. If not, it drafts chains there."""


@runtime_checkable
class ForkingStrategy(DraftingStrategy, Protocol):
    """A strategy that can draft for several texts that a session may have next."""

    @property
    def can_fork(self) -> bool:
        """Whether it can with the model that it has."""

    def fork(self, sequence: Any, base_len: int, token_ids: list[int]) -> DraftSequence:
        """Returns another sequence, whose committed tokens are the first `base_len` of a sequence of this strategy,
        committed or drafted, and then `token_ids`.

        Args:
            sequence: is not changed.
            base_len: at least its committed tokens.
            token_ids: at least one.

        Raises:
            NoRoomError: the KV cache is full.
        """
