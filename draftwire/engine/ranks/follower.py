"""The other ranks of a verifier or drafter: they do their share of each step that rank 0 announces.

Rank 0 starts them on its own machine as `python -m draftwire.engine.ranks.follower`, with a pipe as their standard
input: when that ends, rank 0 has. Under torchrun they are the same module as rank 0, such as
`draftwire.cli serve verifier`.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import structlog

from draftwire.engine.ranks.place import end_process
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.runtime.logging import configure_logging

if TYPE_CHECKING:
    from draftwire.engine.ranks.group_model import LoadedRank

GOODBYE = b"stop"
"""What rank 0 writes before it closes the pipe because it was asked to stop."""

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

log = structlog.get_logger()


def run_follower(config: RankConfig) -> int:
    """Loads this rank's share and follows rank 0 until that stops the group. Runs on the thread that may touch tensors.

    Returns:
        The exit status: 0 if rank 0 stopped the group, 2 if the model is refused, 1 after any other failure.
    """
    from draftwire.models.parallel.tensor_parallel import follow

    configure_logging(config.log_format, config.service)
    structlog.contextvars.bind_contextvars(rank=config.place.rank)
    try:
        loaded = _load(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # torchrun sends it to all ranks: rank 0 drains and stops the group
        log.info(f"{config.service}.follower_ready")
        follow(loaded.model)
        loaded.group.leave()
    except InvalidRequestError as error:
        log.error(f"{config.service}.follower_refused", reason=str(error))
        return 2
    except DraftwireError as error:
        log.error(f"{config.service}.follower_failed", reason=str(error))
        return 1
    except Exception as error:
        log.exception(f"{config.service}.follower_failed", reason=type(error).__name__)
        return 1
    log.info(f"{config.service}.follower_stopped")
    return 0


def _load(config: RankConfig) -> "LoadedRank":
    from draftwire.engine.ranks.group_model import load_draft_rank, load_target_rank

    if config.service == "drafter":
        return load_draft_rank(config)
    return load_target_rank(config)


def _end_with_rank_0() -> None:
    """Ends this process when the pipe that rank 0 holds is closed, whatever its other threads are waiting for."""
    said = b""
    while data := os.read(sys.stdin.fileno(), 64):
        said += data
    end_process(0 if said == GOODBYE else 1)


def _be_killed_with_rank_0() -> None:
    """Has the kernel kill this process when its parent ends, which works on a stopped or hung one as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Runs one rank as a process that ends with rank 0."""
    _be_killed_with_rank_0()
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    end_process(run_follower(RankConfig.parse(sys.argv[1])))


if __name__ == "__main__":
    main()
