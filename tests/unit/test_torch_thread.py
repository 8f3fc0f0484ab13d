"""A function that fails on the torch thread leaves it idle, and the next one runs."""

import asyncio
import threading

from draftwire.services.torch_thread import TorchThread


async def test_thread_is_idle_after_a_function_that_nobody_waits_for_has_failed() -> None:
    thread = TorchThread()

    def fail() -> None:
        raise ValueError("posted")

    thread.post(fail)
    assert await thread.run(lambda: 7) == 7  # the thread goes on
    failed = threading.Event()

    def fail_and_tell() -> None:
        failed.set()
        raise ValueError("posted")

    thread.post(fail_and_tell)
    await asyncio.to_thread(failed.wait, 10.0)
    async with asyncio.timeout(10.0):
        while thread.busy_s():
            await asyncio.sleep(0.001)
    thread.stop()
