"""Chooses who drafts, and to what length, for all sessions of a verifier with drafters of one model.

Time is divided into windows, in which all sessions have one *arm*: plain decoding, drafts of some length by a drafter
or by the verifier itself, or token trees of some size. Most windows have the arm that the estimates say is best: tokens
a round, from how many draft tokens were accepted, over the time of a round, as the windows of that arm and load
measured it. Arms that may have become better are probed: a window each, the rarer the more it costs.

All that is measured is of rounds that are over, so an arm depends on the past only: see docs/exactness.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.arms import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.explanation import ArmEstimate, Explanation, LoadExplanation
from draftwire_gateway.speculation.pair_acceptance import PairAcceptance
from draftwire_gateway.speculation.round_costs import RoundCosts, WindowSums
from draftwire_gateway.speculation.windows import LEAST_ROUNDS, Beside, Window, Yield, new_yields

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
LEAST_ROUNDS_OF_EACH = 6
"""A window ends with so many rounds, of each session, after `LEAST_WINDOW_S`, or at `MOST_WINDOW_S`. If few sessions
have had a round of it by then, it may go on until `LONGEST_WINDOW_S`."""
WARM_UP_ROUNDS = 30.0
"""Drafters read the texts of all sessions before a window has its arm: it begins anew while many are still read, for
`MOST_WINDOW_S` or so many plain rounds, whose pace reading has. Where texts are short that goes on for ever."""
PROBE_SHARE = 0.0015
"""What the probes of one arm may cost: so much of the tokens that could be generated meanwhile."""
ALL_PROBES_SHARE = 0.01
"""What the probes of all arms but plain decoding may cost together."""
CALM_FOR_S = 30.0
"""Windows that are not calm, beside which long prompts are read all the time, say little of those that are: for so long
after a calm one they do not count."""
LEAST_LOSS = 0.05
"""Share of a probe's tokens that it costs at least, for all that changes with the arm."""
FIRST_PROBES = 2
FIRST_PROBE_SHARE = 0.008
"""The first probes of an arm, and all of plain decoding, may cost that: one window can be far off."""
PLAIN_PROBES = 3
NEARLY_PLAIN = 2.0
"""The first probes of plain decoding cost what they cost, unless drafts are faster by that factor: it is what they must
not be slower than, and a window beside which a drafter reads prompts is a slow one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Least pause between probes of an arm: doubled after each that did not change the choice."""
LONGEST_ROUND_S = 1.0
"""Longer pauses between rounds are no time of use."""
LEAST_GAIN = 0.01
"""Another arm is chosen if it is better by so much."""
LEAST_GAIN_OVER_PLAIN = 0.05
"""Drafts are chosen if they are better than plain decoding by so much: the best of many arms looks better than it is,
and a window of plain rounds just after drafts worse."""
MAX_SLOW_READER = 0.5
"""Rounds that waited for their reader for longer than this share of their time are left out, unless most did."""
SETTLING_ROUNDS = 2.0
"""Where other sessions run, rounds count from so many rounds after a change of the arm on."""
FIRST_PLAIN_ROUNDS = 4
"""Plain rounds that are requested at once before the time of one is known."""


@dataclass(slots=True)
class Probes:
    """When an arm was probed, and how often at most."""

    last_at: float
    """In seconds of use of the load."""
    least_pause_s: float = FIRST_PAUSE_S
    took_s: float = 0.0
    """The last one, with all that had to be opened for it."""
    is_in_vain: bool = False
    """Whether the last one of its source measured nothing: where texts end soon, no draft may be as long."""


@dataclass(slots=True)
class LoadState:
    """What is known of one load."""

    arm: Arm
    """The chosen one."""
    costs: RoundCosts = field(default_factory=RoundCosts)
    yields: dict[bool, Yield] = field(default_factory=new_yields)
    """Without a drafter and with one."""
    probes: dict[Arm, Probes] = field(default_factory=dict)
    used_s: float = 0.0
    """Time in which there were rounds at that load, in which pauses between its probes are counted: a load that comes
    and goes has no more than its share of them."""
    no_probe_before: float = 0.0
    """In seconds of use."""
    calm_at: float | None = None
    """When a calm window ended last, in seconds of use; None if none did yet."""


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
        self._max_length = lengths[-1]
        self._loads: dict[int, LoadState] = {}
        self._window: Window | None = None
        self._beside: Beside | None = None
        """The latest window of the chosen arm, if no other load came between; None if there is none."""
        self._num_reading = 0
        self._quiet_since = -math.inf
        self._used_until = -math.inf

    def join(self) -> None:
        """Counts one more session, which has its prompt read."""
        self.num_sessions += 1
        self._num_reading += 1

    def end_reading(self, now: float) -> None:
        """Records that a session's prompt was read."""
        self._num_reading -= 1
        self._quiet_since = now

    def leave(self) -> None:
        """Counts one session less."""
        self.num_sessions -= 1

    def window(self, now: float) -> Window:
        """Returns the window that a round belongs to which is requested now."""
        load = load_of(self.num_sessions)
        if self._window is None or self._window.load != load:
            if self._window is not None:
                self._learn(self._window, is_cut=True)
            self._beside = None
            self._window = self._next_window(load, now)
        return self._window

    def count(self, times: RoundTimes, window: Window | None, seconds: float) -> None:
        """Counts a round of any kind: its tokens, and the time that its session took for them.

        Args:
            times: of the round.
            window: in which it was requested; None if that was not chosen.
            seconds: since the end of the session's round before, each with the wait for its reader.
        """
        passed_s = min(LONGEST_ROUND_S, max(0.0, times.ended_at - self._used_until))
        self._used_until = max(self._used_until, times.ended_at)
        window = window or self._window
        state = None if window is None else self._loads.get(window.load)
        if window is None or state is None:
            return
        state.used_s += passed_s
        if window.is_probe:
            return
        for known in state.yields.values():
            known.fade(passed_s)
        if state.arm == window.arm and state.costs.measured(window.arm) and not _is_slow(times):
            known = state.yields[window.arm.uses_drafter]
            known.num_tokens += times.num_tokens
            known.expected_tokens += seconds * self._expected_rate(state, window.arm)

    def observe(self, times: RoundTimes, window: Window, *, is_whole: bool) -> None:
        """Takes note of a round of a session, which was counted.

        Args:
            times: of the round.
            window: in which it was requested.
            is_whole: whether it had the window's arm, and its times are typical of that.
        """
        current = self._window
        if current is None:
            return
        is_of_window = window is current or window.arm == current.arm  # runs outlast windows
        is_of_window = is_of_window and times.started_at >= current.counts_from
        if is_of_window and is_whole:
            expected_tokens = self.acceptance.mean_tokens(current.arm)
            is_slow = _is_slow(times)
            (current.slow if is_slow else current.all).add(times, expected_tokens)
            if not is_slow and self._num_reading == 0 and times.started_at >= self._quiet_since:
                current.quiet.add(times, expected_tokens)
        elif is_of_window and current.arm.uses_drafter and times.why_plain is WhyPlain.WARMING_UP:
            current.num_warming += 1
            if current.is_warming and times.ended_at - current.began_at < self._warm_up_s(current.load):
                current.restart(times.ended_at)
        passed_s = times.ended_at - current.counts_from
        least_rounds = max(LEAST_ROUNDS, LEAST_ROUNDS_OF_EACH * self.num_sessions)
        if self._loads[current.load].costs.is_empty:
            least_rounds //= 2  # the first window is no better than a guess
        is_full = passed_s >= LEAST_WINDOW_S and current.num_rounds >= least_rounds
        is_due = times.ended_at >= current.next_due
        is_outdated = self.acceptance.num_surprises(current.arm) > current.num_surprises
        if is_full or is_due or is_outdated or self._is_over(current, passed_s):
            self._end_window(current, times.ended_at)

    def _is_over(self, window: Window, passed_s: float) -> bool:
        """Whether a window has taken long enough. One with rounds of some sessions alone has not: others are still in
        runs of another arm, and what few share says too little.
        """
        is_of_few = 0 < window.sums.num_rounds < min(self.num_sessions, LEAST_ROUNDS // 2)
        return passed_s >= (LONGEST_WINDOW_S if is_of_few else MOST_WINDOW_S)

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`: up to when another arm has its
        turn.
        """
        window = self.window(now)
        round_s = self._run_round_s(window)
        if round_s is None:
            return min(most, FIRST_PLAIN_ROUNDS)
        return max(1, int(min(most, (self._turn_at(window, round_s) - now) / round_s)))

    def estimate(self, arm: Arm, load: int) -> ArmEstimate:
        """Returns what is expected of an arm. Something must have been measured at that load."""
        state = self._loads[load]
        costs, measured = state.costs, state.costs.measured(arm)
        tokens, round_s = self.acceptance.mean_tokens(arm) * costs.bias(arm), self._round_s(arm, load)
        share = state.yields[arm.uses_drafter].share(2**load * tokens / round_s)
        num_windows = 0 if measured is None else measured.num_windows
        return ArmEstimate(arm.length, tokens, round_s, num_windows, share, arm.num_nodes)

    def best_length(self, source: DraftSource, load: int) -> int:
        """Returns the length that is best for a source by what is known, at least 1."""
        state = self._loads[load]
        if state.arm.source is source:
            return state.arm.length
        arms = [arm for arm in self.arms if arm.source is source]
        if state.costs.is_empty:
            return min(arms, key=lambda arm: abs(arm.length - self._first_arm.length)).length
        return max(arms, key=lambda arm: self.estimate(arm, load).tokens_per_second).length

    @property
    def tokens_per_second(self) -> float | None:
        """What is expected of each session with the best arm, at the nearest load that is known; None if none is."""
        measured = [load for load, state in self._loads.items() if not state.costs.is_empty]
        if not measured:
            return None
        load = min(measured, key=lambda known: abs(known - load_of(self.num_sessions)))
        return self.estimate(self._loads[load].arm, load).tokens_per_second

    def round_s_on_line(self, window: Window) -> list[float]:
        """Returns the time of rounds with 1 to the window's length of draft tokens, seconds, on a line through the
        measured time of its arm; empty if that was not measured.
        """
        costs, source, longest = self._loads[window.load].costs, window.arm.source, window.arm.length
        measured = costs.measured(window.arm)
        if measured is None or source is None:
            return []
        slope = costs.draft_token_s(source) + costs.row_s(source)
        return [
            max(measured.verify_s, measured.round_s - (longest - length) * slope) for length in range(1, longest + 1)
        ]

    def explain(self, source: DraftSource) -> Explanation:
        """Returns what the lengths of a source's drafts are chosen by; of trees, those that were measured."""
        arms = [PLAIN, *(Arm(source, length) for length in range(1, self._max_length + 1))]
        loads = []
        for load, state in sorted(self._loads.items()):
            known = arms
            if source is DraftSource.TREES:
                known = [PLAIN, *(arm for arm in self.acceptance.trees if state.costs.measured(arm) is not None)]
            estimates = [] if state.costs.is_empty else [self.estimate(arm, load) for arm in known]
            best = self._explained(source, state, known, estimates)
            loads.append(
                LoadExplanation(
                    min_sessions=math.floor(2 ** (load - 0.5)) + 1,
                    max_sessions=math.floor(2 ** (load + 0.5)),
                    length=best.length,
                    num_nodes=best.num_nodes,
                    chosen=state.arm.source,
                    estimates=estimates,
                    row_s=state.costs.row_s(source),
                    draft_token_s=state.costs.draft_token_s(source),
                )
            )
        if source is DraftSource.TREES:  # whose tokens fare by their size
            num_drafts = sum(known.num_drafts for known in self.acceptance.trees.values())
            return Explanation(source, self.num_sessions, (), num_drafts, tuple(loads))
        acceptance = self.acceptance.chains[source]
        survival = [acceptance.share * probability for probability in acceptance.survival(self._max_length)]
        return Explanation(source, self.num_sessions, survival, acceptance.num_drafts, tuple(loads))

    def _explained(
        self, source: DraftSource, state: LoadState, arms: Sequence[Arm], estimates: Sequence[ArmEstimate]
    ) -> Arm:
        """Returns the best arm of a source, as far as that is known."""
        if state.arm.source in (source, None) or not estimates:
            return state.arm
        return max(zip(arms, estimates, strict=True), key=lambda known: known[1].tokens_per_second)[0]

    def _round_s(self, arm: Arm, load: int) -> float:
        """Returns the expected time of a round, seconds. What an arm costs of whose source nothing was measured at a
        load is inferred from the nearest one where that is known.
        """
        costs = self._loads[load].costs
        if arm.source is None or costs.tells_of(arm.source) or costs.measured(PLAIN) is None:
            return costs.round_s(arm)
        known = [other for other, state in self._loads.items() if state.costs.tells_price_of(arm.source)]
        if not known:
            return costs.round_s(arm)
        near = min(known, key=lambda other: abs(other - load))
        return costs.round_s(PLAIN) + self._loads[near].costs.price_s(arm, 2.0 ** (load - near))

    def _expected_rate(self, state: LoadState, arm: Arm) -> float:
        """Returns the tokens/s that are expected of a session in rounds of an arm, of which some was measured."""
        return self.acceptance.mean_tokens(arm) * state.costs.bias(arm) / state.costs.round_s(arm)

    def _run_round_s(self, window: Window) -> float | None:
        """Returns the time of a round of a run; None if none is known."""
        if window.sums.num_rounds:
            return window.sums.mean_round_s
        costs = self._loads[window.load].costs
        return None if costs.is_empty else costs.round_s(window.arm)

    def _turn_at(self, window: Window, round_s: float) -> float:
        """Returns when a window without a drafter is over, or its arm is not the chosen one any more."""
        if window.is_probe:
            return window.counts_from + self._window_s(round_s)
        if self._loads[window.load].costs.is_empty:  # nothing is due yet, but something will be when it ends
            return window.began_at + MOST_WINDOW_S
        return window.next_due

    def _window_s(self, round_s: float) -> float:
        """Returns how long a window takes whose rounds take so long."""
        rounds_of_each = max(LEAST_ROUNDS_OF_EACH, LEAST_ROUNDS / max(1, self.num_sessions))
        return max(LEAST_WINDOW_S, rounds_of_each * round_s)

    def _warm_up_s(self, load: int) -> float:
        """Returns for how long a window may begin anew while drafters read."""
        plain = self._loads[load].costs.measured(PLAIN)
        return MOST_WINDOW_S if plain is None else max(MOST_WINDOW_S, WARM_UP_ROUNDS * plain.round_s)

    def _end_window(self, window: Window, now: float) -> None:
        self._learn(window)
        self._window = self._next_window(window.load, now)

    def _learn(self, window: Window, *, is_cut: bool = False) -> None:
        """Takes note of a window that is over. One that a change of the load has cut short may be a single step, which
        says too little of an arm of which nothing else is known.
        """
        state = self._loads[window.load]
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
                state.costs, state.probes, state.yields = RoundCosts(), {}, new_yields()
                self._beside = None
            state.calm_at = state.used_s
        counts = window.is_calm or not self._waits_for_calm(state)
        if sums.num_rounds and counts:
            self._learn_costs(state, window, sums)
        if window.is_probe:
            probes = state.probes.setdefault(window.arm, Probes(state.used_s))
            changes = state.costs.measured(window.arm) is not None and self._best(state, window.load) != state.arm
            probes.last_at, probes.took_s = state.used_s, state.used_s - window.began_used_s
            self._note_probe(state, window.arm, is_in_vain=not sums.num_rounds)
            state.no_probe_before = state.used_s + self._lost_s(state, window.arm, window.load) / ALL_PROBES_SHARE
            grows = counts and not changes and self.estimate(window.arm, window.load).num_windows >= FIRST_PROBES
            probes.least_pause_s = min(LONGEST_PAUSE_S, 2.0 * probes.least_pause_s) if grows else FIRST_PAUSE_S

    def _note_probe(self, state: LoadState, arm: Arm, *, is_in_vain: bool) -> None:
        """Remembers whether a probe measured nothing, for all arms of its source of which nothing is known: each would
        be probed by the same one.
        """
        own = state.probes[arm]
        for other in self.arms:
            if other.source is arm.source and state.costs.measured(other) is None:
                probes = state.probes.setdefault(other, Probes(state.used_s))
                probes.is_in_vain = is_in_vain
                if is_in_vain:
                    probes.last_at, probes.took_s = own.last_at, own.took_s

    def _learn_costs(self, state: LoadState, window: Window, sums: WindowSums) -> None:
        """Adds a window to the costs. A probe's is compared with those of the chosen arm around it, since the time of a
        step depends on how long the texts are by then, and many may have begun together.
        """
        beside, share = self._beside, min(1.0, sums.num_rounds / LEAST_ROUNDS)
        if window.is_probe:
            weight = state.costs.add(window.arm, sums, share, 1.0 if beside is None else beside.slowness)
            if beside is not None:
                beside.probes.append((window.arm, weight))
            return
        if beside is not None and beside.arm == window.arm:
            slowness = state.costs.slowness(window.arm, sums) ** share
            for arm, weight in beside.probes:
                state.costs.correct(arm, (beside.slowness / slowness) ** (weight / 2))
        state.costs.add(window.arm, sums, share)
        self._beside = Beside(window.arm, state.costs.slowness(window.arm, sums) ** share)

    def _next_window(self, load: int, now: float) -> Window:
        state = self._loads.setdefault(load, LoadState(PLAIN))
        is_new = state.costs.is_empty
        state.arm = arm = self._arm_to_begin_with(load) if is_new else self._best(state, load)
        probe, next_due = None, math.inf
        if not is_new and not (self._num_reading and self._waits_for_calm(state)):
            left_s = self._probes_due_in_s(state, load)
            next_due = now + min(left_s.values(), default=math.inf)
            ready = [other for other, seconds in left_s.items() if seconds <= 0.0]
            probe = self._next_probe(state, load, ready)
        if probe is not None:
            arm, next_due = probe, math.inf
        counts_from = now
        before = self._window
        if before is not None and before.arm != arm and self.num_sessions > 1:
            # Until then others are in rounds of the arm before, and sessions share fewer steps than they will.
            counts_from += SETTLING_ROUNDS * before.sums.mean_round_s
        num_surprises = self.acceptance.num_surprises(arm)
        return Window(arm, load, now, probe is not None, counts_from, num_surprises, next_due, state.used_s)

    def _next_probe(self, state: LoadState, load: int, ready: Sequence[Arm]) -> Arm | None:
        """Returns the arm to probe of those whose turn it is: plain decoding before all, else the fastest. Of a source
        that was not measured at that load it is the shortest: that costs least, and tells what the others would take.
        Before trees it is the shortest chain.
        """
        if PLAIN in ready or not ready:
            return PLAIN if ready else None
        fastest = max(ready, key=lambda arm: self.estimate(arm, load).tokens_per_second)
        source = fastest.source
        assert source is not None, "plain decoding goes before all"
        if state.costs.has_measured(source):
            return fastest
        if source is DraftSource.TREES and not state.costs.has_measured(DraftSource.DRAFTER):
            source = DraftSource.DRAFTER
        return min((arm for arm in self.arms if arm.source is source), key=lambda arm: arm.num_rows)

    def _waits_for_calm(self, state: LoadState) -> bool:
        """Whether windows do not count that are not calm."""
        return state.calm_at is not None and state.used_s - state.calm_at < CALM_FOR_S

    def _arm_to_begin_with(self, load: int) -> Arm:
        """Returns that of the next load, if something was measured there. Else one session begins with drafts, and
        several with plain rounds: they cost least to measure, and the more sessions there are, the less do drafts pay.
        So does one session if its first window measured nothing, for want of texts that are long enough.
        """
        before = self._window
        if before is not None and before.load == load and not before.sums.num_rounds:
            return PLAIN
        for near in (self._loads.get(load - 1), self._loads.get(load + 1)):
            if near is not None and not near.costs.is_empty:
                return near.arm
        return PLAIN if load else self._first_arm

    def _best(self, state: LoadState, load: int) -> Arm:
        """Returns the best arm that was measured; the chosen one, unless another is better by `LEAST_GAIN`; and plain
        decoding, unless that is worse by `LEAST_GAIN_OVER_PLAIN`.
        """
        measured = [arm for arm in self.arms if state.costs.measured(arm) is not None]
        rates = {arm: self.estimate(arm, load).tokens_per_second for arm in measured}
        best = max(measured, key=lambda arm: rates[arm])
        if rates[best] < (1.0 + LEAST_GAIN_OVER_PLAIN) * rates.get(PLAIN, 0.0):
            return PLAIN
        if state.arm in rates and rates[best] < (1.0 + LEAST_GAIN) * rates[state.arm]:
            return state.arm
        return best

    def _probes_due_in_s(self, state: LoadState, load: int) -> dict[Arm, float]:
        """Returns after how long each arm but the chosen one is to be probed: the longer, the more that is expected to
        cost.
        """
        estimates = {arm: self.estimate(arm, load) for arm in self.arms}
        chosen_rate = estimates[state.arm].tokens_per_second
        rivals = self._rivals(state, estimates)
        left_s = {}
        for arm, estimate in estimates.items():
            if arm == state.arm or (estimate.num_windows and arm not in rivals):
                continue
            lost_s = self._lost_s(state, arm, load)
            probes = state.probes.get(arm)
            if probes is None:
                probes = state.probes[arm] = Probes(state.used_s)
            is_early = arm == PLAIN or (estimate.num_windows < FIRST_PROBES and arm in rivals)
            share = FIRST_PROBE_SHARE if is_early else PROBE_SHARE
            is_basis = arm == PLAIN and 0 < estimate.num_windows < PLAIN_PROBES
            is_basis = is_basis and chosen_rate < NEARLY_PLAIN * estimate.tokens_per_second
            if is_basis:
                pause_s = probes.least_pause_s
            elif estimate.num_windows:
                pause_s = max(probes.least_pause_s, lost_s / share)
            elif probes.is_in_vain:
                pause_s = max(probes.least_pause_s, probes.took_s * LEAST_LOSS / PROBE_SHARE)
            elif self.acceptance.is_unknown(arm) or estimate.tokens_per_second >= (1.0 + LEAST_GAIN) * chosen_rate:
                pause_s = 0.0  # an expected gain is no cost
            else:
                pause_s = lost_s / share
            due_at = probes.last_at + pause_s
            if estimate.num_windows and estimate.tokens_per_second < chosen_rate and arm != PLAIN:  # else it may gain
                due_at = max(due_at, state.no_probe_before)
            left_s[arm] = due_at - state.used_s
        return left_s

    def _rivals(self, state: LoadState, estimates: Mapping[Arm, ArmEstimate]) -> set[Arm]:
        """Returns the arms that may turn out to be better than the chosen one: plain decoding, the best length of each
        source, and the lengths next to the chosen one.
        """
        sources: dict[DraftSource | None, list[Arm]] = {}
        for arm in self.arms:
            sources.setdefault(arm.source, []).append(arm)
        rivals = {max(arms, key=lambda arm: estimates[arm].tokens_per_second) for arms in sources.values()}
        own = sources[state.arm.source]
        at = own.index(state.arm)
        return rivals.union(own[max(0, at - 1) : at + 2])

    def _lost_s(self, state: LoadState, arm: Arm, load: int) -> float:
        """Returns the time in which the chosen arm would make the tokens that a probe of another one costs."""
        chosen, other = self.estimate(state.arm, load), self.estimate(arm, load)
        share = 1.0 - other.tokens_per_second / chosen.tokens_per_second
        took_s = state.probes[arm].took_s if arm in state.probes else 0.0
        return max(took_s, self._window_s(other.round_s)) * max(LEAST_LOSS, share)


def _is_slow(times: RoundTimes) -> bool:
    """Whether a round waited for its reader."""
    return times.gateway_s > MAX_SLOW_READER * (times.ended_at - times.started_at)


def load_of(num_sessions: int) -> int:
    """Returns the nearest power of two of a number of sessions. Clients often keep a power of two of requests running:
    one that ends shortly before the next begins changes no load.
    """
    return round(math.log2(max(1, num_sessions)))
