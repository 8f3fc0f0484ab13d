"""Running estimate of how often there is a draft, and of how many of its tokens are accepted."""

from collections import deque
from typing import Protocol

UNKNOWN_RATE = 0.7
"""Share of the tokens at a position that are accepted, before anything is known."""
PRIOR_WEIGHT = 4.0
"""The estimate of the position before, or of a prior, counts like so many drafts that reached the position."""
MEMORY = 256
"""Drafts that an estimate remembers at each position, by exponential forgetting."""
FADING = 1.0 - 1.0 / MEMORY
"""What a new draft leaves of the weight of those before."""
NUM_RECENT = 24
"""The latest drafts, which are compared with the estimate."""
NUM_KEPT = 8
"""Of the latest drafts, those that are kept where the others are forgotten: the first may be of the time before."""
SURPRISE = 4.5
"""Standard errors by which the latest drafts may differ, before others are forgotten."""
NEW_DISPERSION = 0.125
"""Weight of the latest drafts in the estimate of how much more they vary than independent ones would."""
MOST_STALE = 8
"""Drafts for which what was expected is not computed anew, where many are known: every round of every session adds one,
and all sessions of a step wait for that."""
STALE_BY_PRIOR = 4
"""Drafts for which it is not where a prior says from the first one on what is expected."""


class Prior(Protocol):
    """What is expected of drafts of which nothing is known yet."""

    @property
    def share(self) -> float:
        """P(there is a draft), where one is asked for."""

    def rates(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted, given that k - 1 are) for k = 1 to `num_tokens`."""


class AcceptanceEstimate:
    """By position, how many drafts reached it, all tokens before being accepted, and of how many its token was.

    Forgets exponentially, and at once when the latest drafts fare differently: texts and load change. Rounds without a
    draft are no surprise: where guesses are read from the text itself, each text begins with them.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        """Starts from a prior that may still change, or from `UNKNOWN_RATE`."""
        self._prior = prior
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._recent: deque[tuple[int, int]] = deque(maxlen=NUM_KEPT)
        self._errors: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)
        """Of the latest drafts, how many more tokens were accepted than expected, and the variance of that."""
        self._sum_of_errors = self._sum_of_variances = 0.0
        self._dispersion = 1.0
        """Square of the standard errors by which the latest drafts differ, mean, at least 1: where texts have easy and
        difficult parts, more than independent drafts would."""
        self._last_difference = 1.0
        """Of the latest drafts, when that was estimated last."""
        self._survival: list[float] = []
        """As computed last, until the next draft."""
        self._expected: dict[int, tuple[float, float]] = {}
        """By length, how many tokens of a draft are accepted, mean and variance, as computed not long ago."""
        self._expected_until = 0
        """Drafts after which that is computed anew."""
        self._num_asked = self._num_given = 0.0
        """Rounds for which a draft was asked, and those with one; old ones fade."""
        self.num_drafts = 0
        """Drafts that were added, forgotten ones included."""
        self.num_rounds = 0
        """Rounds that were added, those without a draft too."""
        self.num_surprises = 0
        """How often the latest drafts fared differently, so that all others were forgotten."""

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Adds a draft of which the first `num_accepted` tokens were accepted."""
        mean, variance = self._expected_of(num_draft_tokens)
        self._count_round(is_given=True)
        self._add_error(num_accepted - mean, variance)
        self._recent.append((num_draft_tokens, num_accepted))
        self.num_drafts += 1
        difference = self._difference()
        is_surprised = len(self._errors) >= NUM_KEPT and difference > SURPRISE**2 * self._dispersion
        if is_surprised or self.num_drafts % NUM_RECENT == 0:
            # One group late, so that what is about to be a surprise does not raise the threshold.
            self._dispersion = max(1.0, self._dispersion + NEW_DISPERSION * (self._last_difference - self._dispersion))
            self._last_difference = difference
        if is_surprised:
            self.num_surprises += 1
            self._reached, self._accepted = [], []
            self._errors.clear()
            self._sum_of_errors = self._sum_of_variances = 0.0
            self._expected_until = 0
            for draft in self._recent:
                self._count(*draft)
        else:
            self._count(num_draft_tokens, num_accepted)
        self._survival = []

    def add_missing(self) -> None:
        """Adds a round for which a draft was asked, and none was there."""
        self._count_round(is_given=False)

    @property
    def share(self) -> float:
        """P(there is a draft), where one is asked for."""
        prior = 1.0 if self._prior is None else self._prior.share
        return (self._num_given + PRIOR_WEIGHT * prior) / (self._num_asked + PRIOR_WEIGHT)

    def survival(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted) for k = 1 to `num_tokens`, of drafts of at least k tokens."""
        if self._prior is None and len(self._survival) >= num_tokens:
            return self._survival[:num_tokens]
        survival, probability = [], 1.0
        for rate in self.rates(num_tokens):
            probability *= rate
            survival.append(probability)
        self._survival = survival
        return list(survival)

    def rates(self, num_tokens: int) -> list[float]:
        """Returns P(at least k tokens are accepted, given that k - 1 are) for k = 1 to `num_tokens`, of drafts of at
        least k tokens.
        """
        expected = [UNKNOWN_RATE] * num_tokens if self._prior is None else self._prior.rates(num_tokens)
        rates: list[float] = []
        for position in range(num_tokens):
            prior = expected[position]
            if self._prior is None and rates:  # a token fares as the one before it, until more is known
                prior = rates[-1]
            if position >= len(self._reached):
                rates.append(prior)
                continue
            accepted = self._accepted[position] + PRIOR_WEIGHT * prior
            rates.append(accepted / (self._reached[position] + PRIOR_WEIGHT))
        return rates

    def mean_tokens(self, num_draft_tokens: int) -> float:
        """Returns the mean number of tokens that a round commits, that of the verifier included."""
        return 1.0 + self.share * sum(self.survival(num_draft_tokens))

    def _expected_of(self, num_tokens: int) -> tuple[float, float]:
        """Returns how many tokens of a draft are accepted, mean and variance, as it was expected some drafts ago."""
        if self.num_drafts >= self._expected_until:
            self._expected.clear()
            least = 1 if self._prior is None else STALE_BY_PRIOR
            self._expected_until = self.num_drafts + max(least, min(MOST_STALE, self.num_drafts // NUM_RECENT))
        known = self._expected.get(num_tokens)
        if known is None:
            survival = self.survival(num_tokens)
            mean = sum(survival)
            square = sum((2 * k + 1) * probability for k, probability in enumerate(survival))
            known = self._expected[num_tokens] = mean, max(0.0, square - mean * mean)
        return known

    def _add_error(self, error: float, variance: float) -> None:
        if len(self._errors) == NUM_RECENT:
            oldest, its_variance = self._errors[0]
            self._sum_of_errors -= oldest
            self._sum_of_variances -= its_variance
        self._errors.append((error, variance))
        self._sum_of_errors += error
        self._sum_of_variances += variance

    def _count_round(self, *, is_given: bool) -> None:
        self.num_rounds += 1
        self._num_asked = FADING * self._num_asked + 1.0
        self._num_given = FADING * self._num_given + is_given

    def _count(self, num_draft_tokens: int, num_accepted: int) -> None:
        num_reached = min(num_draft_tokens, num_accepted + 1)
        missing = num_reached - len(self._reached)
        self._reached += [0.0] * missing
        self._accepted += [0.0] * missing
        for position in range(num_reached):
            self._reached[position] = FADING * self._reached[position] + 1.0
            self._accepted[position] = FADING * self._accepted[position] + (position < num_accepted)

    def _difference(self) -> float:
        """Returns the square of the standard errors by which the latest drafts differ from what was expected."""
        return self._sum_of_errors**2 / (self._sum_of_variances + 1.0)
