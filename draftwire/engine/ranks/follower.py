"""Follower ranks of a verifier or drafter: they run their share of each step that rank 0 announces.

Rank 0 starts them on its own machine as `python -m draftwire.engine.ranks.follower`, with a pipe as their standard
input: end of file means that rank 0 has exited. Under torchrun they run the same command as rank 0, such as
`draftwire.cli serve verifier`.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import structlog

from draftwire.engine.ranks.place import end_process
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.runtime.logging import configure_logging

if TYPE_CHECKING:
    from draftwire.engine.ranks.group_model import LoadedRank

GOODBYE = b"stop"
"""Written by rank 0 before it closes the pipe in an orderly stop."""

PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""

log = structlog.get_logger()


def run_follower(config: RankConfig) -> int:
    """Loads this rank's share and runs rank 0's steps until rank 0 stops the group. Call on the thread for tensors.

    Returns:
        The exit status: 0 if rank 0 stopped the group, 2 if the model is refused, 1 after any other failure.
    """
    from draftwire.models.parallel.tensor_parallel import follow

    configure_logging(config.log_format, config.service)
    structlog.contextvars.bind_contextvars(rank=config.place.rank)
    try:
        loaded = _load(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # torchrun signals all ranks: rank 0 drains, then stops the group
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
    module, _, function = config.loader.partition(":")
    load: Callable[[RankConfig], LoadedRank] = getattr(import_module(module), function)
    return load(config)


def _end_with_rank_0() -> None:
    """Exits when the pipe from rank 0 is closed, whatever other threads are waiting for."""
    received = b""
    while data := os.read(sys.stdin.fileno(), 64):
        received += data
    end_process(0 if received == GOODBYE else 1)


def _set_parent_death_signal() -> None:
    """Has the kernel kill this process when its parent exits, even if this process is stopped or hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Runs one rank as a process that exits with rank 0."""
    _set_parent_death_signal()
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    end_process(run_follower(RankConfig.parse(sys.argv[1])))


if __name__ == "__main__":
    main()
