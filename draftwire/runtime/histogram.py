"""Prometheus histograms without locks, cheap enough for every round."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Tally:
    """The buckets of one histogram series. One thread observes, any may read."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts at zero. `bounds` are the upper bounds of the buckets, ascending; +Inf is added."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each bound in Prometheus's text format with its cumulative count."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class Histogram:
    """A histogram with labels, as a collector of prometheus_client.

    That library's own takes a lock for each observation, and cannot count a value several times at once.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], labels: tuple[str, ...] = ()) -> None:
        self._name, self._documentation, self._bounds, self._labels = name, documentation, tuple(bounds), labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Tally:
        """Returns the series of these label values. Keep it: the look-up costs more than an observation."""
        assert len(values) == len(self._labels), "a value for each label"
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._bounds)
        return tally

    def collect(self) -> Iterable[Metric]:
        """Yields the metric family with all series, for `/metrics`."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, tally in list(self._tallies.items()):
            family.add_metric(values, tally.buckets(), tally.sum)
        yield family
