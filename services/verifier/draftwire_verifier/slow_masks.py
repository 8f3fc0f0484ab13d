"""Makes slow masks beside the steps, so that only the session that needs them waits for them."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import structlog

from draftwire.engine.target_session import TargetSession
from draftwire.errors import UnavailableError
from draftwire.verification.deciding import MadeMasks, make_masks

log = structlog.get_logger()

NICENESS = 10
"""Niceness of the thread: steps go before slow masks."""
FAILED = "the masks of the text's form could not be made"


class SlowMasks:
    """One thread for the masks of all sessions whose masks are slow, first come, first served. Used on the event loop.

    A session's automaton is its own: while the thread uses it, the session is in no step.
    """

    def __init__(self, deliver: Callable[[TargetSession, MadeMasks], None]) -> None:
        """Prepares; the thread starts with the first session. `deliver` is called on the event loop."""
        self._deliver = deliver
        self._thread = ThreadPoolExecutor(1, "slow-masks", initializer=_be_nice)

    def take(self, session: TargetSession) -> bool:
        """Takes a session if its masks are slow; see `Scheduler.take_slow`."""
        automaton = session.automaton
        if automaton is None or not automaton.has_slow_masks or session.is_reading:
            return False
        generated_ids = session.committed.ids[session.spec.parameters.prompt_len :]
        block = session.block
        work = partial(
            make_masks, automaton, generated_ids, block.token_ids if block else [], block.tree if block else None
        )
        made = asyncio.get_running_loop().run_in_executor(self._thread, work)
        made.add_done_callback(partial(self._take_made, session))
        return True

    def stop(self) -> None:
        """Ends the thread after the mask that is being made."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_made(self, session: TargetSession, made: asyncio.Future[MadeMasks]) -> None:
        if made.cancelled():
            return
        error = made.exception()
        if error is not None:
            log.error("verifier.masks_failed", exc_info=error)
        self._deliver(session, UnavailableError(FAILED) if error is not None else made.result())


def _be_nice() -> None:
    with suppress(OSError):  # where threads have no niceness of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
