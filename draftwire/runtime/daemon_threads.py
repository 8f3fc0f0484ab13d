"""A pool of threads that never keeps a process alive; those of `concurrent.futures` are joined at exit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class DaemonThreads:
    """Runs functions on a few threads, in the order in which they were submitted. Used on one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts no thread before there is work for it, and at most `num_threads`. Their names begin with `name`."""
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = SimpleQueue()
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Queues a call and returns its future; cancelling that before a thread begins drops the call."""
        future: Future[Result] = Future()
        self._work.put((future, lambda: function(*args, **kwargs)))
        if len(self._threads) < self._num_threads:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=_run_all, args=(self._work,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def stop(self) -> None:
        """Ends each thread after the calls that are queued. Does not wait for them."""
        for _ in self._threads:
            self._work.put(None)


def _run_all(work: "SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]") -> None:
    while (item := work.get()) is not None:
        future, function = item
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del item, future, function  # they hold what was computed
