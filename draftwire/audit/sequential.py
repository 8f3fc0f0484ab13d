"""The sequential test: when the sums of a drafter's tokens are too far from zero to be chance.

Plain numbers, no tensors: it runs on the event loop. See docs/audit.md for why the bound holds at all times at once.
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
    """Why a drafter cannot be trusted."""

    statistic: Statistic
    """The one that is furthest from what was declared."""
    is_high: bool
    """Whether it is too high rather than too low."""
    is_recent: bool
    """Whether the last tokens alone gave the alarm, rather than all of them."""
    num_positions: int
    """Over how many draft tokens."""
    excess: float
    """Above the mean, per draft token; in nats for the surprise."""

    @property
    def message(self) -> str:
        """For people."""
        unit = " nats" if self.statistic is Statistic.SURPRISE else ""
        side = "high" if self.is_high else "low"
        tokens = f"{'the last ' if self.is_recent else ''}{self.num_positions:,} tokens"
        return f"{self.statistic.value} too {side} by {abs(self.excess):.2g}{unit} a token over {tokens}"


class DrafterAudit:
    """Follows one drafter and raises an alarm, once and for good, when it does not draw from what it declares.

    An honest drafter is flagged with a probability of at most `alpha`, in all its life. That holds for tokens that were
    drawn with fresh random numbers: leave out those of a key that was used before (`FirstUses`), and those of coupled
    rules, which use a place's noise again. Memory and the time for each `add` are constant.

    Source: Freedman 1975, "On tail probabilities for martingales"; Ville 1939; Howard et al. 2020, "Time-uniform
    Chernoff bounds via nonnegative supermartingales".
    """

    def __init__(self, alpha: float = ALPHA, window: int = WINDOW) -> None:
        """Starts with nothing seen.

        Args:
            alpha: the probability that an honest drafter is ever flagged; above 0, below 1.
            window: draft tokens; the recent ones are the last `window` to `2 * window`.

        Raises:
            ValueError: one of them is out of range.
        """
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is {alpha}, must be between 0 and 1")
        if window < 1:
            raise ValueError(f"window of {window} draft tokens, must be at least 1")
        self.alpha, self.window = alpha, window
        self.total = AuditSums()
        """Everything that was added before the alarm."""
        self.alarm: Alarm | None = None
        self.evidence = math.log10(alpha / 2.0)
        """Against the drafter: log10 of the largest e-value in relation to its bound. Starts at -6.3 with the default
        alpha and stays about there or falls; each 1 is ten times less likely to be reached by chance; alarm at 0."""
        self.recent = AuditSums()
        """The last `window` to `2 * window` draft tokens; all as long as there are fewer."""
        self._next_recent = AuditSums()  # takes its place when it is `window` draft tokens old
        self._num_windows = 2
        self._log_budgets = self._new_log_budgets()

    def add(self, sums: AuditSums) -> None:
        """Takes the sums of one or more blocks that followed; does nothing after an alarm."""
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
        """Returns the log of the error probabilities that the total and the two windows may spend.

        Half of alpha is for the total, 1 / (k * (k + 1)) of the other half for the k-th window; these sum to 1.
        """
        last = self._num_windows
        shares = [1.0, 1.0 / ((last - 1) * last), 1.0 / (last * (last + 1))]
        return np.log(self.alpha / 2.0 * np.array(shares))


def _scaled(sums: AuditSums) -> list[list[float]]:
    """Returns sum and variance of either statistic, scaled so that no term is above 1."""
    surprise, surprise_variance = sums.surprise_sum / MAX_SURPRISE, sums.surprise_variance / MAX_SURPRISE**2
    return [[sums.acceptance_sum, sums.acceptance_variance], [surprise, surprise_variance]]
