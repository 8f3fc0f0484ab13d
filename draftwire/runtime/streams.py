"""What both ends of a bidirectional stream do alike."""

import asyncio
from collections.abc import Awaitable


async def exchange(reading: Awaitable[None], writing: Awaitable[None]) -> None:
    """Reads and writes at the same time until either side ends, then stops the other.

    Raises:
        Exception: what the side that ended first raised.
    """
    tasks = [asyncio.ensure_future(reading), asyncio.ensure_future(writing)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
