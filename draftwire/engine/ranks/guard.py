"""Supervision of a group by rank 0, on the event loop: detection of lost ranks, heartbeats, orderly stop."""

import asyncio
import faulthandler
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place, WantedGroup
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import DraftwireError, GroupLostError

log = structlog.get_logger()

Result = TypeVar("Result")

LOOK_SECONDS = 0.1
"""Interval of checks whether the other ranks still run."""
LAST_WORDS_SECONDS = 2.0
"""Grace period while the model is loaded: once another rank has exited, this one may fail too, with a better reason."""
STOP_SECONDS = 10.0
"""How long the running step may take when the other ranks are to be stopped."""
END_SECONDS = 10.0
"""How long rank 0 of a lost group may take to fail its sessions and exit."""
MOST_HEARTBEAT_SECONDS = 5.0
"""Longest interval of heartbeats while no step runs."""
HEARTBEATS_PER_TIMEOUT = 4
"""Fewest heartbeats within the time that ranks wait for each other."""


class SharedModel(Protocol):
    """A model that several processes compute together. Its methods run on the torch thread."""

    spoke_at: float
    """Time of the last step or heartbeat, by `time.monotonic`. Any thread may read it."""

    def heartbeat(self) -> None:
        """Checks that the other processes are there.

        Raises:
            GroupLostError: one is not.
        """

    def stop(self) -> None:
        """Stops the other processes.

        Raises:
            GroupLostError: one could not be stopped.
        """


class GroupGuard:
    """Ends a service when its group is lost. Does nothing for a service of one process.

    Attributes:
        place: of this process, which is rank 0.
        is_lost: whether the group was lost, or could not be stopped in order.
    """

    def __init__(
        self, wanted: WantedGroup, torch: TorchThread, place: Place | None = None, followers: Followers | None = None
    ) -> None:
        """Prepares.

        Args:
            wanted: from the service's settings.
            torch: the thread that the model runs on.
            place: rank 0 of a group; by default this process is alone.
            followers: the other ranks' processes, if this one started them.
        """
        self.place = place or Place()
        self.is_lost = False
        self._service, self._timeout_s = wanted.service, wanted.timeout_s
        self._torch = torch
        self._followers = followers or Followers()
        self._model: SharedModel | None = None

    def take(self, model: SharedModel) -> None:
        """Sets the model that the ranks share, once it is loaded. May be called on the torch thread."""
        self._model = model

    async def start(self, loading: Coroutine[Any, Any, None]) -> None:
        """Loads the model.

        Raises:
            GroupLostError: another rank exited.
        """
        self._followers.log_started()
        await self.while_it_lasts(loading, grace_s=LAST_WORDS_SECONDS)

    async def run(
        self, steps: Coroutine[Any, Any, None], limit_s: float, fail_sessions: Callable[[GroupLostError], int]
    ) -> None:
        """Runs steps until it is cancelled, and then stops the other ranks.

        Args:
            steps: runs steps until it is cancelled.
            limit_s: how long one call on the torch thread may take.
            fail_sessions: fails all sessions when the group is lost, and returns how many there were.

        Raises:
            GroupLostError: another rank exited, hangs, or is out of step with this one. All sessions have been failed.
        """
        try:
            await self.while_it_lasts(steps, limit_s=limit_s)
        except GroupLostError as error:
            self.is_lost = True
            details = {} if isinstance(error.__cause__, DraftwireError | None) else {"exc_info": error}
            num_sessions = fail_sessions(error)
            log.error(f"{self._service}.group_lost", reason=str(error), num_sessions=num_sessions, **details)
            raise
        except asyncio.CancelledError:
            await self._stop()
            raise

    async def wait(self, work: asyncio.Event, most_s: float | None = None) -> None:
        """Waits for work, for so many seconds at most, or until a heartbeat is due, which it sends."""
        if self._model is None:
            await _wait(work, most_s)
            return
        heartbeat_at = self._model.spoke_at + min(MOST_HEARTBEAT_SECONDS, self._timeout_s / HEARTBEATS_PER_TIMEOUT)
        left_s = max(0.0, heartbeat_at - time.monotonic())  # messages that cause no step must not delay it
        await _wait(work, left_s if most_s is None else min(most_s, left_s))
        if time.monotonic() >= heartbeat_at:
            await self._torch.run(self._model.heartbeat)

    async def while_it_lasts(
        self, work: Coroutine[Any, Any, Result], grace_s: float = 0.0, limit_s: float = math.inf
    ) -> Result:
        """Awaits some work; cancels it when another rank has exited or this one is stuck.

        Args:
            work: to be awaited.
            grace_s: how long the work may continue then; if it fails meanwhile, its own error is raised.
            limit_s: how long one call on the torch thread may take.

        Raises:
            GroupLostError: a rank exited, or a call took longer than `limit_s`.
        """
        if self.place.size == 1:
            return await work
        doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._watch(limit_s))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                await asyncio.wait({doing}, timeout=grace_s)
            return doing.result() if doing.done() else watching.result()
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _watch(self, limit_s: float) -> NoReturn:
        while True:
            fault = self._followers.fault
            if not fault and self._torch.busy_s() > limit_s:
                fault = f"a step takes longer than {limit_s:g} s"
            if fault:
                raise GroupLostError(f"the {self._service}'s group is lost: {fault}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _stop(self) -> None:
        """Stops the other ranks, after the running step."""
        if self._model is None:
            return
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._torch.run(self._model.stop)
        except (TimeoutError, GroupLostError) as error:
            self.is_lost = True
            log.error(f"{self._service}.group_lost", reason=str(error) or "no step ended in time", num_sessions=0)


async def end_if_lost(run: Awaitable[None]) -> None:
    """Runs a service; bounds the time until the process exits once its group is lost.

    Raises:
        GroupLostError: the group is lost. The process now exits within `END_SECONDS`, whatever hangs.
    """
    try:
        await run
    except GroupLostError:
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        raise


async def _wait(work: asyncio.Event, most_s: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await work.wait()
