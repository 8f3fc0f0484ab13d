"""Parts of messages that options add: what they ask for, and report of a round. None where the option is off."""

from dataclasses import dataclass, field

from draftwire.requests.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class BranchLimits:
    """How much a drafter may draft ahead for a session at once."""

    max_branches: int
    """Most texts that it drafts for, 1 or more."""
    max_held_blocks: int = 0
    """Most blocks of coming rounds that the verifier holds; 0 is as many as `max_branches`."""


@dataclass(frozen=True, slots=True)
class LogprobsPart:
    """Log-probabilities of the tokens of a round, nats, as far as they are requested; else empty."""

    target: list[TokenLogprob] = field(default_factory=list)
    """The target's of each token."""
    draft: list[float] = field(default_factory=list)
    """The drafter's of each token: -inf for tokens that it could not have drawn, NaN at positions without a draft token
    or without a distribution."""


@dataclass(frozen=True, slots=True)
class WatchedGuess:
    """A draft that the verifier would have made in a round in which it did not, compared with the round's tokens."""

    has_guess: bool
    num_right: int = 0
    """First tokens of the round that were guessed."""


@dataclass(frozen=True, slots=True)
class GuessPart:
    """A draft of the verifier by itself, made in a round or possible in it."""

    local_strategy: str = ""
    """Strategy of the verifier that drafted the tokens; empty if a drafter did, or nothing was drafted."""
    watched: WatchedGuess | None = None
    """How what the verifier could have drafted would have fared; None if that is not known."""


@dataclass(frozen=True, slots=True)
class AheadPart:
    """Fate of blocks that were drafted before their text was known."""

    next_is_held: bool = False
    """Whether the block of the next round was there already, drafted ahead for just these tokens."""
    is_ahead: bool = False
    """Whether the drafter began to draft the judged block before it knew the text."""
    num_wasted_draft_tokens: int = 0
    """Draft tokens of blocks that were drafted ahead for nothing, as was found since the verdict before."""
    held_bytes: int = 0
    """Size of the blocks that are held for coming rounds."""


@dataclass(frozen=True, slots=True)
class TreePart:
    """Fate of a token tree."""

    draft_depth: int
    """Draft tokens on its longest path."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a verifier's step, over all sessions that shared it, of any gateway."""

    num_step_rows: int
    """Tokens that it read, draft tokens included."""
    num_step_sessions: int
    num_step_text_tokens: int
    """Tokens that the texts of these sessions had before, prompts included."""
