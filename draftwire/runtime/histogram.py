"""Histograms that cost a round next to nothing."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Tally:
    """Counts values by size. One thread counts, any may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Takes the upper bounds of the buckets, ascending; one for all else comes on top."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Returns how many values are at most as large as each bound, bounds as Prometheus writes them."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum


class Histogram:
    """A histogram per value of its labels, as a collector of prometheus_client.

    That library's own takes a lock for each value, and cannot count one several times.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], labels: tuple[str, ...] = ()) -> None:
        """Takes its name in full, what it is, its buckets' bounds and the names of its labels."""
        self._name, self._documentation, self._bounds, self._labels = name, documentation, tuple(bounds), labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Tally:
        """Returns what counts for these values of the labels. Keep it: finding it costs more than counting."""
        assert len(values) == len(self._labels), "a value for each label"
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._bounds)
        return tally

    def collect(self) -> Iterable[Metric]:
        """Yields the series of all values of the labels, for `/metrics`."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, tally in list(self._tallies.items()):
            family.add_metric(values, tally.buckets(), tally.sum)
        yield family
