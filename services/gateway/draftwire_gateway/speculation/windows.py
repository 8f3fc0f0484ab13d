"""Windows of time in which all sessions of a pair have one arm, and what they yield."""

import math
from dataclasses import dataclass, field

from draftwire_gateway.speculation.arms import Arm
from draftwire_gateway.speculation.round_costs import WindowSums

LEAST_ROUNDS = 20
"""Of a window of one session."""
LEAST_QUIET = 0.1
"""A window is calm if so large a share of its rounds is quiet."""
MOST_WARMING = 0.25
"""Share of the rounds of a window whose sessions may still have no drafter."""
REMEMBERED_S = 30.0
"""After so long, a third is left of what is known of yields: one that is not used is trusted again."""
TRUSTED_S = 1.0
"""That an arm yields what is expected counts like so much time in which it was measured, of all sessions, seconds."""


@dataclass(slots=True)
class Window:
    """A stretch of time in which all sessions have one arm."""

    arm: Arm
    load: int
    """See `load_of`."""
    began_at: float
    is_probe: bool
    counts_from: float
    """Rounds that began earlier do not count: other sessions still had another arm."""
    num_surprises: int = 0
    """Of the acceptance, when it began: the next one ends it."""
    next_due: float = math.inf
    """When it is another arm's turn to be probed."""
    began_used_s: float = 0.0
    """Time of use of the load by then, seconds."""
    quiet: WindowSums = field(default_factory=WindowSums)
    """Over rounds beside which nobody read a prompt."""
    all: WindowSums = field(default_factory=WindowSums)
    """Over all rounds but slow ones."""
    slow: WindowSums = field(default_factory=WindowSums)
    """Over rounds that waited for their reader. If most did, it is the gateway that has no time for them."""
    num_warming: int = 0
    """Rounds of sessions whose drafters still read their texts."""
    warming: WindowSums = field(default_factory=WindowSums)
    """Over rounds of the other sessions before the window began anew: better than nothing, where texts end too soon for
    more.
    """

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
class Beside:
    """A window of the chosen arm, beside which others are probed."""

    arm: Arm
    slowness: float
    """Time of its rounds over what was known of it by then."""
    probes: list[tuple[Arm, float]] = field(default_factory=list)
    """Since then, and the weights that their windows have in what is known of them."""


@dataclass(slots=True)
class Yield:
    """What sessions have made of the rate that is expected of them. A drafter's prompts, rounds until it is ready and
    waits are in no arm's rounds, and are a cost all the same.
    """

    num_tokens: float = 0.0
    expected_tokens: float = 0.0
    """Old ones fade, of both."""

    def fade(self, seconds: float) -> None:
        """Forgets, as so many seconds pass."""
        kept = math.exp(-seconds / REMEMBERED_S)
        self.num_tokens *= kept
        self.expected_tokens *= kept

    def share(self, rate: float) -> float:
        """Returns the share, 1 before anything was measured.

        Args:
            rate: tokens/s that are expected of all sessions.
        """
        trusted = TRUSTED_S * rate
        return (self.num_tokens + trusted) / (self.expected_tokens + trusted)


def new_yields() -> dict[bool, Yield]:
    """Returns what nothing is known of yet, without a drafter and with one."""
    return {False: Yield(), True: Yield()}
