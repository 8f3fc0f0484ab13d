"""Drafts for coming rounds: which texts a session may have next, and which of them are drafted for. Pure.

While the block of a round is being judged, the drafter can draft for the next one, if it guesses how the round ends:
after how many of the block's tokens, and with which extra token. Each guess is a *branch* of the session's text. Its
block goes to the verifier under the prefix that the branch predicts, and is judged as soon as a verdict makes that
prefix true.

Which texts are guessed depends on the block of the round before and on what was measured, never on the random numbers
of the round that is drafted for; a text gets one block of a round at most. See docs/exactness.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftwire.method.rounds import Calibration, Fence

GUESSES = 4
"""Guesses for one ending of a round, at most."""
FORGETTING = 1 / 256
"""Weight of the latest round in what is learnt of all rounds."""


@dataclass(frozen=True, slots=True)
class WantedGuesses:
    """The `GuessRequest` of drafters."""

    most: int = GUESSES
    """Guesses for each place, at most."""


@dataclass(slots=True, eq=False)
class Branch:
    """A text that a session has or may have, and the block of its next round. Changed by the scheduler only."""

    fence: Fence
    """Fence of the block."""
    added: list[int]
    """The tokens by which the text is longer than the parent's."""
    parent: "Branch | None" = None
    """The text that it continues, whose block it starts with; None for a text that is known."""
    num_kept: int = 0
    """Tokens of the parent's block that it starts with."""
    num_draft_tokens: int = 0
    """Tokens to be drafted."""
    stop_below: float | None = None
    """Sureness that is wanted of each place, as in `Calibration`."""
    block: list[int] | None = None
    """The tokens that were drafted and sent; None before."""
    guesses: list[list[int]] = field(default_factory=list)
    """Tokens that may stand in the place of each of them, the likeliest first."""
    next_guesses: list[int] | None = None
    """Tokens that may follow the whole block; None if that is not known yet."""
    children: list["Branch"] = field(default_factory=list)
    is_expanded: bool = False
    """Whether `children` were chosen."""
    is_left: bool = False
    """Whether the session's text has become another one."""
    sent_at: float | None = None
    """Time at which the block was sent, by the scheduler's clock, if it is judged as soon as it arrives."""
    in_step: bool = False
    """Whether a step drafts for it, or reads on from it."""
    calibration: Calibration | None = None
    """Asks for the block while it is being drafted: it is completed, whatever else waits."""
    num_passes: int = 0
    """Forward passes of which it was one row, until its text came true."""

    def family(self) -> Iterator["Branch"]:
        """Yields it and all that continue it."""
        yield self
        for child in self.children:
            yield from child.family()

    def find(self, round_number: int, added: Sequence[int]) -> "Branch | None":
        """Returns the branch of a round whose text is longer by just these tokens; None if there is none."""
        if not added:
            return self if round_number == self.fence.round else None
        for child in self.children:
            size = len(child.added)
            if child.added == list(added[:size]) and (found := child.find(round_number, added[size:])):
                return found
        return None


@dataclass(frozen=True, slots=True)
class GuessedEnding:
    """A guess of how a round ends."""

    num_kept: int
    """Accepted tokens of the block."""
    token_id: int
    """The extra token."""
    chance: float
    """Probability that the round ends so."""


@dataclass(slots=True)
class Endings:
    """How rounds have ended, of one drafter: how many tokens were accepted, and which guesses were right.

    Learns of rounds whose random numbers nobody draws again.
    """

    acceptance: float = 0.7
    """Acceptance rate of tokens whose predecessors were accepted."""
    bonus_right: list[float] = field(default_factory=lambda: [0.7, 0.1, 0.05, 0.05])
    """Share of wholly accepted blocks whose extra token was the n-th guess."""
    recovered_right: list[float] = field(default_factory=lambda: [0.3, 0.15, 0.1, 0.05])
    """The same of other blocks."""

    def learn(self, branch: Branch, added: Sequence[int]) -> None:
        """Learns how a round with a block ended."""
        if branch.block is None:
            return
        length, num_kept = len(branch.block), len(added) - 1
        if not 0 <= num_kept <= length or branch.block[:num_kept] != list(added[:-1]):
            return
        is_whole = num_kept == length
        for _ in range(num_kept):
            self.acceptance += FORGETTING * (1.0 - self.acceptance)
        if not is_whole:
            self.acceptance -= FORGETTING * self.acceptance
        guesses = branch.next_guesses if is_whole else branch.guesses[num_kept] if branch.guesses else None
        right = self.bonus_right if is_whole else self.recovered_right
        if guesses is not None:
            for rank in range(GUESSES):
                is_right = rank < len(guesses) and guesses[rank] == added[-1]
                right[rank] += FORGETTING * (is_right - right[rank])

    def likeliest(self, branch: Branch, most: int) -> list[GuessedEnding]:
        """Returns the likeliest endings of a branch's round, at most so many, the likeliest first."""
        assert branch.block is not None, "its block was sent"
        endings: list[GuessedEnding] = []
        reached = 1.0
        for num_kept, guesses in enumerate(branch.guesses):
            ends = reached * (1.0 - self.acceptance)
            recovered = zip(self.recovered_right, guesses, strict=False)
            endings += [GuessedEnding(num_kept, token, ends * right) for right, token in recovered]
            reached *= self.acceptance
        bonus = zip(self.bonus_right, branch.next_guesses or [], strict=False)
        endings += [GuessedEnding(len(branch.block), token, reached * right) for right, token in bonus]
        return sorted(endings, key=lambda ending: -ending.chance)[:most]
