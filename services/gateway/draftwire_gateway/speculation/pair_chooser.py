"""Chooses who drafts, and to what length, for all sessions of a verifier with drafters of one model.

Time is divided into windows, in which all sessions have one *arm*: plain decoding, drafts of some length by a drafter
or by the verifier itself, or token trees of some size. Most windows have the arm that the estimates say is best: tokens
a round, from how many draft tokens were accepted, over the time of a round, as the windows of that arm and load
measured it. Arms that may have become better are probed, a window each: see `load_probes`.

All that is measured is of rounds that are over, so an arm depends on the past only: see docs/exactness.md.
"""

import math
from collections.abc import Mapping, Sequence

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.explanation import ArmEstimate, Explanation
from draftwire_gateway.speculation.load_probes import LEAST_GAIN, Prospects
from draftwire_gateway.speculation.pair_acceptance import PairAcceptance
from draftwire_gateway.speculation.pair_estimates import LoadState, PairEstimates, load_of
from draftwire_gateway.speculation.round_costs import WindowSums
from draftwire_gateway.speculation.windows import LEAST_ROUNDS, Window, Yields

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
"""Lengths that are tried. Those between are hardly better than the nearest."""
AHEAD_LENGTHS = (1, 2, 4, 8)
"""Those that are tried ahead of the verdict, in addition to all: each costs probes."""
TREES = ((4, 8), (4, 16), (8, 16), (8, 32))
"""Token trees that are tried, where there are any: draft tokens on a path, and in all. Those next to each other differ
in one price: rows of the verifier, or passes of the drafter."""
MAX_CHOSEN_LENGTH = LENGTHS[-1]
MIN_CHOSEN_NODES, MAX_CHOSEN_NODES = TREES[0][1], TREES[-1][1]
LEAST_WINDOW_S, MOST_WINDOW_S, LONGEST_WINDOW_S = 0.3, 3.0, 10.0
LEAST_ROUNDS_OF_EACH = 4
"""A window ends with so many rounds, of each session, after `LEAST_WINDOW_S`, or at `MOST_WINDOW_S`. If few sessions
have had a round of it by then, it may go on until `LONGEST_WINDOW_S`."""
WARM_UP_ROUNDS = 30.0
"""Drafters read the texts of all sessions before a window has its arm: it begins anew while many are still read, for
`MOST_WINDOW_S` or so many plain rounds, whose pace reading has. Where texts are short that goes on for ever."""
CALM_FOR_S = 30.0
"""Windows that are not calm, beside which long prompts are read all the time, say little of those that are: for so long
after a calm one they do not count."""
LONGEST_ROUND_S = 1.0
"""Longer pauses between rounds are no time of use."""
LEAST_GAIN_OVER_PLAIN = 0.05
"""Drafts take the place of plain decoding if they are better by so much: the best of many arms looks better than it is.
Once they run, that is known, and to change back and forth costs more: all drafters read the texts again."""
MAX_SLOW_READER = 0.5
"""Rounds that waited for their reader for longer than this share of their time are left out, unless most did."""
SETTLING_ROUNDS = 2.0
"""Where other sessions run, rounds count from so many rounds after a change of the arm on."""
FIRST_PLAIN_ROUNDS = 4
"""Plain rounds that are requested at once before the time of one is known."""


class PairChooser:
    """Chooses the arm for all sessions of a pair. All times are by one clock, seconds."""

    def __init__(
        self,
        max_length: int,
        first_length: int,
        sources: Sequence[DraftSource] = (DraftSource.DRAFTER,),
        max_nodes: int = MAX_CHOSEN_NODES,
    ) -> None:
        """Knows nothing yet.

        Args:
            max_length: longest draft.
            first_length: of the first window; the nearest of `LENGTHS` is taken.
            sources: who could draft, at least one; the first one begins. `TREES` needs `DRAFTER` too.
            max_nodes: of a token tree.
        """
        self.sources = sources
        lengths = [length for length in LENGTHS if length <= max_length]
        chains = {source: lengths[1:] for source in sources if source is not DraftSource.TREES}
        if DraftSource.AHEAD in chains:
            chains[DraftSource.AHEAD] = [length for length in lengths if length in AHEAD_LENGTHS]
        has_trees = DraftSource.TREES in sources
        trees = [
            (length, nodes) for length, nodes in TREES if has_trees and length <= max_length and nodes <= max_nodes
        ]
        self.arms = (
            PLAIN,
            *(Arm(source, length) for source, tried in chains.items() for length in tried),
            *(Arm(DraftSource.TREES, *shape) for shape in trees),
        )
        """Those that are tried."""
        self.acceptance = PairAcceptance(chains, [arm for arm in self.arms if arm.num_nodes])
        """Of all sessions of the pair whose random numbers nobody else has."""
        self.num_sessions = 0
        first = min(lengths, key=lambda length: abs(length - first_length))
        self._first_arm = Arm(sources[0], first) if first else PLAIN
        self.known = PairEstimates(self.arms, self.acceptance, first, lengths[-1])
        """What was measured so far."""
        self._window: Window | None = None
        self._num_reading = 0
        self._quiet_since = -math.inf
        self._used_until = -math.inf

    def join(self) -> None:
        """Counts one more session, which has its prompt read."""
        self.num_sessions += 1
        self._num_reading += 1

    def end_reading(self, now: float, *, is_read: bool = True) -> None:
        """Records that a session's prompt was read, or that the session is over before."""
        self._num_reading -= 1
        self._quiet_since = now
        if is_read and self._window is not None:
            self.known.loads[self._window.load].yields.openings.num_texts += 1.0

    def leave(self) -> None:
        """Counts one session less."""
        self.num_sessions -= 1

    def window(self, now: float) -> Window:
        """Returns the window that a round belongs to which is requested now."""
        load = load_of(self.num_sessions)
        if self._window is None or self._window.load != load:
            if self._window is not None:
                self._learn(self._window, is_cut=True)
            self._window = self._next_window(load, now)
        return self._window

    def count(self, times: RoundTimes, window: Window | None, seconds: float, *, is_opening: bool) -> None:
        """Counts a round of any kind: its tokens, and the time that its session took for them.

        Args:
            times: of the round.
            window: in which it was requested; None if that was not chosen.
            seconds: since the end of the session's round before, each with the wait for its reader.
            is_opening: whether a drafter was asked to draft for a text that it had to read first, up to its first
                block.
        """
        passed_s = 0.0
        if times.ended_at > self._used_until:
            passed_s = min(LONGEST_ROUND_S, times.ended_at - self._used_until)
            self._used_until = times.ended_at
        current = self._window
        window = window or current
        state = None if window is None else self.known.loads.get(window.load)
        if window is None or current is None or state is None:
            return
        state.used_s += passed_s
        state.yields.openings.num_tokens += times.num_tokens
        is_of_arm = window is current or (window.load, window.arm) == (current.load, current.arm)
        if current.is_probe or not is_of_arm or times.started_at < current.settled_at or _is_slow(times):
            return  # before, others still had another arm
        if not is_opening:
            current.made.add(times.num_tokens, seconds)
        elif current.expected_rate is not None:
            expected_tokens = seconds * current.expected_rate
            state.yields.openings.add(times.num_tokens, expected_tokens, is_over=times.verdict.num_draft_tokens > 0)

    def observe(self, times: RoundTimes, window: Window, *, is_whole: bool, text_tokens: int = 0) -> None:
        """Takes note of a round of a session, which was counted.

        Args:
            times: of the round.
            window: in which it was requested.
            is_whole: whether it had the window's arm, and its times are typical of that.
            text_tokens: that the text had before, without its prompt.
        """
        current = self._window
        if current is None:
            return
        is_of_arm = window is current or window.arm == current.arm  # runs outlast windows
        is_of_window = is_of_arm and times.started_at >= current.counts_from
        if is_of_window and is_whole:
            expected_tokens = current.expected_tokens(self.acceptance)
            is_slow = _is_slow(times)
            (current.slow if is_slow else current.all).add(times, expected_tokens, text_tokens)
            if not is_slow and self._num_reading == 0 and times.started_at >= self._quiet_since:
                current.quiet.add(times, expected_tokens, text_tokens)
        elif is_of_arm and is_whole and times.started_at >= current.settled_at:
            current.warming.add(times, current.expected_tokens(self.acceptance), text_tokens)
        elif is_of_window and current.arm.uses_drafter and times.why_plain is WhyPlain.WARMING_UP:
            current.num_warming += 1
            if current.is_warming and times.ended_at - current.began_at < self._warm_up_s(current.load):
                current.restart(times.ended_at)
        if self._ends(current, times):
            self._end_window(current, times.ended_at)

    def _ends(self, window: Window, times: RoundTimes) -> bool:
        """Whether a window is over with a round."""
        passed_s = times.ended_at - window.counts_from
        if passed_s >= LEAST_WINDOW_S and window.num_rounds >= self._least_rounds(window.load):
            return True
        # A probe says little without a window of the chosen arm before it, and would cut that short for nothing.
        if times.ended_at >= window.next_due and window.sums.num_rounds >= LEAST_ROUNDS // 2:
            return True
        is_outdated = self.acceptance.num_surprises(window.arm) > window.num_surprises
        return is_outdated or self._is_over(window, passed_s)

    def _least_rounds(self, load: int) -> int:
        """Returns how many rounds a window has before it is over, unless it takes too long."""
        least_rounds = max(LEAST_ROUNDS, LEAST_ROUNDS_OF_EACH * self.num_sessions)
        is_first = self.known.loads[load].costs.is_empty  # and no better than a guess
        return least_rounds // 2 if is_first else least_rounds

    def _is_over(self, window: Window, passed_s: float) -> bool:
        """Whether a window has taken long enough. One with rounds of some sessions alone has not: others are still in
        runs of another arm, and what few share says too little.
        """
        if passed_s < MOST_WINDOW_S:
            return False
        is_of_few = 0 < window.sums.num_rounds < min(self.num_sessions, LEAST_ROUNDS // 2)
        return not is_of_few or passed_s >= LONGEST_WINDOW_S

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`: up to when another arm has its
        turn.
        """
        window = self.window(now)
        round_s = self._run_round_s(window)
        if round_s is None:
            return min(most, FIRST_PLAIN_ROUNDS)
        return max(1, int(min(most, (self._turn_at(window, round_s) - now) / round_s)))

    def explain(self, source: DraftSource) -> Explanation:
        """Returns what the lengths of a source's drafts are chosen by; of trees, those that were measured."""
        return self.known.explain(source, self.num_sessions)

    @property
    def tokens_per_second(self) -> float | None:
        """What is expected of each session with the best arm; None if nothing is known."""
        return self.known.tokens_per_second(self.num_sessions)

    def _run_round_s(self, window: Window) -> float | None:
        """Returns the time of a round of a run; None if none is known."""
        if window.sums.num_rounds:
            return window.sums.mean_round_s
        costs = self.known.loads[window.load].costs
        return None if costs.is_empty else costs.round_s(window.arm)

    def _turn_at(self, window: Window, round_s: float) -> float:
        """Returns when a window without a drafter is over, or its arm is not the chosen one any more."""
        if window.is_probe:
            return window.counts_from + self._window_s(round_s)
        if self.known.loads[window.load].costs.is_empty:  # nothing is due yet, but something will be when it ends
            return window.began_at + MOST_WINDOW_S
        return window.next_due

    def _window_s(self, round_s: float) -> float:
        """Returns how long a window takes whose rounds take so long."""
        rounds_of_each = max(LEAST_ROUNDS_OF_EACH, LEAST_ROUNDS / max(1, self.num_sessions))
        return max(LEAST_WINDOW_S, rounds_of_each * round_s)

    def _warm_up_s(self, load: int) -> float:
        """Returns for how long a window may begin anew while drafters read."""
        plain = self.known.loads[load].costs.measured(PLAIN)
        return MOST_WINDOW_S if plain is None else max(MOST_WINDOW_S, WARM_UP_ROUNDS * plain.round_s)

    def _end_window(self, window: Window, now: float) -> None:
        self._learn(window)
        self._window = self._next_window(window.load, now)

    def _learn(self, window: Window, *, is_cut: bool = False) -> None:
        """Takes note of a window that is over. One that a change of the load has cut short may be a single step, which
        says too little of an arm of which nothing else is known.
        """
        state = self.known.loads[window.load]
        sums = window.sums
        if is_cut and state.costs.measured(window.arm) is None and sums.num_rounds < LEAST_ROUNDS // 2:
            sums = WindowSums()
        if (
            not sums.num_rounds
            and window.warming.num_rounds >= LEAST_ROUNDS
            and state.costs.measured(window.arm) is None
        ):
            sums = window.warming
        if window.is_calm and sums.num_rounds and sums is not window.warming:
            if state.calm_at is None:
                state.costs.doubt()
                state.probes.forget()
                state.yields = Yields()
            state.calm_at = state.used_s
        state.yields.fade(state.used_s - window.began_used_s)
        if not window.is_probe:
            state.yields.of(window.arm).add(window.made.num_tokens, window.expected_of_made)
        if window.num_rounds or not is_cut:
            state.was_calm = window.is_calm
        counts = window.is_calm or not self._waits_for_calm(state)
        if sums.num_rounds and counts:
            share, seconds = min(1.0, sums.num_rounds / LEAST_ROUNDS), state.used_s - state.learnt_at
            state.costs.add(window.arm, sums, share, seconds, is_probe=window.is_probe)
            state.learnt_at = state.used_s
        if window.is_probe:
            known = self._prospects(state, self.known.estimates(window.load))
            changes = state.costs.measured(window.arm) is not None and self._best(state, known.estimates) != state.arm
            state.probes.end(
                window.arm,
                known,
                state.used_s - window.began_used_s,
                is_in_vain=not sums.num_rounds,
                is_settled=counts and not changes,
            )

    def _next_window(self, load: int, now: float) -> Window:
        state = self.known.loads.setdefault(load, LoadState(PLAIN))
        is_new = state.costs.is_empty
        estimates = {} if is_new else self.known.estimates(load)
        state.arm = arm = self._arm_to_begin_with(load) if is_new else self._best(state, estimates)
        begins = self._window is None or self._window.load != load
        probe, next_due = None, math.inf
        if not is_new and (state.was_calm or not self._num_reading or not self._waits_for_calm(state)):
            known = self._prospects(state, estimates)
            left_s = state.probes.due_in_s(known, begins=begins)
            next_due = now + min(left_s.values(), default=math.inf)
            ready = [other for other, seconds in left_s.items() if seconds <= 0.0]
            probe = state.probes.next_of(ready, known, state.costs)
        if probe is not None:
            arm, next_due = probe, math.inf
        settled_at = now
        before = self._window
        if before is not None and before.arm != arm and self.num_sessions > 1:
            # Until then others are in rounds of the arm before, and sessions share fewer steps than they will.
            measured = before.sums if before.sums.num_rounds else before.warming
            settled_at += SETTLING_ROUNDS * measured.mean_round_s
        num_surprises = self.acceptance.num_surprises(arm)
        is_known = probe is None and state.costs.measured(arm) is not None
        expected_rate = self.known.expected_rate(arm, load) if is_known else None
        return Window(
            arm=arm,
            load=load,
            began_at=now,
            is_probe=probe is not None,
            settled_at=settled_at,
            num_surprises=num_surprises,
            next_due=next_due,
            began_used_s=state.used_s,
            expected_rate=expected_rate,
        )

    def _prospects(self, state: LoadState, estimates: Mapping[Arm, ArmEstimate]) -> Prospects:
        def is_unknown(arm: Arm) -> bool:
            return self.acceptance.is_unknown(arm) or state.costs.is_doubtful(arm.source)

        return Prospects(state.arm, estimates, state.used_s, self._window_s, is_unknown)

    def _waits_for_calm(self, state: LoadState) -> bool:
        """Whether windows do not count that are not calm."""
        return state.calm_at is not None and state.used_s - state.calm_at < CALM_FOR_S

    def _arm_to_begin_with(self, load: int) -> Arm:
        """Returns that of the next load, if something was measured there, or of a larger one if that has drafts: the
        more sessions there are, the less do they pay, and texts that arrive one after the other are few at first. Else
        one session begins with drafts, and several with plain rounds: they cost least to measure. So does one session
        if its first window measured nothing, for want of texts that are long enough.
        """
        before = self._window
        if before is not None and before.load == load and not before.sums.num_rounds:
            return PLAIN
        for near in (self.known.loads.get(load - 1), self.known.loads.get(load + 1)):
            if near is not None and not near.costs.is_empty:
                return near.arm
        known = [other for other, state in self.known.loads.items() if other > load and not state.costs.is_empty]
        if known and self.known.loads[min(known)].arm.length:
            return self.known.loads[min(known)].arm
        return PLAIN if load else self._first_arm

    def _best(self, state: LoadState, estimates: Mapping[Arm, ArmEstimate]) -> Arm:
        """Returns the best arm that was measured; the chosen one, unless another is better by `LEAST_GAIN`; and plain
        decoding, unless that is worse: by `LEAST_GAIN_OVER_PLAIN`, if drafts are not the chosen ones.
        """
        measured = [arm for arm in self.arms if state.costs.measured(arm) is not None]
        rates = {arm: estimates[arm].tokens_per_second for arm in measured}
        best = max(measured, key=lambda arm: rates[arm])
        has_drafts = state.arm in rates and state.arm != PLAIN
        if rates[best] < (1.0 + (0.0 if has_drafts else LEAST_GAIN_OVER_PLAIN)) * rates.get(PLAIN, 0.0):
            return PLAIN
        if state.arm in rates and rates[best] < (1.0 + LEAST_GAIN) * rates[state.arm]:
            return state.arm
        return best


def _is_slow(times: RoundTimes) -> bool:
    """Whether a round waited for its reader."""
    return times.gateway_s > MAX_SLOW_READER * (times.ended_at - times.started_at)
