"""What rounds cost at one load, by the length of their drafts."""

from dataclasses import dataclass, replace

from draftwire_gateway.session.round_times import RoundTimes

NEW_WEIGHT = 0.25
"""Weight of a window in the running means of its length, once there are several."""
TRUSTED_TOKENS = 300.0
"""The prediction of the accepted tokens counts like so many tokens that were measured."""
LINE_WINDOWS = 1.0
"""The line through all lengths counts like so many windows of each."""
MOST_WINDOWS = 8
"""A length counts in that line as at most so many windows."""
KEPT_TOKENS = 0.8
"""Of the measured tokens of a length, what is kept when more are measured."""


@dataclass(slots=True)
class LengthCost:
    """What was measured of rounds of one length, while all sessions had that length."""

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

    def add(self, times: RoundTimes, expected_tokens: float) -> None:
        """Adds a round."""
        self.num_rounds += 1
        self.round_s += times.duration_s
        self.verify_s += times.verify_s
        self.draft_s += times.draft_s
        self.num_tokens += times.num_tokens
        self.expected_tokens += expected_tokens

    @property
    def mean_round_s(self) -> float:
        """Mean time of the rounds, seconds; 0 if there are none."""
        return self.round_s / self.num_rounds if self.num_rounds else 0.0


class RoundCosts:
    """Times of rounds by length. Those of lengths that were not measured are on a line through the others."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._lengths: dict[int, LengthCost] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._lengths

    def measured(self, length: int) -> LengthCost | None:
        """Returns what was measured of a length; None if it was not."""
        return self._lengths.get(length)

    @property
    def draft_token_s(self) -> float:
        """Time that the drafter takes for a token of a draft, seconds; 0 before anything was drafted."""
        tokens = sum(length * cost.num_windows for length, cost in self._lengths.items())
        return sum(cost.draft_s * cost.num_windows for cost in self._lengths.values()) / max(1, tokens)

    @property
    def row_s(self) -> float:
        """Time by which one more row of each session lengthens a step of the verifier, seconds; 0 if not known."""
        known = sorted(self._lengths)
        if len(known) < 2:
            return 0.0
        first, last = known[0], known[-1]
        return max(0.0, (self._lengths[last].verify_s - self._lengths[first].verify_s) / (last - first))

    def add(self, length: int, sums: WindowSums, share: float) -> None:
        """Adds a window. A machine that became slower or faster since did so for all lengths.

        Args:
            length: of the window's drafts.
            sums: over its rounds.
            share: how full the window was, 0 to 1.
        """
        verify_s, draft_s = sums.verify_s / sums.num_rounds, sums.draft_s / sums.num_rounds
        rest_s = max(1e-9, sums.round_s / sums.num_rounds - draft_s)
        cost = self._lengths.get(length)
        if cost is None:
            cost = self._lengths[length] = LengthCost(rest_s, draft_s, verify_s)
        weight = share * max(NEW_WEIGHT, 1.0 / (cost.num_windows + 1)) if cost.num_windows else 1.0
        before = replace(cost)
        cost.rest_s += weight * (rest_s - cost.rest_s)
        cost.draft_s += weight * (draft_s - cost.draft_s)
        cost.verify_s += weight * (verify_s - cost.verify_s)
        cost.num_windows += 1
        cost.num_tokens = KEPT_TOKENS * cost.num_tokens + sums.num_tokens
        cost.expected_tokens = KEPT_TOKENS * cost.expected_tokens + sums.expected_tokens
        for other in self._lengths.values():
            if other is not cost:
                other.rest_s *= cost.rest_s / before.rest_s
                other.verify_s *= cost.rest_s / before.rest_s
                if before.draft_s > 0.0:
                    other.draft_s *= cost.draft_s / before.draft_s

    def round_s(self, length: int) -> float:
        """Returns the time of a round, seconds: the measured one, drawn to a line through all lengths while it is known
        from few windows.

        Args:
            length: draft tokens.
        """
        cost = self._lengths.get(length)
        drafting = [known for known in self._lengths if known]
        if length == 0 or not drafting:
            # At best, a step without drafts, and a draft that costs nothing.
            return cost.round_s if cost is not None else self._plain_at_best_s(drafting)
        line_s = max(self._plain_at_best_s(drafting), self._on_line_s(length, drafting))
        if cost is None:
            return line_s
        return (cost.num_windows * cost.round_s + LINE_WINDOWS * line_s) / (cost.num_windows + LINE_WINDOWS)

    def _plain_at_best_s(self, drafting: list[int]) -> float:
        """Returns the shortest that a step without drafts can take: with rows that are all of a step's time, at least
        one row's.
        """
        if not drafting:
            return self._lengths[0].round_s
        shortest = min(drafting)
        verify_s = self._lengths[shortest].verify_s
        return max(verify_s / (1 + shortest), verify_s - shortest * self.row_s, 1e-9)

    def _on_line_s(self, length: int, drafting: list[int]) -> float:
        """Returns the time of a round on the line of least squares through the measured lengths, seconds."""
        points = [(min(MOST_WINDOWS, self._lengths[known].num_windows), known) for known in drafting]
        total = sum(weight for weight, _ in points)
        mean = sum(weight * known for weight, known in points) / total
        mean_s = sum(weight * self._lengths[known].round_s for weight, known in points) / total
        spread = sum(weight * (known - mean) ** 2 for weight, known in points)
        if spread > 0.0:
            rise_s = sum(weight * (known - mean) * self._lengths[known].round_s for weight, known in points)
            slope = max(0.0, rise_s / spread)
        else:
            slope = self.draft_token_s + self.row_s
        return mean_s + (length - mean) * slope

    def bias(self, length: int) -> float:
        """Returns `LengthCost.bias` of a length, or of the nearest one that was measured. Without drafts, one token
        is expected of a round; more come where the verifier drafts by itself, and what was measured is all that is
        known of that.
        """
        drafting = [known for known in self._lengths if known]
        if length == 0 or not drafting:
            plain = self._lengths.get(0)
            return 1.0 if plain is None or length else plain.num_tokens / plain.expected_tokens
        return self._lengths[min(drafting, key=lambda known: abs(known - length))].bias
