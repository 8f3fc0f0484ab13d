"""Chooses the length of drafts, 0 included, for all sessions of a verifier with drafters of one model.

Time is divided into windows, in which all sessions draft to one length. Most windows have the length that the estimates
say is best: tokens a round, from how many draft tokens were accepted, over the time of a round, as the windows of that
length and load measured it. Lengths that may have become better are probed: a window each, the rarer the more it costs.

All that is measured is of rounds that are over, so a length depends on the past only: see docs/exactness.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate
from draftwire_gateway.speculation.round_costs import RoundCosts, WindowSums

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
"""Lengths that are tried. Those between are hardly better than the nearest."""
MAX_CHOSEN_LENGTH = LENGTHS[-1]
LEAST_WINDOW_S, MOST_WINDOW_S = 0.3, 3.0
LEAST_ROUNDS = 20
LEAST_ROUNDS_OF_EACH = 6
"""A window ends with so many rounds, of each session, after `LEAST_WINDOW_S`, or at `MOST_WINDOW_S`."""
PROBE_SHARE = 0.0015
"""What the probes of one length may cost: so much of the tokens that could be generated meanwhile."""
ALL_PROBES_SHARE = 0.01
"""What the probes of all lengths together may cost."""
LEAST_QUIET = 0.1
CALM_FOR_S = 30.0
"""A window is calm if so large a share of its rounds is quiet. Others, beside which long prompts are read all the time,
say little of these: for so long after a calm one they do not count."""
LEAST_LOSS = 0.05
"""Share of a probe's tokens that it costs at least, for all that changes with the length."""
FIRST_PROBES = 2
FIRST_PROBE_SHARE = 0.008
"""The first probes of a length may cost that: one window can be far off."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Least pause between probes of a length: doubled after each that did not change the choice."""
LONGEST_ROUND_S = 1.0
"""Longer pauses between rounds are no time of use."""
LEAST_GAIN = 0.01
"""Another length is chosen if it is better by so much."""
MAX_SLOW_READER = 0.5
"""Rounds that waited for their reader for longer than this share of their time are left out, unless most did."""
SETTLING_ROUNDS = 2.0
"""Where other sessions run, rounds count from so many rounds after a change of the length on."""
FIRST_PLAIN_ROUNDS = 4
"""Plain rounds that are requested at once before the time of one is known."""


@dataclass(slots=True)
class Window:
    """A stretch of time in which all sessions draft to one length."""

    length: int
    load: int
    """Power of two of the number of sessions."""
    began_at: float
    is_probe: bool
    counts_from: float
    """Rounds that began earlier do not count: other sessions still had another length."""
    num_surprises: int = 0
    """Of the acceptance, when it began: the next one ends it."""
    next_due: float = math.inf
    """When it is another length's turn to be probed."""
    quiet: WindowSums = field(default_factory=WindowSums)
    """Over rounds beside which nobody read a prompt."""
    all: WindowSums = field(default_factory=WindowSums)
    """Over all rounds but slow ones."""
    slow: WindowSums = field(default_factory=WindowSums)
    """Over rounds that waited for their reader. If most did, it is the gateway that has no time for them."""

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
class Probes:
    """When a length was probed, and how often at most."""

    last_at: float
    """In seconds of use."""
    least_pause_s: float = FIRST_PAUSE_S


@dataclass(slots=True)
class LoadState:
    """What is known of one load."""

    length: int
    """The chosen one."""
    costs: RoundCosts = field(default_factory=RoundCosts)
    probes: dict[int, Probes] = field(default_factory=dict)
    no_probe_before: float = 0.0
    """In seconds of use."""
    calm_at: float | None = None
    """When a calm window ended last, in seconds of use; None if none did yet."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """What is expected of one length."""

    length: int
    tokens_per_round: float
    round_s: float
    num_windows: int
    """In which it was measured; 0 if its time is inferred from other lengths."""

    @property
    def tokens_per_second(self) -> float:
        """Of each session."""
        return self.tokens_per_round / self.round_s


@dataclass(frozen=True, slots=True)
class LoadExplanation:
    """What the length is chosen by at one load."""

    min_sessions: int
    max_sessions: int
    length: int
    """The best one; another may be probed."""
    estimates: Sequence[LengthEstimate]
    """Of lengths 0 to the largest; empty before anything was measured."""
    row_s: float
    """Time by which one more row of each session lengthens the verifier's step, seconds; 0 if not known."""
    draft_token_s: float
    """Time that the drafter takes for a draft token, seconds; 0 if not known."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the length is chosen by."""

    num_sessions: int
    survival: Sequence[float]
    """P(at least k tokens are accepted), k = 1 to the largest length."""
    num_drafts: int
    """That this is known from."""
    loads: Sequence[LoadExplanation]
    """Each load that there was."""


class PairChooser:
    """Chooses the length for all sessions of a pair. All times are by one clock, seconds."""

    def __init__(self, max_length: int, first_length: int) -> None:
        """Knows nothing yet.

        Args:
            max_length: longest draft.
            first_length: of the first window; the nearest of `LENGTHS` is taken.
        """
        self.lengths = tuple(length for length in LENGTHS if length <= max_length)
        """Those that are tried."""
        self.acceptance = AcceptanceEstimate()
        """Of all sessions of the pair whose random numbers nobody else has."""
        self.num_sessions = 0
        self._first_length = min(self.lengths, key=lambda length: abs(length - first_length))
        self._loads: dict[int, LoadState] = {}
        self._window: Window | None = None
        self._num_reading = 0
        self._quiet_since = -math.inf
        self._used_s = 0.0
        """Time in which there were rounds: pauses between probes are counted in it."""
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
        load = _load_of(self.num_sessions)
        if self._window is None or self._window.load != load:
            self._window = self._next_window(load, now)
        return self._window

    def observe(self, times: RoundTimes, window: Window, *, is_whole: bool) -> None:
        """Takes note of a round of a session.

        Args:
            times: of the round.
            window: in which it was requested.
            is_whole: whether it was drafted to the window's length, and its times are typical of that.
        """
        current = self._window
        if current is None:
            return
        self._used_s += min(LONGEST_ROUND_S, max(0.0, times.ended_at - self._used_until))
        self._used_until = max(self._used_until, times.ended_at)
        service_s = times.ended_at - times.started_at
        is_of_window = window is current or window.length == current.length  # runs outlast windows
        is_of_window = is_of_window and times.started_at >= current.counts_from
        if is_of_window and is_whole:
            expected_tokens = self.acceptance.mean_tokens(current.length)
            is_slow = times.gateway_s > MAX_SLOW_READER * service_s
            (current.slow if is_slow else current.all).add(times, expected_tokens)
            if not is_slow and self._num_reading == 0 and times.started_at >= self._quiet_since:
                current.quiet.add(times, expected_tokens)
        passed_s = times.ended_at - current.counts_from
        least_rounds = max(LEAST_ROUNDS, LEAST_ROUNDS_OF_EACH * self.num_sessions)
        is_full = passed_s >= LEAST_WINDOW_S and current.num_rounds >= least_rounds
        is_due = times.ended_at >= current.next_due
        is_outdated = self.acceptance.num_surprises > current.num_surprises
        if is_full or is_due or is_outdated or passed_s >= MOST_WINDOW_S:
            self._end_window(current, times.ended_at)

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`: up to when another length has
        its turn.
        """
        window = self.window(now)
        round_s = self._run_round_s(window)
        if round_s is None:
            return min(most, FIRST_PLAIN_ROUNDS)
        return max(1, int(min(most, (self._turn_at(window, round_s) - now) / round_s)))

    def estimate(self, length: int, load: int) -> LengthEstimate:
        """Returns what is expected of a length. Something must have been measured at that load."""
        costs = self._loads[load].costs
        measured = costs.measured(length)
        return LengthEstimate(
            length,
            self.acceptance.mean_tokens(length) * costs.bias(length),
            costs.round_s(length),
            0 if measured is None else measured.num_windows,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """What is expected of each session with the best length, at the nearest load that was measured; None if none
        was.
        """
        measured = [load for load, state in self._loads.items() if not state.costs.is_empty]
        if not measured:
            return None
        load = min(measured, key=lambda known: abs(known - _load_of(self.num_sessions)))
        return self.estimate(self._loads[load].length, load).tokens_per_second

    def round_s_on_line(self, window: Window) -> list[float]:
        """Returns the time of rounds with 1 to the window's length of draft tokens, seconds, on a line through the
        measured time of that length; empty if that was not measured.
        """
        costs = self._loads[window.load].costs
        measured = costs.measured(window.length)
        if measured is None:
            return []
        slope = costs.draft_token_s + costs.row_s
        return [
            max(measured.verify_s, measured.round_s - (window.length - length) * slope)
            for length in range(1, window.length + 1)
        ]

    def explain(self) -> Explanation:
        """Returns what lengths are chosen by."""
        largest = self.lengths[-1]
        loads = []
        for load, state in sorted(self._loads.items()):
            lengths = range(0 if state.costs.is_empty else largest + 1)
            estimates = [self.estimate(length, load) for length in lengths]
            loads.append(
                LoadExplanation(
                    min_sessions=2**load,
                    max_sessions=2 ** (load + 1) - 1,
                    length=state.length,
                    estimates=estimates,
                    row_s=state.costs.row_s,
                    draft_token_s=state.costs.draft_token_s,
                )
            )
        return Explanation(
            self.num_sessions, self.acceptance.survival(largest), self.acceptance.num_drafts, tuple(loads)
        )

    def _run_round_s(self, window: Window) -> float | None:
        """Returns the time of a round of a run; None if none is known."""
        if window.sums.num_rounds:
            return window.sums.mean_round_s
        costs = self._loads[window.load].costs
        return None if costs.is_empty else costs.round_s(window.length)

    def _turn_at(self, window: Window, round_s: float) -> float:
        """Returns when a window of plain rounds is over, or its length is not the chosen one any more."""
        if not window.is_probe:
            return window.next_due
        return window.counts_from + self._window_s(round_s)

    def _window_s(self, round_s: float) -> float:
        """Returns how long a window takes whose rounds take so long."""
        rounds_of_each = max(LEAST_ROUNDS_OF_EACH, LEAST_ROUNDS / max(1, self.num_sessions))
        return max(LEAST_WINDOW_S, rounds_of_each * round_s)

    def _end_window(self, window: Window, now: float) -> None:
        state = self._loads[window.load]
        sums = window.sums
        if window.is_calm and sums.num_rounds:
            if state.calm_at is None:
                state.costs, state.probes = RoundCosts(), {}
            state.calm_at = self._used_s
        counts = window.is_calm or not self._waits_for_calm(state)
        if sums.num_rounds and counts:
            state.costs.add(window.length, sums, min(1.0, sums.num_rounds / LEAST_ROUNDS))
        if window.is_probe:
            probes = state.probes.setdefault(window.length, Probes(self._used_s))
            changes = state.costs.measured(window.length) is not None and self._best(state, window.load) != state.length
            probes.last_at = self._used_s
            state.no_probe_before = self._used_s + self._lost_s(state, window.length, window.load) / ALL_PROBES_SHARE
            grows = counts and not changes and self.estimate(window.length, window.load).num_windows >= FIRST_PROBES
            probes.least_pause_s = min(LONGEST_PAUSE_S, 2.0 * probes.least_pause_s) if grows else FIRST_PAUSE_S
        self._window = self._next_window(window.load, now)

    def _next_window(self, load: int, now: float) -> Window:
        state = self._loads.get(load)
        if state is None:
            state = self._loads[load] = LoadState(self._length_at_other_load(load))
        length, probe, next_due = state.length, None, math.inf
        if not state.costs.is_empty:
            state.length = length = self._best(state, load)
        if not state.costs.is_empty and not (self._num_reading and self._waits_for_calm(state)):
            left_s = self._probes_due_in_s(state, load)
            next_due = now + min(left_s.values(), default=math.inf)
            ready = [other for other, seconds in left_s.items() if seconds <= 0.0]
            probe = max(ready, key=lambda other: self.estimate(other, load).tokens_per_second, default=None)
        if probe is not None:
            length, next_due = probe, math.inf
        counts_from = now
        before = self._window
        if before is not None and before.length != length and self.num_sessions > 1:
            # Until then others are in rounds of the length before, and sessions share fewer steps than they will.
            counts_from += SETTLING_ROUNDS * before.sums.mean_round_s
        return Window(length, load, now, probe is not None, counts_from, self.acceptance.num_surprises, next_due)

    def _waits_for_calm(self, state: LoadState) -> bool:
        """Whether windows do not count that are not calm."""
        return state.calm_at is not None and self._used_s - state.calm_at < CALM_FOR_S

    def _length_at_other_load(self, load: int) -> int:
        if not self._loads:
            return self._first_length
        return self._loads[min(self._loads, key=lambda other: abs(other - load))].length

    def _best(self, state: LoadState, load: int) -> int:
        """Returns the best length that was measured; the chosen one, unless another is better by `LEAST_GAIN`."""
        measured = [length for length in self.lengths if state.costs.measured(length) is not None]
        rates = {length: self.estimate(length, load).tokens_per_second for length in measured}
        best = max(measured, key=lambda length: rates[length])
        if state.length in rates and rates[best] < (1.0 + LEAST_GAIN) * rates[state.length]:
            return state.length
        return best

    def _probes_due_in_s(self, state: LoadState, load: int) -> dict[int, float]:
        """Returns after how long each length but the chosen one is to be probed: the longer, the more that is expected
        to cost.
        """
        chosen_rate = self.estimate(state.length, load).tokens_per_second
        left_s = {}
        for length in self.lengths:
            if length == state.length:
                continue
            estimate = self.estimate(length, load)
            lost_s = self._lost_s(state, length, load)
            probes = state.probes.get(length)
            if probes is None:
                probes = state.probes[length] = Probes(self._used_s)
            if estimate.num_windows:
                share = PROBE_SHARE if estimate.num_windows >= FIRST_PROBES else FIRST_PROBE_SHARE
                pause_s = max(probes.least_pause_s, lost_s / share)
            elif length == 0 or estimate.tokens_per_second >= (1.0 + LEAST_GAIN) * chosen_rate:
                pause_s = 0.0  # all else is inferred from plain decoding; an expected gain is no cost
            else:
                pause_s = lost_s / PROBE_SHARE
            due_at = probes.last_at + pause_s
            if estimate.num_windows and estimate.tokens_per_second < chosen_rate:  # else it may gain
                due_at = max(due_at, state.no_probe_before)
            left_s[length] = due_at - self._used_s
        return left_s

    def _lost_s(self, state: LoadState, length: int, load: int) -> float:
        """Returns the time in which the chosen length would make the tokens that a probe of another one costs."""
        chosen, other = self.estimate(state.length, load), self.estimate(length, load)
        share = 1.0 - other.tokens_per_second / chosen.tokens_per_second
        return self._window_s(other.round_s) * max(LEAST_LOSS, share)


def _load_of(num_sessions: int) -> int:
    """Returns the power of two of a number of sessions."""
    return max(1, num_sessions).bit_length() - 1
