"""Progress of loading a model: a bar on terminals, log lines elsewhere."""

import sys
import time
from collections.abc import Callable

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_SECONDS = 3.0
"""Shortest interval of log lines, except before the last one."""

log = structlog.get_logger()


class LoadProgress:
    """Callback that reports how much of the weights was read. For one thread."""

    def __init__(self, log_format: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing yet. A `log_format` of "console" draws a bar where standard error is a terminal; all else gives
        lines.
        """
        self._clock = clock
        self._reported_at = clock()
        self._bar = _make_bar() if log_format == "console" and sys.stderr.isatty() else None

    def __call__(self, num_bytes: int, total_bytes: int) -> None:
        """Reports how many bytes have been read, of how many."""
        is_done = num_bytes >= total_bytes
        if self._bar is not None:
            self._draw(self._bar, num_bytes, total_bytes)
        elif is_done or self._clock() - self._reported_at >= LINE_SECONDS:
            self._reported_at = self._clock()
            share = round(num_bytes / max(1, total_bytes), 3)
            log.info("verifier.weights_read", read_bytes=num_bytes, total_bytes=total_bytes, share=share)
        if is_done:
            self.end()

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, bar: Progress, num_bytes: int, total_bytes: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("weights", total=total_bytes)
        bar.update(bar.tasks[0].id, completed=num_bytes, total=total_bytes)


def _make_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
