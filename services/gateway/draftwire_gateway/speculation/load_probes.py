"""When the arms of one load are probed, beside the chosen one: the rarer, the more a window of theirs costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.explanation import ArmEstimate
from draftwire_gateway.speculation.round_costs import RoundCosts

LEAST_GAIN = 0.01
"""Another arm is chosen if it is better by so much, and tried at once if that is expected of it."""
PROBE_SHARE = 0.0015
"""What the probes of one arm may cost: so much of the tokens that could be generated meanwhile."""
ALL_PROBES_SHARE = 0.01
"""What the probes of all arms but plain decoding may cost together."""
LEAST_LOSS = 0.05
"""Share of a probe's tokens that it costs at least, for all that changes with the arm."""
FIRST_PROBES = 2
FIRST_PROBE_SHARE = 0.008
"""The first probes of an arm, and all of plain decoding, may cost that, since one window can be far off; and those of
an arm that is expected to be better than the chosen one, but not by so much that it is chosen.
"""
PLAIN_PROBES = 3
NEARLY_PLAIN = 2.0
"""The first probes of plain decoding cost what they cost, unless drafts are faster by that factor: it is what they must
not be slower than, and a window beside which a drafter reads prompts is a slow one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Least pause between probes of an arm: doubled after each that did not change the choice."""


@dataclass(slots=True)
class Probes:
    """When an arm was probed, and how often at most."""

    last_at: float
    """In seconds of use of the load."""
    least_pause_s: float = FIRST_PAUSE_S
    took_s: float = 0.0
    """The last one, with all that had to be opened for it."""
    num_in_vain: int = 0
    """How many of the latest ones of its source measured nothing: where texts end soon, no draft may be as long."""
    round_s: float = math.inf
    """Of the arm, when it was probed last, seconds; infinite if nothing was measured."""
    saved: float = 0.0
    """Share of the next probe's price that was saved by `priced_at`."""
    price_s: float = math.inf
    """Time in which that price is saved, as of then. Prices change with the chosen arm: what becomes cheap at once, as
    all drafts do when plain decoding is chosen, is not overdue."""
    priced_at: float = 0.0

    def paid_at(self, used_s: float, price_s: float) -> float:
        """Returns when the next probe is paid for, if its price stays what it is by now."""
        self.saved = min(1.0, self.saved + (used_s - self.priced_at) / self.price_s)
        self.price_s, self.priced_at = price_s or math.inf, used_s  # for what costs nothing, nothing is saved
        return used_s + (1.0 - self.saved) * price_s

    def begin_pause(self, used_s: float) -> None:
        """Begins to save for the next one."""
        self.last_at = self.priced_at = used_s
        self.saved, self.price_s = 0.0, math.inf


@dataclass(frozen=True, slots=True)
class Prospects:
    """What is expected of the arms of a load by now."""

    chosen: Arm
    estimates: Mapping[Arm, ArmEstimate]
    used_s: float
    """Time in which there were rounds at that load, seconds."""
    window_s: Callable[[float], float]
    """How long a window takes whose rounds take so long."""
    is_unknown: Callable[[Arm], bool]
    """Whether nothing tells what an arm is worth."""

    @property
    def rivals(self) -> set[Arm]:
        """The arms that may turn out to be better than the chosen one: plain decoding, the best length of each source,
        and the lengths next to the chosen one.
        """
        sources: dict[DraftSource | None, list[Arm]] = {}
        for arm in self.estimates:
            sources.setdefault(arm.source, []).append(arm)
        rivals = {max(arms, key=lambda arm: self.estimates[arm].tokens_per_second) for arms in sources.values()}
        own = sources[self.chosen.source]
        at = own.index(self.chosen)
        return rivals.union(own[max(0, at - 1) : at + 2])

    def may_gain(self, arm: Arm) -> bool:
        """Whether an arm that was measured is expected to be as good as the chosen one."""
        estimate = self.estimates[arm]
        return estimate.num_windows > 0 and estimate.tokens_per_second >= self.estimates[self.chosen].tokens_per_second


class LoadProbes:
    """The probes of one load. Times are in seconds of its use: a load that comes and goes has no more than its share of
    them.
    """

    def __init__(self) -> None:
        """Knows of none."""
        self._probes: dict[Arm, Probes] = {}
        self._none_before = 0.0
        self._chosen: Arm | None = None

    def forget(self) -> None:
        """Forgets when arms were probed, since all that was measured is doubtful."""
        self._probes = {}

    def due_in_s(self, known: Prospects, *, begins: bool) -> dict[Arm, float]:
        """Returns after how long each arm but the chosen one is to be probed: the longer, the more that is expected to
        cost.

        Args:
            known: of the load's arms.
            begins: whether the sessions have just become as many. One that texts which ended together have cut short is
                resumed then: later, it would be cut short again.
        """
        rivals, left_s = known.rivals, {}
        before, self._chosen = self._chosen, known.chosen
        for arm, estimate in known.estimates.items():
            probes = self._of(arm, known)
            if arm in (before, known.chosen):  # was measured all the time
                probes.begin_pause(known.used_s)
                probes.round_s = estimate.round_s
            if arm == known.chosen:
                continue
            price_s, least_pause_s = self._pauses_s(arm, known, is_rival=arm in rivals, begins=begins)
            due_at = max(probes.last_at + least_pause_s, probes.paid_at(known.used_s, price_s))
            if not estimate.num_windows or arm == PLAIN or known.may_gain(arm):
                left_s[arm] = due_at - known.used_s
            elif arm in rivals:
                left_s[arm] = max(due_at, self._none_before) - known.used_s
        return left_s

    def next_of(self, ready: Sequence[Arm], known: Prospects, costs: RoundCosts) -> Arm | None:
        """Returns the arm to probe of those whose turn it is: plain decoding before all, else the fastest. Of a source
        that was not measured at that load it is the shortest: that costs least, and tells what the others would take.
        Before trees it is the shortest chain.
        """
        if PLAIN in ready or not ready:
            return PLAIN if ready else None
        fastest = max(ready, key=lambda arm: known.estimates[arm].tokens_per_second)
        source = fastest.source
        assert source is not None, "plain decoding goes before all"
        if costs.has_measured(source):
            return fastest
        if source is DraftSource.TREES and not costs.has_measured(DraftSource.DRAFTER):
            source = DraftSource.DRAFTER
        return min((arm for arm in known.estimates if arm.source is source), key=lambda arm: arm.num_rows)

    def end(self, arm: Arm, known: Prospects, took_s: float, *, is_in_vain: bool, is_settled: bool) -> None:
        """Takes note of a probe that is over. One in vain was one of all arms of its source of which nothing is known:
        each would be probed by the same one.

        Args:
            arm: of the probe.
            known: of the load's arms, by now.
            took_s: its time.
            is_in_vain: whether nothing was measured.
            is_settled: whether it has changed nothing, so that the next one may be later.
        """
        own = self._of(arm, known)
        own.begin_pause(known.used_s)
        own.took_s = took_s
        if not is_in_vain:
            own.round_s = known.estimates[arm].round_s
        for other, estimate in known.estimates.items():
            if other.source is arm.source and not estimate.num_windows:
                probes = self._of(other, known)
                probes.num_in_vain = probes.num_in_vain + 1 if is_in_vain else 0
                if is_in_vain:
                    probes.begin_pause(known.used_s)
                    probes.took_s = took_s
        self._none_before = known.used_s + self._lost_s(arm, known) / ALL_PROBES_SHARE
        grows = is_settled and known.estimates[arm].num_windows >= FIRST_PROBES
        own.least_pause_s = min(LONGEST_PAUSE_S, 2.0 * own.least_pause_s) if grows else FIRST_PAUSE_S

    def _pauses_s(self, arm: Arm, known: Prospects, *, is_rival: bool, begins: bool) -> tuple[float, float]:
        """Returns in what time the price of an arm's next probe is saved, and the least pause before it, seconds."""
        estimate, probes = known.estimates[arm], self._of(arm, known)
        chosen_rate = known.estimates[known.chosen].tokens_per_second
        is_early = arm == PLAIN or (estimate.num_windows < FIRST_PROBES and is_rival)
        price_s = self._lost_s(arm, known) / (FIRST_PROBE_SHARE if is_early or known.may_gain(arm) else PROBE_SHARE)
        if estimate.num_windows:
            is_basis = arm == PLAIN and estimate.num_windows < PLAIN_PROBES
            is_basis = is_basis and chosen_rate < NEARLY_PLAIN * estimate.tokens_per_second
            return 0.0 if is_basis else price_s, probes.least_pause_s
        if begins and 0 < probes.num_in_vain <= FIRST_PROBES:
            return 0.0, 0.0
        if probes.num_in_vain:
            share = FIRST_PROBE_SHARE if probes.num_in_vain <= FIRST_PROBES else PROBE_SHARE
            return probes.took_s * LEAST_LOSS / share, probes.least_pause_s
        is_free = known.is_unknown(arm) or estimate.tokens_per_second >= (1.0 + LEAST_GAIN) * chosen_rate
        return 0.0 if is_free else price_s, 0.0  # an expected gain is no cost

    def _of(self, arm: Arm, known: Prospects) -> Probes:
        probes = self._probes.get(arm)
        if probes is None:
            probes = self._probes[arm] = Probes(known.used_s, priced_at=known.used_s)
        return probes

    def _lost_s(self, arm: Arm, known: Prospects) -> float:
        """Returns the time in which the chosen arm would make the tokens that a probe of another one costs. That its
        rounds are held to have become slower since it was probed last is inferred from other arms', and may be wrong:
        if it was as fast as then, the probe would cost less, and that is soon to be known.
        """
        chosen, other = known.estimates[known.chosen], known.estimates[arm]
        probes = self._of(arm, known)
        rate = other.tokens_per_second * max(1.0, other.round_s / probes.round_s)
        share = 1.0 - rate / chosen.tokens_per_second
        return max(probes.took_s, known.window_s(other.round_s)) * max(LEAST_LOSS, share)
