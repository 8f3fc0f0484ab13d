"""Timing of work on a device."""

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 3
"""Runs that are not counted: they record graphs and fill caches."""


class Timer:
    """Times work from an idle device until it is idle again.

    On a GPU by CUDA events: host time during which the device idles counts, the host's final synchronisation does not.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepares."""
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def ms(self, work: Callable[[], object]) -> float:
        """Returns how long some work takes, milliseconds."""
        if not self._is_cuda:
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        self._first.record()
        work()
        self._last.record()
        torch.cuda.synchronize()
        return float(self._first.elapsed_time(self._last))

    def host_ms(self, work: Callable[[], object]) -> float:
        """Returns how long the host takes for some work on an idle device, whose end it does not wait for unless the
        work does; milliseconds.
        """
        self._wait()
        started = time.perf_counter()
        work()
        milliseconds = (time.perf_counter() - started) * 1e3
        self._wait()
        return milliseconds

    def median_host_ms(self, work: Callable[[], object], repetitions: int) -> float:
        """Returns the median of `host_ms`."""
        return median([self.host_ms(work) for _ in range(WARM_UPS + repetitions)][WARM_UPS:])

    def median_ms(self, work: Callable[[], object], repetitions: int, prepare: Callable[[], object] = int) -> float:
        """Returns the median time of some work, each run of which is prepared untimed; milliseconds."""
        times = []
        for _ in range(WARM_UPS + repetitions):
            prepare()
            times.append(self.ms(work))
        return median(times[WARM_UPS:])

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
