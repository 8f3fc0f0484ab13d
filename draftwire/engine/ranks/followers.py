"""Rank 0's handle on the follower processes: it starts them, polls them, and ends them before it exits."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence

import structlog

from draftwire.engine.ranks.follower import GOODBYE
from draftwire.engine.ranks.rank_config import RankConfig

LEAVE_SECONDS = 3.0
"""How long followers that were stopped over the process group may take to exit."""
GOODBYE_SECONDS = 3.0
"""How long the rest, which still load and so could not be stopped that way, may take to exit after `GOODBYE`."""

log = structlog.get_logger()


class Followers:
    """The followers that this process started: none in a group of one, none under torchrun, which manages all ranks."""

    def __init__(self, configs: Sequence[RankConfig] = ()) -> None:
        """Starts the processes. To be called before gRPC starts its threads, which are not safe to fork with."""
        self._service = configs[0].group.service if configs else ""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        try:
            for config in configs:
                self._processes[config.place.rank] = _start(config)
        except BaseException:
            self.stop(1)
            raise

    @property
    def fault(self) -> str:
        """Rank and exit status of a follower that has exited; empty while all run."""
        for rank, process in self._processes.items():
            status = process.poll()
            if status is not None:
                return f"rank {rank} ended with status {status}"
        return ""

    def log_started(self) -> None:
        """Logs rank and process id of each follower."""
        for rank, process in self._processes.items():
            log.info(f"{self._service}.follower_started", rank=rank, pid=process.pid)

    def stop(self, status: int) -> int:
        """Ends all followers, within seconds.

        Args:
            status: exit status of this process so far. At 0, followers that were not stopped over the process group
                receive `GOODBYE`, and all have time to exit; otherwise they are killed at once, stopped or hung ones
                too.

        Returns:
            The exit status of the group: 0 only if all exited with 0.
        """
        if status == 0:
            self._wait(LEAVE_SECONDS)
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has exited
                if status == 0:
                    process.stdin.write(GOODBYE)
                process.stdin.close()
        if status == 0:
            self._wait(GOODBYE_SECONDS)
        for rank, process in self._processes.items():
            process.kill()
            ended = process.wait()
            if ended:
                log.error(f"{self._service}.follower_ended", rank=rank, status=ended)
                status = status or 1
        return status

    def _wait(self, seconds: float) -> None:
        """Waits until all have exited, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _start(config: RankConfig) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftwire.engine.ranks.follower", config.text],
        stdin=subprocess.PIPE,  # closed when this process exits, however it does
        start_new_session=True,  # Ctrl-C signals rank 0 only, which drains first
    )
