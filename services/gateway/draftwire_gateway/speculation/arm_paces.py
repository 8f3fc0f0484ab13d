"""What of the time of rounds is an arm's own, and what the machine's, which all arms share: a Kalman filter."""

from collections.abc import Mapping

from draftwire_gateway.speculation.arms import Arm

WINDOW_NOISE = 0.12
"""Standard deviation of the logarithm of a full window's time, by chance: a window may have four steps."""
MACHINE_DRIFT, ARM_DRIFT = 0.05, 0.01
"""Of what the machine's and an arm's own part change by in a second. Sixteen texts that begin together made a plain step
of the embedded pair half as long again within eight, and others use the machine too."""
DOUBT_OF_MACHINE, DOUBT_OF_ARM = 1000.0, 1.0
"""Of the parts, if all that was measured is doubtful: the next window says what the machine's is."""

MACHINE = 0
"""Its place in the state; arms come after it."""


class ArmPaces:
    """Logarithms of the times of arms' rounds at one load, each the sum of a part of its own and of the machine's. A
    window shows the sum alone. By how much each part is uncertain says which of them a surprise is: arms that were
    measured in the same minute are known relative to each other, however fast the machine is by now, and one that was
    lucky in its first window makes no other look slower when the next ones are not.

    The state is a Gaussian: means, and covariances of all pairs, of some twenty arms at most.
    """

    def __init__(self) -> None:
        """Knows no arm. The machine's part is 0 by definition, and changes from then on."""
        self._places: dict[Arm, int] = {}
        self._means = [0.0]
        self._covariances = [[0.0]]

    def log_s(self) -> Mapping[Arm, float]:
        """Returns the logarithm of the time that is expected of each arm now, of seconds."""
        machine = self._means[MACHINE]
        return {arm: machine + self._means[place] for arm, place in self._places.items()}

    def pass_time(self, seconds: float) -> None:
        """Lets all parts drift."""
        self._spread(MACHINE_DRIFT**2 * seconds, ARM_DRIFT**2 * seconds)

    def doubt(self) -> None:
        """Takes all that is known for a guess."""
        self._spread(DOUBT_OF_MACHINE**2, DOUBT_OF_ARM**2)

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
        machine = self._covariances[MACHINE]
        self._means.append(log_s - self._means[MACHINE])
        own = [-covariance for covariance in machine]  # it was slow by as much as the machine was, whatever that is
        for row, covariance in zip(self._covariances, own, strict=True):
            row.append(covariance)
        self._covariances.append([*own, machine[MACHINE] + WINDOW_NOISE**2 / share])

    def measure(self, arm: Arm, surprise: float, share: float) -> None:
        """Adds a later window of an arm.

        Args:
            arm: of the window.
            surprise: the logarithm of the time of its rounds over the expected one.
            share: how full the window was, above 0 to 1.
        """
        place, size = self._places[arm], len(self._means)
        with_sum = [row[MACHINE] + row[place] for row in self._covariances]
        variance = with_sum[MACHINE] + with_sum[place] + WINDOW_NOISE**2 / share
        for at in range(size):
            gain = with_sum[at] / variance
            self._means[at] += gain * surprise
            row = self._covariances[at]
            for other in range(size):
                row[other] -= gain * with_sum[other]

    def _spread(self, of_machine: float, of_arms: float) -> None:
        for place, row in enumerate(self._covariances):
            row[place] += of_arms if place else of_machine
