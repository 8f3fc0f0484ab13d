"""The one thread of a process that touches models, caches and tensors."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import structlog

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

log = structlog.get_logger()


class TorchThread:
    """Runs functions one after another on a thread of their own, so that the event loop never waits for a model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the thread, which does not keep the process alive.

        Args:
            clock: seconds; for `busy_s`.
        """
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped = False
        self._clock = clock
        self._began_at: float | None = None  # set by the thread only
        context = contextvars.copy_context()  # so that log lines say which service they are of
        threading.Thread(target=context.run, args=(self._run_all,), name="torch", daemon=True).start()

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Runs `function` on the thread. Cancelling the wait does not stop the function."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, future, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(_settle, future, future.set_result, result)

        self._work.put(work)
        return await future

    def post(self, function: Callable[Parameters, object], *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Runs `function` on the thread, without waiting for it."""
        self._work.put(lambda: function(*args, **kwargs))

    def busy_s(self) -> float:
        """Returns for how many seconds the running function has run; 0 where none runs. Any thread may ask."""
        began_at = self._began_at
        return 0.0 if began_at is None else self._clock() - began_at

    def stop(self) -> None:
        """Lets the running function end and drops what waits."""
        self._stopped = True
        self._work.put(None)

    def _run_all(self) -> None:
        while (work := self._work.get()) is not None and not self._stopped:
            self._began_at = self._clock()
            try:
                work()
            except Exception:  # of `post`, or the loop is gone: nobody waits for it
                log.exception("torch_thread.work_failed")
            finally:
                self._began_at = None


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():  # nobody has given up waiting
        settle(outcome)
