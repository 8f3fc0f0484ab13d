"""Users who want nothing but completions, and what they notice."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from benchmarks.prompts import load_prompts
from draftwire.client import Client
from draftwire.errors import DraftwireError

MAX_TOKENS = 48


@dataclass(slots=True)
class HonestUsers:
    """Completions, one after the other, from several clients; a context manager."""

    address: str
    concurrency: int = 3
    num_completed: int = 0
    errors: list[str] = field(default_factory=list)
    _gaps: list[tuple[float, float]] = field(default_factory=list)
    """When each delta came, by `time.monotonic`, and how long after the one before it or the request."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: Sequence[threading.Thread] = ()

    def __enter__(self) -> "HonestUsers":
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(self.concurrency)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def largest_gap_s(self, start: float, end: float) -> float:
        """Returns the longest wait for a delta within a span of time, first deltas included; seconds."""
        return max((gap for at, gap in list(self._gaps) if start <= at <= end), default=end - start)

    def _ask(self, seed: int) -> None:
        prompts = load_prompts()
        with Client(self.address) as client:
            while not self._stopping.is_set():
                seed += self.concurrency
                last = time.monotonic()
                try:
                    for _ in client.stream(prompts[seed % len(prompts)], max_tokens=MAX_TOKENS, seed=seed):
                        now = time.monotonic()
                        self._gaps.append((now, now - last))
                        last = now
                except DraftwireError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                else:
                    self.num_completed += 1
