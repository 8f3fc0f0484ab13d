"""The one thread of a process that touches models, caches and tensors."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TorchThread:
    """Runs functions one after another on a thread of their own, so that the event loop never waits for a model."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Runs `function` on the thread. Cancelling the wait does not stop the function."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def post(self, function: Callable[Parameters, object], *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Runs `function` on the thread, without waiting for it."""
        self._executor.submit(function, *args, **kwargs)

    def stop(self) -> None:
        """Lets the running function end and drops what waits."""
        self._executor.shutdown(wait=False, cancel_futures=True)
