"""What rounds cost at one load, by who drafts, to what length and in what shape."""

import math
from dataclasses import dataclass
from functools import partial

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.arm_paces import ArmPaces

MOST_SLOWNESS = 2.0
"""Of a window, over what is known: more counts as that."""
NEW_WEIGHT = 0.25
"""Weight of a window in the running means of its length, once there are several."""
TRUSTED_TOKENS = 300.0
"""The prediction of the accepted tokens counts like so many tokens that were measured."""
LINE_WINDOWS = 1.0
"""The line through all lengths of a source counts like so many windows of each."""
MOST_WINDOWS = 8
"""A length counts in that line as at most so many windows."""
PRICE_SPREAD = 16.0
"""The price of a draft token and its row counts in that line like lengths so far apart: the sum of squares, of windows.
Two lengths next to each other say little of the others."""
KEPT_TOKENS = 0.8
"""Of the measured tokens of a length, what is kept when more are measured."""


@dataclass(slots=True)
class ArmCost:
    """What was measured of rounds of one arm, while all sessions had that one."""

    rest_s: float
    """From the request of a round to the next one's, without drafting, seconds."""
    draft_s: float
    """Drafting, seconds."""
    verify_s: float
    """The verifier's step in it, seconds."""
    num_windows: int = 0
    num_tokens: float = 0.0
    """Tokens that the rounds committed; old ones fade."""
    expected_tokens: float = 0.0
    """Those that were expected of the same rounds by the acceptance at their time."""
    is_doubtful: bool = False
    """Whether that was measured where all times are others: a guess, until more is measured."""
    num_draft_tokens: float = 0.0
    """Of a round, in the mean. A verifier that drafts by itself has no guess in most rounds of some texts."""

    @property
    def round_s(self) -> float:
        """From the request of a round to the next one's, seconds."""
        return self.rest_s + self.draft_s

    @property
    def bias(self) -> float:
        """Tokens over expected tokens: the position alone does not say all of a token's acceptance."""
        return (self.num_tokens + TRUSTED_TOKENS) / (self.expected_tokens + TRUSTED_TOKENS)


@dataclass(slots=True)
class WindowSums:
    """Sums over the rounds of one length in a window."""

    num_rounds: int = 0
    round_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    num_tokens: int = 0
    expected_tokens: float = 0.0
    num_draft_tokens: int = 0
    text_tokens: int = 0
    """That the sessions' texts had before, without their prompts."""

    def add(self, times: RoundTimes, expected_tokens: float, text_tokens: int = 0) -> None:
        """Adds a round."""
        self.num_rounds += 1
        self.round_s += times.duration_s
        self.verify_s += times.verify_s
        self.draft_s += times.draft_s
        self.num_tokens += times.num_tokens
        self.expected_tokens += expected_tokens
        self.num_draft_tokens += times.verdict.num_draft_tokens
        self.text_tokens += text_tokens

    def merge(self, other: "WindowSums") -> None:
        """Adds the rounds of another stretch of time."""
        self.num_rounds += other.num_rounds
        self.round_s += other.round_s
        self.verify_s += other.verify_s
        self.draft_s += other.draft_s
        self.num_tokens += other.num_tokens
        self.expected_tokens += other.expected_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.text_tokens += other.text_tokens

    @property
    def mean_round_s(self) -> float:
        """Mean time of the rounds, seconds; 0 if there are none."""
        return self.round_s / self.num_rounds if self.num_rounds else 0.0

    @property
    def mean_draft_tokens(self) -> float:
        """Mean draft tokens of the rounds; 0 if there are none."""
        return self.num_draft_tokens / self.num_rounds if self.num_rounds else 0.0


class RoundCosts:
    """Times of rounds by arm. Those of lengths that were not measured are on a line through the others of their source.
    A source of which nothing was measured is taken to cost nothing, so that it is soon tried; trees as what chains
    have shown of the prices.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self._arms: dict[Arm, ArmCost] = {}
        self._paces = ArmPaces()
        """Of rounds without drafting."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._arms

    def measured(self, arm: Arm) -> ArmCost | None:
        """Returns what was measured of an arm; None if it was not, or is doubtful."""
        cost = self._arms.get(arm)
        return None if cost is None or cost.is_doubtful else cost

    def doubt(self) -> None:
        """Takes all that was measured for a guess, which the next window of an arm replaces."""
        for cost in self._arms.values():
            cost.is_doubtful = True
        self._paces.doubt()

    def is_doubtful(self, source: DraftSource | None) -> bool:
        """Whether all that was measured of a source is, and something was."""
        known = [cost.is_doubtful for arm, cost in self._arms.items() if arm.source is source]
        return bool(known) and all(known)

    def draft_token_s(self, source: DraftSource) -> float:
        """Returns the time that drafting takes for a token, of trees for a depth, seconds; 0 before anything was
        drafted.
        """
        costs = self._of(source)
        tokens = sum(arm.length * cost.num_windows for arm, cost in costs.items())
        return sum(cost.draft_s * cost.num_windows for cost in costs.values()) / max(1, tokens)

    def row_s(self, source: DraftSource) -> float:
        """Returns the time by which one more row of each session lengthens a step of the verifier, seconds; 0 if not
        known. A step with trees takes longer than without for more than their rows: they are compared with each other,
        and taken to cost what those of chains do until there are two sizes.
        """
        costs = self._of(source)
        if source is DraftSource.TREES and len({arm.num_rows for arm in costs}) < 2:
            return self.row_s(DraftSource.DRAFTER)
        if source is not DraftSource.TREES and PLAIN in self._arms:
            costs[PLAIN] = self._arms[PLAIN]
        by_rows = sorted(costs, key=lambda arm: arm.num_rows)
        if not by_rows or by_rows[0].num_rows == by_rows[-1].num_rows:
            return 0.0
        first, last = by_rows[0], by_rows[-1]
        return max(0.0, (costs[last].verify_s - costs[first].verify_s) / (last.num_rows - first.num_rows))

    def add(self, arm: Arm, sums: WindowSums, share: float, seconds: float, *, is_probe: bool = False) -> None:
        """Adds a window. What changes in an arm's rounds is the arm, or the machine, which changes those of all others:
        whichever was less certain (see `arm_paces`). What more or fewer draft tokens explain is neither.

        Args:
            arm: of the window.
            sums: over its rounds, at least one.
            share: how full the window was, above 0 to 1.
            seconds: of use of the load since the window before.
            is_probe: whether another arm is the chosen one: it says nothing of the drafter beside other arms.
        """
        verify_s, draft_s = sums.verify_s / sums.num_rounds, sums.draft_s / sums.num_rounds
        rest_s = max(1e-9, sums.round_s / sums.num_rounds - draft_s)
        self._paces.pass_time(seconds, sums.text_tokens / sums.num_rounds)
        self._follow_pace()
        cost = self._arms.get(arm)
        if cost is None:
            cost = self._arms[arm] = ArmCost(rest_s, draft_s, verify_s, num_draft_tokens=sums.mean_draft_tokens)
            self._paces.begin(arm, math.log(rest_s), share)
            weight = 1.0
        else:
            if cost.is_doubtful:
                cost.num_windows, cost.is_doubtful = 0, False
            weight = share * max(NEW_WEIGHT, 1.0 / (cost.num_windows + 1)) if cost.num_windows else 1.0
            self._learn_pace(arm, rest_s, sums.mean_draft_tokens, share, weight)
        drafted_s = cost.draft_s
        cost.verify_s += weight * (cost.rest_s * verify_s / rest_s - cost.verify_s)
        cost.draft_s += weight * (draft_s - cost.draft_s)
        cost.num_windows += 1
        cost.num_tokens = KEPT_TOKENS * cost.num_tokens + sums.num_tokens
        cost.expected_tokens = KEPT_TOKENS * cost.expected_tokens + sums.expected_tokens
        if not is_probe and arm.source is not None and drafted_s > 0.0:
            for other, other_cost in self._of(arm.source).items():
                if other != arm:
                    other_cost.draft_s *= cost.draft_s / drafted_s

    def round_s(self, arm: Arm) -> float:
        """Returns the time of a round, seconds: the measured one, drawn to a line through all arms of its source while
        it is known from few windows. Something must have been measured.
        """
        cost = self._arms.get(arm)
        basis = None if arm.source is None else self._basis(arm.source)
        if basis is None:
            # At best, a step without drafts, and a draft that costs nothing.
            plain = self._arms.get(PLAIN)
            return plain.round_s if plain is not None else min(self._plain_at_best_s(each) for each in DraftSource)
        on_line_s = self._at_prices_s(arm, basis) if arm.num_nodes else self._on_line_s(arm, basis)
        line_s = max(self._plain_at_best_s(basis), on_line_s)
        if cost is None:
            return line_s
        return (cost.num_windows * cost.round_s + LINE_WINDOWS * line_s) / (cost.num_windows + LINE_WINDOWS)

    def bias(self, arm: Arm) -> float:
        """Returns `ArmCost.bias` of an arm, or of the nearest one of its source that was measured; 1 without any."""
        costs = {} if arm.source is None else self._of(arm.source)
        if not costs:
            return 1.0
        return costs[min(costs, key=partial(distance, arm))].bias

    def has_measured(self, source: DraftSource) -> bool:
        """Whether some arm of a source was measured."""
        return any(arm.source is source for arm in self._arms)

    def tells_of(self, source: DraftSource) -> bool:
        """Whether what was measured tells the times of a source's arms."""
        return self._basis(source) is not None

    def tells_price_of(self, source: DraftSource) -> bool:
        """Whether it tells how much longer they are than plain rounds."""
        return PLAIN in self._arms and self.tells_of(source)

    def price_s(self, arm: Arm, growth: float) -> float:
        """Returns by how much longer rounds of an arm are than plain ones, of which both is told, seconds.

        Args:
            arm: of drafts.
            growth: how many times as many sessions there are: rows of the verifier take so many times as long, and
                passes of a drafter and what each round costs beside them as long as here.
        """
        assert arm.source is not None, "plain rounds have no price"
        basis = self._basis(arm.source) or arm.source
        draft_s, rows_s = arm.length * self.draft_token_s(basis), arm.num_rows * self.row_s(basis)
        rest_s = max(0.0, self.round_s(arm) - self.round_s(PLAIN) - draft_s - rows_s)
        return draft_s + growth * rows_s + rest_s

    def _learn_pace(self, arm: Arm, rest_s: float, num_draft_tokens: float, share: float, weight: float) -> None:
        """Adds a later window of an arm to what is known of the times of all.

        Args:
            arm: of the window.
            rest_s: of a round, without drafting, seconds.
            num_draft_tokens: of a round.
            share: how full the window was.
            weight: of the window in the running means of its arm.
        """
        cost = self._arms[arm]
        slowness = rest_s / cost.rest_s
        beyond_rows = _beyond_rows(slowness, cost.num_draft_tokens, num_draft_tokens)
        num_before = cost.num_draft_tokens
        cost.num_draft_tokens += weight * (num_draft_tokens - num_before)
        least, most = sorted((1.0, (1.0 + cost.num_draft_tokens) / (1.0 + num_before)))
        by_rows = min(most, max(least, slowness / beyond_rows))
        for other in self._arms:
            if other.source is arm.source:
                self._paces.shift(other, math.log(by_rows))
        if cost.num_windows:  # more is not the time of day, but something that passes
            beyond_rows = min(MOST_SLOWNESS, max(1.0 / MOST_SLOWNESS, beyond_rows))
        self._paces.measure(arm, math.log(beyond_rows), share)
        self._follow_pace()

    def _follow_pace(self) -> None:
        """Makes the times of all arms what is expected of them by now."""
        for arm, log_s in self._paces.log_s().items():
            cost = self._arms[arm]
            factor = math.exp(log_s) / cost.rest_s
            cost.rest_s *= factor
            cost.verify_s *= factor

    def _of(self, source: DraftSource) -> dict[Arm, ArmCost]:
        """Returns what was measured of a source."""
        return {arm: cost for arm, cost in self._arms.items() if arm.source is source}

    def _basis(self, source: DraftSource) -> DraftSource | None:
        """Returns the source by which the times of one are inferred: itself, or of trees the drafter's chains; None if
        nothing was measured of it.
        """
        if self.has_measured(source):
            return source
        has_chains = source is DraftSource.TREES and self.has_measured(DraftSource.DRAFTER)
        return DraftSource.DRAFTER if has_chains else None

    def _plain_at_best_s(self, source: DraftSource) -> float:
        """Returns the shortest that a step without drafts can take by what was measured of a source: with rows that are
        all of a step's time, at least one row's. Infinite if nothing was.
        """
        costs = self._of(source)
        if not costs:
            return math.inf
        shortest = min(costs, key=lambda arm: arm.num_rows)
        verify_s = costs[shortest].verify_s
        return max(verify_s / (1 + shortest.num_rows), verify_s - shortest.num_rows * self.row_s(source), 1e-9)

    def _on_line_s(self, arm: Arm, basis: DraftSource) -> float:
        """Returns the time of a round with a chain on the line of least squares through what was measured of a source,
        seconds.
        """
        points = [
            (min(MOST_WINDOWS, cost.num_windows), known.length, cost.round_s) for known, cost in self._of(basis).items()
        ]
        total = sum(weight for weight, _, _ in points)
        mean = sum(weight * length for weight, length, _ in points) / total
        mean_s = sum(weight * round_s for weight, _, round_s in points) / total
        spread = sum(weight * (length - mean) ** 2 for weight, length, _ in points)
        rise_s = sum(weight * (length - mean) * round_s for weight, length, round_s in points)
        price_s = self.draft_token_s(basis) + self.row_s(basis)
        slope = max(0.0, (rise_s + PRICE_SPREAD * price_s) / (spread + PRICE_SPREAD))
        return mean_s + (arm.length - mean) * slope

    def _at_prices_s(self, arm: Arm, basis: DraftSource) -> float:
        """Returns the time of a round with a tree by what was measured of a source and its prices, seconds: depths cost
        passes of the drafter, nodes rows of the verifier, so that there is no one line through trees.
        """
        draft_token_s, row_s = self.draft_token_s(basis), self.row_s(basis)

        def price_s(known: Arm) -> float:
            return known.length * draft_token_s + known.num_rows * row_s

        costs = self._of(basis)
        weights = {known: min(MOST_WINDOWS, cost.num_windows) for known, cost in costs.items()}
        rest_s = sum(weights[known] * (cost.round_s - price_s(known)) for known, cost in costs.items())
        return rest_s / sum(weights.values()) + price_s(arm)


def _beyond_rows(slowness: float, num_before: float, num_now: float) -> float:
    """Returns what more or fewer draft tokens do not explain of how much slower rounds are. A row may cost nothing, or
    as much as all of a step: of what is possible, that is the nearest to no change.

    Args:
        slowness: time of the rounds over that of others before.
        num_before: draft tokens of one of those.
        num_now: of a round.
    """
    least, most = sorted((slowness, slowness * (1.0 + num_before) / (1.0 + num_now)))
    return min(max(1.0, least), most)


def distance(arm: Arm, other: Arm) -> tuple[int, int]:
    """Returns by how much two arms differ, by the verifier's rows first."""
    return abs(other.num_rows - arm.num_rows), abs(other.length - arm.length)
