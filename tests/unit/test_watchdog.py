"""A call that hangs is told from one that runs."""

import asyncio
import threading

import pytest

from draftwire.engine.torch_thread import TorchThread
from draftwire.runtime.time_limits import Watchdog

SECONDS = 5.0


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Held:
    """A function that runs until it is let go."""

    def __init__(self) -> None:
        self.began, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self._may_end.wait(SECONDS)

    def let_go(self) -> None:
        self._may_end.set()


async def until_idle(thread: TorchThread, clock: Clock) -> None:
    """Returns when no function has run since before now."""
    clock.now += 100.0
    async with asyncio.timeout(SECONDS):
        while thread.busy_s():
            await asyncio.sleep(0.001)


async def test_thread_says_for_how_long_its_function_has_run() -> None:
    clock = Clock()
    thread = TorchThread(clock)
    held = Held()
    assert thread.busy_s() == 0.0
    running = asyncio.create_task(thread.run(held))
    await asyncio.to_thread(held.began.wait, SECONDS)
    clock.now += 7.5
    assert thread.busy_s() == 7.5
    held.let_go()
    await running
    await until_idle(thread, clock)
    thread.stop()


async def test_each_function_has_a_time_of_its_own() -> None:
    """A long queue is no hung device."""
    clock = Clock()
    thread = TorchThread(clock)
    first, second = Held(), Held()
    thread.post(first)
    thread.post(second)
    await asyncio.to_thread(first.began.wait, SECONDS)
    clock.now += 100.0
    first.let_go()
    await asyncio.to_thread(second.began.wait, SECONDS)
    assert thread.busy_s() == 0.0
    clock.now += 3.0
    assert thread.busy_s() == 3.0
    second.let_go()
    thread.stop()


async def test_function_that_fails_has_ended_and_the_next_one_runs() -> None:
    clock = Clock()
    thread = TorchThread(clock)
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    thread.post(lambda: 1 / 0)
    assert await thread.run(lambda: 7) == 7
    held = Held()
    held.let_go()
    thread.post(lambda: held() or 1 / 0)
    await asyncio.to_thread(held.began.wait, SECONDS)
    await until_idle(thread, clock)
    thread.stop()


def test_watchdog_tells_when_a_call_gets_stuck_and_when_it_ends() -> None:
    seconds = [0.0]
    watchdog = Watchdog(120.0, lambda: seconds[0])
    seen = []
    for seconds[0] in (0.0, 119.0, 120.0, 120.1, 500.0, 0.1, 0.0, 121.0):
        seen.append((watchdog.check(), watchdog.is_stuck))
    quiet, stuck = (False, False), (True, True)
    assert seen == [quiet, quiet, quiet, stuck, (False, True), (True, False), quiet, stuck]


@pytest.mark.parametrize(("limit_s", "interval_s"), [(120.0, 1.0), (0.4, 0.1)])
def test_watchdog_looks_often_enough(limit_s: float, interval_s: float) -> None:
    assert Watchdog(limit_s, lambda: 0.0).interval_s == interval_s
