"""The processes of the other ranks, as rank 0 sees them: it starts them, watches them, and outlives none of them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from draftwire.engine.ranks.follower import GOODBYE
from draftwire.engine.ranks.rank_config import RankConfig

LEAVE_SECONDS = 3.0
"""How long ranks that rank 0 has let go may take to end by themselves."""
GOODBYE_SECONDS = 3.0
"""How long the others, which it could not tell because they still load, may take to end when they read `GOODBYE`."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Follower:
    """One of them."""

    service: str
    rank: int
    process: subprocess.Popen[bytes]


class Followers:
    """Those that this process started; none in a group of one, and none under torchrun, which looks after all ranks."""

    def __init__(self, configs: Sequence[RankConfig] = ()) -> None:
        """Starts them. To be called before gRPC runs, whose threads do not go well with new processes."""
        self._followers: list[Follower] = []
        try:
            for config in configs:
                self._followers.append(Follower(config.service, config.place.rank, _start(config)))
        except BaseException:
            self.stop(1)
            raise

    @property
    def fault(self) -> str:
        """Which rank has ended, and how; empty while all of them run."""
        for follower in self._followers:
            status = follower.process.poll()
            if status is not None:
                return f"rank {follower.rank} ended with status {status}"
        return ""

    def log_started(self) -> None:
        """Says which processes there are."""
        for follower in self._followers:
            log.info(f"{follower.service}.follower_started", rank=follower.rank, pid=follower.process.pid)

    def stop(self, status: int) -> int:
        """Ends all of them, within seconds.

        Args:
            status: with which this process is about to end. At 0 they have been told to stop, or are told now, and have
                some time; else they are killed, also if they are stopped or hang.

        Returns:
            The status of the whole group: not 0 unless all ended with 0.
        """
        if status == 0:
            self._wait(LEAVE_SECONDS)
        for follower in self._followers:
            pipe = follower.process.stdin
            assert pipe is not None
            with contextlib.suppress(OSError):  # it has ended
                if status == 0:
                    pipe.write(GOODBYE)
                pipe.close()
        if status == 0:
            self._wait(GOODBYE_SECONDS)
        for follower in self._followers:
            follower.process.kill()
            ended = follower.process.wait()
            if ended:
                log.error(f"{follower.service}.follower_ended", rank=follower.rank, status=ended)
                status = status or 1
        return status

    def _wait(self, seconds: float) -> None:
        """Waits until all have ended, but not longer."""
        deadline = time.monotonic() + seconds
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(max(0.0, deadline - time.monotonic()))


def _start(config: RankConfig) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftwire.engine.ranks.follower", config.text],
        stdin=subprocess.PIPE,  # ends with this process, however that ends
        start_new_session=True,  # Ctrl-C reaches rank 0 alone, which drains first
    )
