"""Model of a pair: the tokens of a round and the time that it takes, of every way to draft, at every load."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftwire.models.description import WarmUpStep
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.accepted_counts import PRIOR, RECENT, ROUNDS, AcceptedCounts
from draftwire_gateway.speculation.step_prices import RecentMean, StepPrices

TOKENS = 100.0
"""Text tokens of a unit of length: a paragraph."""
TRUSTED_S = 2.0
"""Seconds of what was made that the prediction of tokens a second counts like."""


class WarmUp(NamedTuple):
    """What steps took before the first request."""

    verifier: Sequence[WarmUpStep] = ()
    drafter: Sequence[WarmUpStep] = ()


NOTHING_KNOWN = WarmUp()


@dataclass(slots=True)
class Load:
    """What was measured at one load."""

    between_s: defaultdict[Arm, RecentMean] = field(default_factory=lambda: defaultdict(RecentMean))
    """Time of a round beside its steps: messages, and waiting for each other."""
    sharing: defaultdict[DraftSource | None, RecentMean] = field(default_factory=lambda: defaultdict(RecentMean))
    """Share of the sessions that are in a step of the verifier, as these see it."""
    made: defaultdict[Arm | DraftSource | None, RecentMean] = field(default_factory=lambda: defaultdict(RecentMean))
    """Tokens that all sessions made while a source was chosen, over those that its rounds had made in all of that time:
    sessions wait, and drafters read."""
    lost: dict[DraftSource | None, float] = field(default_factory=dict)
    """How much more sources were predicted to make than the one that was measured to make more than they."""
    arm: Arm | None = None
    """The chosen one; None before there was any."""
    chosen_at: float = 0.0

    def share(self, arm: Arm, now: float) -> float:
        """Returns what an arm makes of its prediction."""
        share = 1.0
        for key in (arm.source, arm):
            if key in self.made:
                share = self.made[key].drawn_to(share, TRUSTED_S, now)
        return share


class PairModel:
    """Predicts rounds of one pair."""

    def __init__(self, acceptance: Mapping[DraftSource, AcceptedCounts], warm_up: WarmUp) -> None:
        """Knows what steps took at the warm-up, and what is accepted, which is counted elsewhere."""
        self.verifier, self.passes = StepPrices(), defaultdict[DraftSource, StepPrices](StepPrices)
        """Steps of the verifier, and passes of who drafts."""
        for prices, steps in ((self.verifier, warm_up.verifier), (self.passes[DraftSource.DRAFTER], warm_up.drafter)):
            for step in steps:
                size = (1.0, float(step.num_rows), float(prices is self.verifier), step.num_rows / TOKENS)
                prices.add(size, step.duration_us / 1e6, 0.0)
        self.acceptance = acceptance
        self.loads = defaultdict[int, Load](Load)
        """By the logarithm of the number of sessions."""
        self._num_learnt = 0
        self._latest: tuple[tuple[Arm, int, int] | None, float] = (None, 0.0)
        """The steps of an arm with some sessions, which are predicted anew for each `ROUNDS` rounds."""
        self._text = RecentMean()
        """Length of a text."""

    def load(self, num_sessions: int) -> Load:
        """Returns what is known of the nearest power of two of a number of sessions."""
        return self.loads[load_of(num_sessions)]

    def learn_step(self, times: RoundTimes, num_sessions: int) -> None:
        """Adds the verifier's step of a round, if it says its size."""
        step = times.verdict.step
        if step is not None and 0 < step.num_step_sessions <= step.num_step_rows and times.verify_s > 0.0:
            length, sessions = step.num_step_text_tokens / TOKENS, float(step.num_step_sessions)
            self._text.add(length / sessions, 1.0 / num_sessions, times.ended_at, RECENT)
            self.verifier.add((1.0, float(step.num_step_rows), sessions, length), times.verify_s, times.ended_at)

    def learn_passes(self, times: RoundTimes, arm: Arm, *, is_quiet: bool) -> None:
        """Adds the drafting of a round. Beside texts that drafters read it takes longer, and is better than nothing."""
        if arm.source is None or times.draft_s <= 0.0 or times.is_held:
            return
        passes = self.passes[_drafter(arm.source)]
        if is_quiet or not passes.is_known:
            step, sessions = times.verdict.step, times.verdict.timings.num_drafted_sessions
            sessions = sessions or (1 if step is None else step.num_step_sessions)  # the verifier drafts for its step
            passes.add(self._passes(arm.length, float(sessions)), times.draft_s, times.ended_at)

    def learn_between(self, times: RoundTimes, arm: Arm, num_sessions: int, weight: float) -> None:
        """Adds a round in which all sessions had an arm, of which it says as much as a weight."""
        load, now = self.load(num_sessions), times.ended_at
        if times.verdict.step is not None:
            load.sharing[arm.source].add(times.verdict.step.num_step_sessions / num_sessions, weight, now, RECENT)
        self._num_learnt += 1
        key = arm, num_sessions, self._num_learnt // ROUNDS
        if self._latest[0] != key:
            self._latest = key, sum(self.steps_s(arm, load, num_sessions))
        load.between_s[arm].add(times.duration_s - self._latest[1], weight, now, RECENT)

    def round_s(self, arm: Arm, num_sessions: int, now: float) -> float:
        """Returns the time of a round, seconds. A step of the verifier must be known."""
        load = self.load(num_sessions)
        steps_s = sum(self.steps_s(arm, load, num_sessions))
        return max(steps_s / 2.0, steps_s + self._between_s(arm, load, self._source_s(arm.source, load, now), now))

    def rates(
        self, source: DraftSource | None, longest: int, num_sessions: int, now: float, own: AcceptedCounts | None = None
    ) -> dict[Arm, float]:
        """Returns the tokens/s that rounds of a session make with each length of a source.

        Args:
            source: who drafts; None for plain rounds.
            longest: length, at least 1.
            num_sessions: of the pair.
            now: when.
            own: what is accepted of the session; None for the pair's.
        """
        load = self.load(num_sessions)
        source_s = self._source_s(source, load, now)
        if source is None:
            return {PLAIN: 1.0 / self.round_s(PLAIN, num_sessions, now)}
        first, tokens, rates = sum(self.steps_s(Arm(source, 1), load, num_sessions)), 1.0, {}
        further_s = (sum(self.steps_s(Arm(source, longest), load, num_sessions)) - first) / max(1, longest - 1)
        for length, survival in enumerate((own or self.acceptance[source]).survival(longest)[1:], 1):
            arm, steps_s, tokens = Arm(source, length), first + further_s * (length - 1), tokens + survival
            rates[arm] = tokens / max(steps_s / 2.0, steps_s + self._between_s(arm, load, source_s, now))
        return rates

    def steps_s(self, arm: Arm, load: Load, num_sessions: int) -> tuple[float, float]:
        """Returns the time of the verifier's step of a round, and of the drafter's passes, seconds."""
        sessions = max(1.0, num_sessions * (load.sharing[arm.source].value or 1.0))
        verify_s = self.verifier.predict((1.0, sessions * (arm.num_rows + 1), sessions, sessions * self._text.value))
        if arm.source is None:
            return verify_s, 0.0
        return verify_s, self.passes[_drafter(arm.source)].predict(self._passes(arm.length, sessions))

    def _passes(self, length: int, sessions: float) -> tuple[float, float, float, float]:
        return float(length), length * sessions, 0.0, length * sessions * self._text.value

    def _source_s(self, source: DraftSource | None, load: Load, now: float) -> float:
        """Returns the time beside steps with a source, at a load or, if nothing was measured at it, at any."""
        total = weight = 0.0
        for near in (load,) if load.between_s else self.loads.values():
            for other, mean in near.between_s.items():
                if other.source is source:
                    share = mean.weight(now)
                    weight += share
                    total += share * mean.value
        return total / (weight + PRIOR)

    def _between_s(self, arm: Arm, load: Load, source_s: float, now: float) -> float:
        own = load.between_s.get(arm)
        return source_s if own is None else own.drawn_to(source_s, PRIOR, now)


def _drafter(source: DraftSource) -> DraftSource:
    return DraftSource.DRAFTER if source is DraftSource.AHEAD else source


def load_of(num_sessions: int) -> int:
    """Returns the nearest power of two of a number of sessions: clients that keep so many have less at times."""
    return round(math.log2(max(1, num_sessions)))
