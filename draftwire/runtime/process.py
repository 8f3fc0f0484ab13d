"""A service as a process of its own: signals, exit status, and how many files and sockets it may open."""

import asyncio
import errno
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from draftwire.runtime.channels import MAX_CONNECTIONS
from draftwire.runtime.service import Running, Service, start
from draftwire.runtime.status import is_expected, root_cause

log = structlog.get_logger()

_IMPORTED_AT = time.monotonic()

OPEN_FILES = 2 * MAX_CONNECTIONS + 1024
"""Files that a service asks for, open at once: the connections of gRPC that it accepts, as many for HTTP, whose servers
take half of the files at most (`MAX_HTTP_CONNECTIONS`), those to its peers, and its own."""
AGAIN_SECONDS = 60.0
"""Seconds after which it is logged again that no more files can be opened."""


async def run_service(service: Service) -> int:
    """Runs a service until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a drain, 1 after a failure while running, 2 if the service could not start.
    """
    allow_open_files()
    asyncio.get_running_loop().set_exception_handler(LostErrors())
    stop = asyncio.create_task(_wait_for_stop(service.settings.stop_with_stdin))
    starting = asyncio.create_task(start(service))
    running: Running | None = None
    try:
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return int(service.is_lost())
        running = starting.result()
        gc.collect()
        gc.freeze()  # loaded objects live as long as the process: later collections skip them
        _log_started(service, running)
        ended = asyncio.create_task(running.wait())
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        await running.drain()
    except Exception as error:
        _log_failed(service, error, has_served=running is not None)
        return 1 if running else 2
    finally:
        stop.cancel()
        if running is not None:
            await running.stop()
    log.info(f"{service.name}.server_stopped")
    return int(service.is_lost())


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


class LostErrors:
    """Logs exceptions that were never retrieved. asyncio's own handler would also print the task's contents."""

    def __init__(self) -> None:
        self._open_files = OpenFilesLog()

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Called by the event loop."""
        if not self._open_files.takes(context.get("exception")):
            log.error("process.error_lost", reason=context.get("message"), exc_info=context.get("exception"))


async def _wait_for_stop(with_stdin: bool) -> None:
    """Returns on SIGTERM or SIGINT; with `with_stdin` also at the end of standard input."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):  # the process at the other end of the pipe has exited
            loop.remove_reader(sys.stdin.fileno())
            stopping.set()

    if with_stdin:
        loop.add_reader(sys.stdin.fileno(), read)
    await stopping.wait()


def _log_started(service: Service, running: Running) -> None:
    startup_s = _age_s()
    service.metrics.startup_s.set(startup_s)
    log.info(
        f"{service.name}.server_started",
        host=service.settings.host,
        **running.ports,
        tls=service.credentials is not None,
        startup_ms=round(startup_s * 1e3),
    )


def _log_failed(service: Service, error: Exception, has_served: bool) -> None:
    cause = root_cause(error)
    if is_expected(error) or isinstance(cause, OSError):
        log.error(f"{service.name}.server_failed", reason=str(cause))
    else:
        # Before the first call, no message can quote a prompt.
        reason = type(cause).__name__ if has_served else f"{type(cause).__name__}: {cause}"
        log.exception(f"{service.name}.server_failed", reason=reason)


def _age_s() -> float:
    """Returns the age of this process, seconds; elsewhere than on Linux only since the import of this module."""
    if sys.platform != "linux":
        return time.monotonic() - _IMPORTED_AT
    started_at_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at_ticks / os.sysconf("SC_CLK_TCK")
