"""What of the time of rounds is an arm's own, and what the machine's, which all arms share: a Kalman filter."""

import math
from collections.abc import Mapping

from draftwire_gateway.session.policy import Arm

WINDOW_NOISE = 0.12
"""Standard deviation of the logarithm of a full window's time, by chance: a window may have four steps."""
MACHINE_DRIFT, ARM_DRIFT = 0.05, 0.01
"""Of what the machine's and an arm's own part change by in a second: others use the machine too."""
GROWTH_SPREAD, GROWTH_DRIFT = 0.3, 0.005
"""Of the growth before anything is known of it, and of what it changes by in a second."""
SHORT_TEXT = 100.0
"""Texts are long if they have many times so many tokens: then twice as many take up to twice as long."""
DOUBT_OF_MACHINE, DOUBT_OF_ARM = 1000.0, 1.0
"""Of the parts, if all that was measured is doubtful: the next window says what the machine's is."""

MACHINE, GROWTH = 0, 1
"""Their places in the state; arms come after them."""


class ArmPaces:
    """Logarithms of the times of arms' rounds at one load, each the sum of a part of its own, of the machine's, and of
    what longer texts make of it. A window shows the sum alone. By how much each part is uncertain says which of them a
    surprise is: arms that were measured in the same minute are known relative to each other, however fast the machine
    is by now, and one that was lucky in its first window makes no other look slower when the next ones are not.

    The state is a Gaussian: means, and covariances of all pairs, of some twenty arms at most.
    """

    def __init__(self) -> None:
        """Knows no arm. The machine's part is 0 by definition, and changes from then on."""
        self._places: dict[Arm, int] = {}
        self._means = [0.0, 0.0]
        self._covariances = [[0.0, 0.0], [0.0, GROWTH_SPREAD**2]]
        self._length = 0.0
        """Of texts in the latest window."""

    def log_s(self) -> Mapping[Arm, float]:
        """Returns the logarithm of the time that is expected of each arm with texts as they are, of seconds."""
        shared = self._means[MACHINE] + self._length * self._means[GROWTH]
        return {arm: shared + self._means[place] for arm, place in self._places.items()}

    def pass_time(self, seconds: float, text_tokens: float) -> None:
        """Lets all parts drift.

        Args:
            seconds: that have passed.
            text_tokens: that the texts have by now, without their prompts, in the mean.
        """
        self._length = math.log1p(text_tokens / SHORT_TEXT)
        self._spread(MACHINE_DRIFT**2 * seconds, GROWTH_DRIFT**2 * seconds, ARM_DRIFT**2 * seconds)

    def doubt(self) -> None:
        """Takes all that is known for a guess."""
        self._spread(DOUBT_OF_MACHINE**2, 0.0, DOUBT_OF_ARM**2)

    def shift(self, arm: Arm, log_factor: float) -> None:
        """Multiplies an arm's time by what is known to have changed in its rounds."""
        self._means[self._places[arm]] += log_factor

    def begin(self, arm: Arm, log_s: float, share: float) -> None:
        """Adds the first window of an arm.

        Args:
            arm: not known so far.
            log_s: the logarithm of the time of its rounds, of seconds.
            share: how full the window was, above 0 to 1.
        """
        self._places[arm] = len(self._means)
        self._means.append(log_s - self._means[MACHINE] - self._length * self._means[GROWTH])
        with_shared = [row[MACHINE] + self._length * row[GROWTH] for row in self._covariances]
        of_shared = with_shared[MACHINE] + self._length * with_shared[GROWTH]
        own = [-covariance for covariance in with_shared]  # it was slow by as much as all were, whatever that is
        for row, covariance in zip(self._covariances, own, strict=True):
            row.append(covariance)
        self._covariances.append([*own, of_shared + WINDOW_NOISE**2 / share])

    def measure(self, arm: Arm, surprise: float, share: float) -> None:
        """Adds a later window of an arm.

        Args:
            arm: of the window.
            surprise: the logarithm of the time of its rounds over the expected one.
            share: how full the window was, above 0 to 1.
        """
        place, size = self._places[arm], len(self._means)
        with_sum = [row[MACHINE] + self._length * row[GROWTH] + row[place] for row in self._covariances]
        of_sum = with_sum[MACHINE] + self._length * with_sum[GROWTH] + with_sum[place]
        variance = of_sum + WINDOW_NOISE**2 / share
        for at in range(size):
            gain = with_sum[at] / variance
            self._means[at] += gain * surprise
            row = self._covariances[at]
            for other in range(size):
                row[other] -= gain * with_sum[other]

    def _spread(self, of_machine: float, of_growth: float, of_arms: float) -> None:
        for place, row in enumerate(self._covariances):
            row[place] += of_machine if place == MACHINE else of_growth if place == GROWTH else of_arms
