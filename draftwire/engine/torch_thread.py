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
    """Runs functions one after another on a dedicated thread, so that the event loop never blocks on a model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the thread, which does not keep the process alive."""
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped = False
        self._clock = clock
        self._began_at: float | None = None  # set by the thread only
        context = contextvars.copy_context()  # log lines keep the service bound in this context
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
        """Returns for how many seconds the current function has run; 0 if none runs. Thread-safe."""
        began_at = self._began_at
        return 0.0 if began_at is None else self._clock() - began_at

    def stop(self) -> None:
        """Ends the thread after the running function; drops queued ones."""
        self._stopped = True
        self._work.put(None)

    def _run_all(self) -> None:
        while (work := self._work.get()) is not None and not self._stopped:
            self._began_at = self._clock()
            try:
                work()
            except Exception:  # from `post`, or the loop is closed: no caller to raise it in
                log.exception("torch_thread.work_failed")
            finally:
                self._began_at = None


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():  # not cancelled
        settle(outcome)
