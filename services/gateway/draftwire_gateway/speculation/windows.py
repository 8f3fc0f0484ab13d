"""Windows of time in which all sessions of a pair have one arm, and what they yield."""

import math
from dataclasses import dataclass, field

from draftwire_gateway.session.policy import Arm
from draftwire_gateway.speculation.pair_acceptance import PairAcceptance
from draftwire_gateway.speculation.round_costs import WindowSums

LEAST_ROUNDS = 20
"""Of a window of one session."""
LEAST_QUIET = 0.1
"""A window is calm if so large a share of its rounds is quiet."""
MOST_WARMING = 0.25
"""Share of the rounds of a window whose sessions may still have no drafter."""
EXPECTED_FOR = 4
"""Rounds for which what is expected of one is not computed anew: all sessions of a step wait for that."""
REMEMBERED_S = 30.0
"""After so long, a third is left of what is known of yields: one that is not used is trusted again."""
TRUSTED_S = 1.0
"""That an arm yields what is expected counts like so much time in which it was measured, of all sessions, seconds."""


@dataclass(slots=True)
class Made:
    """What sessions made in all of their rounds, whether these are typical of the arm or not."""

    num_tokens: int = 0
    seconds: float = 0.0
    """That it took, of all sessions."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds a round."""
        self.num_tokens += num_tokens
        self.seconds += seconds


@dataclass(slots=True, eq=False, kw_only=True)
class Window:
    """A stretch of time in which all sessions have one arm."""

    arm: Arm
    load: int
    """See `load_of`."""
    began_at: float
    is_probe: bool
    settled_at: float
    """Rounds that began earlier do not count: other sessions still had another arm."""
    counts_from: float = field(init=False)
    """Nor do those that began earlier than that, if there are others: drafters still read the texts of many."""
    num_surprises: int = 0
    """Of the acceptance, when it began: the next one ends it."""
    next_due: float = math.inf
    """When it is another arm's turn to be probed."""
    began_used_s: float = 0.0
    """Time of use of the load by then, seconds."""
    expected_rate: float | None = None
    """Tokens/s that are expected of a session; None of a probe, or if nothing was measured of its arm."""
    quiet: WindowSums = field(default_factory=WindowSums)
    """Over rounds beside which nobody read a prompt."""
    all: WindowSums = field(default_factory=WindowSums)
    """Over all rounds but slow ones."""
    slow: WindowSums = field(default_factory=WindowSums)
    """Over rounds that waited for their reader. If most did, it is the gateway that has no time for them."""
    num_warming: int = 0
    """Rounds of sessions whose drafters still read their texts."""
    made: Made = field(default_factory=Made)
    """But for rounds before a drafter has read a text, and those that waited for their reader."""
    warming: WindowSums = field(default_factory=WindowSums)
    """Over rounds of the other sessions before the window began anew: better than nothing, where texts end too soon for
    more.
    """
    round_s_on_line: list[float] | None = field(default=None, init=False)
    """Time of rounds with 1 to the arm's length of draft tokens, seconds; None before somebody asked for it."""
    _expected_tokens: float = field(default=0.0, init=False)
    _expects_for: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.counts_from = self.settled_at

    def expected_tokens(self, acceptance: PairAcceptance) -> float:
        """Returns the tokens that are expected of the next round of the arm, as the acceptance was some rounds ago."""
        if self._expects_for == 0:
            self._expected_tokens, self._expects_for = acceptance.mean_tokens(self.arm), EXPECTED_FOR
        self._expects_for -= 1
        return self._expected_tokens

    @property
    def is_warming(self) -> bool:
        """Whether too many sessions have no drafter yet: the others share smaller steps than they will."""
        return self.num_warming > MOST_WARMING * (self.num_warming + self.all.num_rounds + self.slow.num_rounds)

    def restart(self, now: float) -> None:
        """Sets the rounds so far aside."""
        self.warming.merge(self.all)
        self.counts_from, self.num_warming = now, 0
        self.quiet, self.all, self.slow = WindowSums(), WindowSums(), WindowSums()

    @property
    def expected_of_made(self) -> float:
        """The tokens that sessions had made if all of that time were rounds of the arm, as fast as those of the window
        were: that they are slower than others were before is no loss of the arm.
        """
        if self.all.num_rounds >= LEAST_ROUNDS // 2:
            return self.made.seconds * self.all.num_tokens / self.all.round_s
        return self.made.num_tokens if self.expected_rate is None else self.made.seconds * self.expected_rate

    @property
    def is_slow(self) -> bool:
        """Whether most rounds are slow."""
        return self.slow.num_rounds > self.all.num_rounds

    @property
    def is_quiet(self) -> bool:
        """Whether enough rounds are quiet."""
        return not self.is_slow and 2 * self.quiet.num_rounds >= LEAST_ROUNDS

    @property
    def is_calm(self) -> bool:
        """Whether prompts are read beside few of its rounds, or beside some of them as always."""
        return self.is_slow or self.quiet.num_rounds >= LEAST_QUIET * self.all.num_rounds

    @property
    def num_rounds(self) -> int:
        """Rounds of the kind that is to fill the window."""
        return self.slow.num_rounds if self.is_slow else self.quiet.num_rounds

    @property
    def sums(self) -> WindowSums:
        """Over slow rounds if most are, else over quiet ones, or all if too few are quiet, as where prompts arrive all
        the time.
        """
        if self.is_slow:
            return self.slow
        return self.quiet if self.is_quiet else self.all


@dataclass(slots=True)
class Yield:
    """What sessions have made of the rate that is expected of them. Waits for drafters, and rounds without room for a
    whole draft, are in no arm's rounds, and are a cost all the same.
    """

    num_tokens: float = 0.0
    expected_tokens: float = 0.0
    """Old ones fade, of both."""

    def add(self, num_tokens: int, expected_tokens: float) -> None:
        """Adds a round."""
        self.num_tokens += num_tokens
        self.expected_tokens += expected_tokens

    def fade(self, kept: float) -> None:
        """Forgets all but a share."""
        self.num_tokens *= kept
        self.expected_tokens *= kept

    def share(self, rate: float) -> float:
        """Returns the share, 1 before anything was measured.

        Args:
            rate: tokens/s that are expected of all sessions.
        """
        trusted = TRUSTED_S * rate
        return (self.num_tokens + trusted) / (self.expected_tokens + trusted)


@dataclass(slots=True)
class Openings:
    """What it costs that a drafter has to read a text before it drafts for it: tokens that are not made meanwhile. With
    drafts, each new text costs that; a change of the arm costs it once for all that run.
    """

    lost_tokens: float = 0.0
    num_openings: float = 0.0
    num_texts: float = 0.0
    """That began."""
    num_tokens: float = 0.0
    """Of all rounds; old ones fade, as do the others."""

    def add(self, num_tokens: int, expected_tokens: float, *, is_over: bool) -> None:
        """Adds a round of a session whose drafter does not draft yet, or drafted first in it."""
        self.lost_tokens += expected_tokens - num_tokens
        self.num_openings += is_over

    def fade(self, kept: float) -> None:
        """Forgets all but a share."""
        self.lost_tokens *= kept
        self.num_openings *= kept
        self.num_texts *= kept
        self.num_tokens *= kept

    @property
    def share(self) -> float:
        """The share of tokens that is left with drafts, if texts are as long as they were; 1 if nothing is known."""
        if self.lost_tokens <= 0.0 or not self.num_tokens:
            return 1.0
        lost_each = self.lost_tokens / max(1.0, self.num_openings)
        return self.num_tokens / (self.num_tokens + self.num_texts * lost_each)


@dataclass(slots=True)
class Yields:
    """What is made at a load of the rates that are expected of its arms."""

    plain: Yield = field(default_factory=Yield)
    """Of plain decoding."""
    local: Yield = field(default_factory=Yield)
    """With drafts of the verifier."""
    drafts: Yield = field(default_factory=Yield)
    """With a drafter."""
    openings: Openings = field(default_factory=Openings)

    def of(self, arm: Arm) -> Yield:
        """Returns that of an arm and all that draft as it does."""
        if arm.uses_drafter:
            return self.drafts
        return self.local if arm.length else self.plain

    def fade(self, seconds: float) -> None:
        """Forgets, as so many seconds pass."""
        kept = math.exp(-seconds / REMEMBERED_S)
        for known in (self.plain, self.local, self.drafts, self.openings):
            known.fade(kept)

    def share(self, arm: Arm, rate: float) -> float:
        """Returns the share that is made of a rate.

        Args:
            arm: of the rate.
            rate: tokens/s that are expected of all sessions.
        """
        return self.of(arm).share(rate) * (self.openings.share if arm.uses_drafter else 1.0)
