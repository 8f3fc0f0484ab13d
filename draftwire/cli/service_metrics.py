"""Numbers of running services, read from their `/metrics`, and what became of them lately."""

import http.client
import re
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping

WINDOW_SECONDS = 5.0
"""Rates are those of this time."""

_SAMPLE = re.compile(r"^draftwire:(\w+?)(?:_total)?(?:\{.*\})? (\S+)$", re.MULTILINE)

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks without a proxy: what is asked is on this machine."""

Samples = Mapping[str, float]
"""Values by name, without prefix and without `_total`; summed over labels."""


def parse(text: str) -> Samples:
    """Reads what a service exports, in the text format of Prometheus."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def fetch(port: int, timeout_s: float = 1.0) -> Samples | None:
    """Reads a service on this machine; None if it does not answer."""
    try:
        with _DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=timeout_s) as response:
            return parse(response.read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return None


class History:
    """The numbers of one service over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nothing yet. The clock tells seconds."""
        self._clock = clock
        self._taken: deque[tuple[float, Samples]] = deque()

    def add(self, samples: Samples) -> None:
        """Takes what was read just now."""
        now = self._clock()
        self._taken.append((now, samples))
        while now - self._taken[0][0] > WINDOW_SECONDS:
            self._taken.popleft()

    def value(self, *names: str) -> float | None:
        """Returns the number that was read last, of the first of these names that the service has; None if of none."""
        last = self._taken[-1][1] if self._taken else {}
        return next((last[name] for name in names if name in last), None)

    def rate(self, name: str) -> float | None:
        """Returns by how much a counter grew a second, lately; None if that is not known."""
        if len(self._taken) < 2 or self.value(name) is None:
            return None
        (begun, first), (now, last) = self._taken[0], self._taken[-1]
        return (last[name] - first.get(name, 0.0)) / (now - begun) if now > begun else None

    def ratio(self, name: str, base: str) -> float | None:
        """Returns the growth of a counter over that of another, lately; since the start where nothing grew lately."""
        if not self._taken or self.value(name) is None or self.value(base) is None:
            return None
        first, last = self._taken[0][1], self._taken[-1][1]
        whole = last[base] - first.get(base, 0.0)
        if whole > 0:
            return (last[name] - first.get(name, 0.0)) / whole
        return last[name] / last[base] if last[base] > 0 else None
