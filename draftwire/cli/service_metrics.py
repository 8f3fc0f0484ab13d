"""Metrics of running services, read from their `/metrics`, and their recent rates."""

import http.client
import re
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping

WINDOW_SECONDS = 5.0
"""Rates are taken over this window."""

_SAMPLE = re.compile(r"^draftwire:(\w+?)(?:_total)?(?:\{.*\})? (\S+)$", re.MULTILINE)

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxy settings: the services are on this machine."""

Samples = Mapping[str, float]
"""Values by metric name, without prefix and `_total`; summed over labels."""


def parse(text: str) -> Samples:
    """Parses the metrics of a service, in the text format of Prometheus."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def fetch(port: int, timeout_s: float = 1.0) -> Samples | None:
    """Returns the metrics of a service on this machine; None if it does not answer."""
    try:
        with _DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=timeout_s) as response:
            return parse(response.read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return None


class History:
    """Metrics of one service over the last `WINDOW_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, Samples]] = deque()

    def add(self, samples: Samples) -> None:
        """Adds values that were read just now."""
        now = self._clock()
        self._samples.append((now, samples))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def value(self, *names: str) -> float | None:
        """Returns the latest value of the first of these metrics that the service exports; None if it exports none."""
        last = self._samples[-1][1] if self._samples else {}
        return next((last[name] for name in names if name in last), None)

    def rate(self, name: str) -> float | None:
        """Returns a counter's increase per second over the window; None if that is not known."""
        if len(self._samples) < 2 or self.value(name) is None:
            return None
        (begun, first), (now, last) = self._samples[0], self._samples[-1]
        return (last[name] - first.get(name, 0.0)) / (now - begun) if now > begun else None

    def ratio(self, name: str, base: str) -> float | None:
        """Returns a counter's increase over that of `base` in the window; since the start if `base` did not grow."""
        if not self._samples or self.value(name) is None or self.value(base) is None:
            return None
        first, last = self._samples[0][1], self._samples[-1][1]
        whole = last[base] - first.get(base, 0.0)
        if whole > 0:
            return (last[name] - first.get(name, 0.0)) / whole
        return last[name] / last[base] if last[base] > 0 else None
