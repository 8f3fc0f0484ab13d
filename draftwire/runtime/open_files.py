"""How many files and sockets this process may open, and what is logged when that is too few."""

import errno
import resource
import time
from collections.abc import Callable

import structlog

from draftwire.runtime.channels import MAX_CONNECTIONS

log = structlog.get_logger()

OPEN_FILES = 2 * MAX_CONNECTIONS + 1024
"""Files that a service asks for, open at once: the connections of gRPC that it accepts, as many for HTTP, whose servers
take half of the files at most (`MAX_HTTP_CONNECTIONS`), those to its peers, and its own."""
AGAIN_SECONDS = 60.0
"""Seconds after which it is logged again that no more files can be opened."""


def allow_open_files() -> None:
    """Raises the soft limit of open files, which connections would reach before their own: then nothing else works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < OPEN_FILES:
        log.warning("process.open_files_limited", limit=most, wanted=OPEN_FILES)


class OpenFilesLog:
    """Logs seldom that no more files can be opened: the event loop says so of each connection that it cannot accept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at = -AGAIN_SECONDS
        self._num_failures = 0
        """Failures since the last line."""

    def takes(self, error: BaseException | None) -> bool:
        """Returns whether an error is of this kind: then nothing else is to be logged of it."""
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return False
        self._num_failures += 1
        if self._clock() - self._logged_at >= AGAIN_SECONDS:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error("process.open_files_exhausted", limit=soft, num_failures=self._num_failures)
            self._logged_at, self._num_failures = self._clock(), 0
        return True
