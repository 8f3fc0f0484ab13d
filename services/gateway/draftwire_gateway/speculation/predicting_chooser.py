"""Chooses what all sessions of a pair draft: the way that makes most tokens a second, as a model of the pair predicts.

All that it knows is of rounds that are over: see docs/exactness.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.accepted_counts import PRIOR, RECENT, ROUNDS, AcceptedCounts
from draftwire_gateway.speculation.pair_model import NOTHING_KNOWN, PairModel, WarmUp, load_of
from draftwire_gateway.speculation.step_prices import NOISE, REMEMBERED_S

LONGEST = 8
"""Draft tokens that may be chosen."""
LEAST_GAIN = 0.05
"""Share by which another way must be better than the chosen one: predictions err, and drafters read the texts anew."""
TRIAL_SHARE = 0.005
"""Share of the time that trials of a way that lost before may cost."""
RUN_S = 2.0
"""Seconds of plain rounds that are requested at once, and for which a new way is kept until it is measured."""


@dataclass(slots=True, eq=False)
class Trial:
    """Rounds of another way than the chosen one."""

    arm: Arm
    sessions: set[object] | None
    """Those that have it; None if all have."""
    began_at: float
    num_left: float

    def has(self, session: object) -> bool:
        """Whether a session takes part."""
        return self.sessions is None or session in self.sessions


class PredictingChooser:
    """Chooses for all sessions of a pair. All times are by one clock, seconds."""

    def __init__(
        self,
        max_length: int,
        first_length: int,
        sources: Sequence[DraftSource] = (DraftSource.DRAFTER,),
        warm_up: WarmUp = NOTHING_KNOWN,
    ) -> None:
        """Knows nothing yet.

        Args:
            max_length: longest draft.
            first_length: of one session's drafts before anything is known; several begin with plain rounds.
            sources: who could draft chains, at least one; the first one begins.
            warm_up: what steps took before the first request.
        """
        self.sources = sources
        self.acceptance = {source: AcceptedCounts() for source in sources}
        if DraftSource.AHEAD in self.acceptance:
            self.acceptance[DraftSource.AHEAD] = self.acceptance[DraftSource.DRAFTER]
        self._longest = min(max_length, LONGEST)
        self.arms = (PLAIN, *(Arm(source, 1 + more) for source in sources for more in range(self._longest)))
        self.model = PairModel(self.acceptance, warm_up)
        self.arm = self._running = PLAIN
        """The chosen one, and what all sessions draft: another one while all try that."""
        self.num_sessions = 0
        self._load = self.model.load(1)
        self._first = Arm(sources[0], min(first_length, self._longest)) if first_length else PLAIN
        self._trial: Trial | None = None
        self._tried: dict[DraftSource | None, tuple[float, float]] = {}
        """When a source was tried or chosen last, and how long its latest trial took; 0 if there was none."""
        self._num_opening = self._num_rounds = 0
        self.now, self._settled_at = -math.inf, 0.0
        """When the latest round ended, and from when on all are in rounds of what they draft."""
        self._rate = self._made = self._took_s = 0.0
        """Tokens/s that are predicted of a session with what all draft, seconds that what sessions made since the last
        choice should have taken, and those that it took."""

    def join(self) -> None:
        """Counts one more session."""
        self.num_sessions += 1
        if not (self._is_ready or any(load.arm for load in self.model.loads.values())):
            self.arm = self._running = self._first if self.num_sessions == 1 else PLAIN
        self._follow_load()

    def leave(self, session: object) -> None:
        """Counts a session less."""
        self.num_sessions -= 1
        if self._trial is not None and self._trial.sessions is not None:
            self._trial.sessions.discard(session)
        if self._trial is not None and not self.num_sessions:
            self._trial.began_at = math.inf  # goes on with the next session: what passes until then is no cost
        self._follow_load()

    def open(self, change: int) -> None:
        """Counts sessions whose drafter reads the text; less, where it has read it."""
        self._num_opening += change

    def arm_of(self, session: object) -> Arm:
        """Returns what a session drafts in the round that is requested now."""
        trial = self._trial
        if trial is None:
            return self._running
        if trial.sessions is not None and len(trial.sessions) < max(1, load_of(self.num_sessions)):
            trial.sessions.add(session)
        return trial.arm if trial.has(session) else self._running

    def best_own(self) -> Arm:
        """Returns what is best where no drafter drafts: drafts of the verifier, if some were counted, or nothing."""
        known = self.acceptance.get(DraftSource.VERIFIER)
        if known is None or not known.num_drafts or not self.model.verifier.is_known:
            return PLAIN
        rates = self.rates_of(None) | self.rates_of(DraftSource.VERIFIER)
        return max(rates, key=lambda arm: rates[arm])

    def rates_of(self, source: DraftSource | None, own: AcceptedCounts | None = None) -> dict[Arm, float]:
        """Returns the tokens/s that rounds of a session make with a source, by arm; of its own acceptance if given."""
        return self.model.rates(source, self._longest, self._n, self.now, own)

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`."""
        if self.model.load(self._n).arm is None:  # a choice is near
            return min(most, 2)
        if self._trial is not None:
            return min(most, ROUNDS)
        return max(1, min(most, int(RUN_S / self.model.round_s(self.arm, self._n, now))))

    def observe(self, session: object, times: RoundTimes, arm: Arm, *, is_whole: bool) -> None:
        """Adds a round, whose drafts were counted.

        Args:
            session: that had it.
            times: of the round.
            arm: that was asked for.
            is_whole: whether it had that, and its times are typical of it.
        """
        trial, n, running = self._trial, self._n, self._running
        self.now = max(self.now, times.ended_at)  # who waits for a client reports late
        if trial is not None and trial.began_at == math.inf:
            trial.began_at = times.started_at
        is_beside = DraftSource.AHEAD is arm.source is not self.arm.source  # what that adds to a step is not by rows
        if not (times.is_first or is_beside):
            self.model.learn_step(times, n)
        if is_whole and (arm == running or not running.uses_drafter):
            self.model.learn_passes(times, arm, is_quiet=not self._num_opening)
        if is_whole and arm == running and times.started_at >= self._settled_at:
            self.model.learn_between(times, arm, n, (1.0 - min(1.0, self._num_opening / n)) ** 2 / n)
        if trial is not None and trial.has(session):
            is_tried = arm == trial.arm and (times.verdict.num_draft_tokens > 0 or not arm.uses_drafter)
            trial.num_left -= 1.0 if is_tried else 1.0 / ROUNDS  # its drafter may never come
            if trial.num_left <= 0.0:
                self._tried[trial.arm.source] = self.now, self.now - trial.began_at
                self._trial, self._num_rounds = None, n
                self._run(self.arm)
        self._num_rounds += 1
        if self._num_rounds >= max(ROUNDS, n) and self.model.verifier.is_known:
            self._num_rounds = 0
            self._decide(n)

    def count(self, arm: Arm, num_tokens: int, seconds: float, started_at: float) -> None:
        """Counts tokens that a session made with an arm, and the time that it took for them, with all waits."""
        if arm == self._running and self._rate and started_at >= self._settled_at:
            self._made += num_tokens / self._rate
            self._took_s += seconds

    def predicted(self, n: int) -> dict[Arm, float]:
        """Returns the tokens/s that each of so many sessions is predicted to make, by arm."""
        rates: dict[Arm, float] = {}
        for source in (None, *self.acceptance):
            rates |= self.model.rates(source, self._longest, n, self.now)
        return rates

    def rates(self, n: int) -> dict[Arm, float]:
        """Returns the same by what was made of such predictions."""
        load = self.model.load(n)
        return {arm: rate * load.share(arm, self.now) for arm, rate in self.predicted(n).items()}

    @property
    def tokens_per_second(self) -> float | None:
        """What is expected of each session; None if nothing is known."""
        return max(self.rates(self._n).values()) if self.model.verifier.is_known else None

    @property
    def _is_ready(self) -> bool:
        return self.model.verifier.is_known and self.model.passes[self.sources[0]].is_known

    @property
    def _n(self) -> int:
        return max(1, self.num_sessions)

    def _decide(self, n: int) -> None:
        load, now = self.model.load(n), self.now
        if load.arm is None:
            load.arm, load.chosen_at = self.arm, now
        self._note_made()
        predicted = self.predicted(n)
        self._rate = predicted[self._running]
        if self._trial is not None and self._trial.sessions is None:
            return
        rates = {arm: rate * load.share(arm, now) for arm, rate in predicted.items()}
        leads = dict[DraftSource | None, float]()
        for arm, rate in predicted.items():
            leads[arm.source] = max(rate / predicted[self.arm], leads.get(arm.source, 0.0))
        load.lost = {source: lead for source, lead in load.lost.items() if leads[source] < lead * (1.0 + 2.0 * NOISE)}
        possible = (arm for arm in self.arms if self._is_known(arm) and arm.source not in load.lost)
        best = max(possible, key=lambda arm: rates[arm], default=self.arm)
        measured = load.between_s.get(self.arm)
        is_new = now - load.chosen_at < RUN_S and (measured is None or measured.weight(now) < PRIOR)
        if is_new and best.source is not self.arm.source:
            best = self.arm
        if rates[best] > (1.0 + (LEAST_GAIN if best.length else 0.0)) * rates[self.arm]:
            lead = leads[self.arm.source] * predicted[self.arm] / predicted[best]
            if best.source is not self.arm.source and lead > 1.0 + NOISE:
                load.lost[self.arm.source] = lead
            self.arm, load.arm, load.chosen_at = best, best, now
            self._run(best)
        if self._trial is None:
            self._begin_trial(rates, n)

    def _note_made(self) -> None:
        """Compares what was made since the last choice with what was predicted."""
        if self._took_s:
            for key in (self._running, self._running.source):
                self._load.made[key].add(self._made / self._took_s, self._took_s / self._n, self.now, RECENT)
        self._made = self._took_s = 0.0

    def _is_known(self, arm: Arm) -> bool:
        if arm.source is DraftSource.AHEAD:
            return any(known.source is arm.source for load in self.model.loads.values() for known in load.between_s)
        return arm.source in (None, self.sources[0]) or self.acceptance[arm.source].num_drafts > 0

    def _follow_load(self) -> None:
        """Takes what was chosen last at the load, or what is best by what is known."""
        load = self.model.load(self._n)
        if load is not self._load:
            self._note_made()
            self._load = load
        arm = load.arm
        if arm is None and self._is_ready:
            rates = self.rates(self._n)
            arm = max((arm for arm in self.arms if self._is_known(arm)), key=lambda arm: rates[arm])
        if arm is not None and arm != self.arm:
            self.arm = arm
            if self._trial is None or self._trial.sessions is not None:
                self._run(arm)

    def _run(self, arm: Arm) -> None:
        """Lets all sessions draft with an arm."""
        if arm == self._running:
            return
        self._note_made()
        self._running = arm
        self._rate = self.rates_of(arm.source)[arm] if self.model.verifier.is_known else 0.0
        several = 2.0 if self.num_sessions > 1 else 0.0  # others are still in rounds of the arm before
        self._settled_at = self.now + several * self.model.round_s(arm, self._n, self.now)

    def _begin_trial(self, rates: dict[Arm, float], n: int) -> None:
        """Tries a source of which nothing is known, if it may win, or one whose trials have cost less than they may.
        Times drift, and so plain rounds are tried when that may have made them win. Drafts depend on the text as well.
        """
        most, found = 1.0, None
        for source in (None, *self.acceptance):
            arm = max((arm for arm in self.arms if arm.source is source), key=lambda arm: rates[arm])
            at, took_s = self._tried.setdefault(source, (self.now, 0.0))
            if source is self.arm.source:
                self._tried[source] = self.now, took_s
                continue
            is_known = self._is_known(arm) and (arm.length > 0 or arm in self.model.load(n).between_s)
            error = NOISE * math.sqrt(1.0 + (self.now - at) / REMEMBERED_S)
            if (source is None or not is_known) and rates[arm] * (1.0 + error) < rates[self.arm]:
                continue
            is_new = not is_known and not took_s
            took_s = took_s or ROUNDS * self.model.round_s(arm, n, self.now)
            cost_s = took_s * max(2.0 * NOISE, 1.0 - rates[arm] / rates[self.arm])
            turn = math.inf if is_new else TRIAL_SHARE * (self.now - at) / cost_s
            if turn > most:
                most, found = turn, arm if source is None or self.acceptance[source].num_drafts else Arm(source, 1)
                is_of_few = source in (DraftSource.DRAFTER, DraftSource.VERIFIER)
        if found is not None:
            of_all = ROUNDS * n if found.source in (None, DraftSource.AHEAD) else max(ROUNDS, 2 * n)  # times, or drafts
            self._trial = Trial(found, set() if is_of_few else None, self.now, ROUNDS if is_of_few else of_all)
            if not is_of_few:
                self._run(found)
