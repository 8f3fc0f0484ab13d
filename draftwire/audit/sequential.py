"""Sequential test: raises an alarm when the sums of a drafter's tokens are too far from zero to be chance.

Plain numbers, no tensors: runs on the event loop. See docs/audit.md for why the bound holds at all times at once.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwire.audit.audit_sums import MAX_SURPRISE, AuditSums, Statistic

ALPHA = 1e-6
WINDOW = 4096

_STATISTICS = (Statistic.ACCEPTANCE, Statistic.SURPRISE)
_RATES = 2.0 ** np.arange(-13, 3)
"""The lambdas, for sums of terms that are at most 1: small ones find small biases in long runs, large ones the reverse.
A lambda that is off by the root of 2 loses a sixth of the exponent."""

_CUMULANTS = np.expm1(_RATES) - _RATES
_COEFFICIENTS = np.array([np.concatenate([_RATES, -_RATES]), np.concatenate([-_CUMULANTS, -_CUMULANTS])])
"""`[2, signs * rates]`: exponents are `[sum, variance] @ _COEFFICIENTS`."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Evidence that a drafter does not sample from the distributions it declares."""

    statistic: Statistic
    """The statistic that is furthest from its mean."""
    is_high: bool
    """Whether the statistic is too high rather than too low."""
    is_recent: bool
    """Whether the recent window raised the alarm, rather than the total."""
    num_positions: int
    """Draft tokens in that window or total."""
    excess: float
    """The statistic minus its mean, per draft token; in nats for the surprise."""

    @property
    def message(self) -> str:
        """A sentence for logs and reports."""
        unit = " nats" if self.statistic is Statistic.SURPRISE else ""
        side = "high" if self.is_high else "low"
        tokens = f"{'the last ' if self.is_recent else ''}{self.num_positions:,} tokens"
        return f"{self.statistic.value} too {side} by {abs(self.excess):.2g}{unit} a token over {tokens}"


class DrafterAudit:
    """Sequential test of one drafter: raises one final alarm if it does not sample from its declared distributions.

    An honest drafter is flagged with a probability of at most `alpha` over its whole life. That holds for tokens that
    were drawn with fresh random numbers: leave out tokens of a key that was used before (`FirstUses`), and those of
    coupled rules, which reuse the noise of a position. Memory and the time for each `add` are constant.

    Source: Freedman 1975, "On tail probabilities for martingales"; Ville 1939; Howard et al. 2020, "Time-uniform
    Chernoff bounds via nonnegative supermartingales".
    """

    def __init__(self, alpha: float = ALPHA, window: int = WINDOW) -> None:
        """Starts with no tokens.

        Args:
            alpha: bound on the probability that an honest drafter is ever flagged; above 0, below 1.
            window: draft tokens; the recent window spans the last `window` to `2 * window`.

        Raises:
            ValueError: an argument is out of range.
        """
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is {alpha}, must be between 0 and 1")
        if window < 1:
            raise ValueError(f"window of {window} draft tokens, must be at least 1")
        self.alpha, self.window = alpha, window
        self.total = AuditSums()
        """Sums of all draft tokens, up to the alarm."""
        self.alarm: Alarm | None = None
        self.evidence = math.log10(alpha / 2.0)
        """log10 of the largest e-value over its bound. Starts at -6.3 with the default alpha and stays about there or
        falls for an honest drafter; each 1 is ten times less likely to be reached by chance; alarm at 0."""
        self.recent = AuditSums()
        """Sums of the last `window` to `2 * window` draft tokens; of all while there are fewer."""
        self._next_recent = AuditSums()  # replaces `recent` once it has `window` draft tokens
        self._num_windows = 2
        self._log_budgets = self._new_log_budgets()

    def add(self, sums: AuditSums) -> None:
        """Adds the sums of the next block or blocks and tests; does nothing after an alarm."""
        if self.alarm is not None or sums.num_positions == 0:
            return
        self.total += sums
        self.recent += sums
        self._next_recent += sums
        self._test()
        if self._next_recent.num_positions >= self.window:
            self.recent, self._next_recent = self._next_recent, AuditSums()
            self._num_windows += 1
            self._log_budgets = self._new_log_budgets()

    def _test(self) -> None:
        spans = (self.total, self.recent, self._next_recent)
        exponents = (np.array([_scaled(span) for span in spans]) @ _COEFFICIENTS).reshape(len(spans), -1)
        largest = exponents.max(axis=1)
        log_evalues = largest + np.log(np.exp(exponents - largest[:, None]).mean(axis=1))
        margins = log_evalues + self._log_budgets
        worst = int(margins.argmax())
        self.evidence = float(margins[worst]) / math.log(10.0)
        if self.evidence >= 0.0:
            half, rate = divmod(int(exponents[worst].argmax()), len(_COEFFICIENTS[0]))
            statistic, sums = _STATISTICS[half], spans[worst]
            excess = sums.excess(statistic)
            self.alarm = Alarm(statistic, rate < len(_RATES), worst > 0, sums.num_positions, excess)

    def _new_log_budgets(self) -> NDArray[np.float64]:
        """Returns the log of the error probabilities allotted to the total and the two windows.

        The total gets half of alpha, the k-th window 1 / (k * (k + 1)) of the other half; these shares sum to 1.
        """
        last = self._num_windows
        shares = [1.0, 1.0 / ((last - 1) * last), 1.0 / (last * (last + 1))]
        return np.log(self.alpha / 2.0 * np.array(shares))


def _scaled(sums: AuditSums) -> list[list[float]]:
    """Returns sum and variance of each statistic, scaled so that no term is above 1."""
    surprise, surprise_variance = sums.surprise_sum / MAX_SURPRISE, sums.surprise_variance / MAX_SURPRISE**2
    return [[sums.acceptance_sum, sums.acceptance_variance], [surprise, surprise_variance]]
