"""An event loop whose clock never waits."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

MOST_VIRTUAL_SECONDS = 100_000.0

Value = TypeVar("Value")


class JumpingSelector(selectors.SelectSelector):
    """Lets time pass instead of waiting. Nothing that the tests wait for comes from outside the process."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits, and no timer runs"
        self.now += max(0.0, timeout)
        assert self.now < MOST_VIRTUAL_SECONDS, "hangs"
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """Runs a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(work: Awaitable[Value]) -> tuple[Value, float]:
    """Returns what comes of some work, and how many seconds it took."""
    started_at = now()
    return await work, now() - started_at


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorates a test that is to run in virtual time."""

    @wraps(test)
    def run_test(**fixtures: Any) -> None:
        run(test(**fixtures))

    return run_test
