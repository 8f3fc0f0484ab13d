"""The queue of a session's events: order, deadlines, and the timer that follows them."""

import asyncio
import math
from unittest.mock import patch

import pytest
from virtual_time import in_virtual_time, now

from draftwire_gateway.session.event_queue import EventQueue, PeerEvent, TaggedInbox
from draftwire_gateway.session.ports import DrafterReady


async def waited(queue: EventQueue) -> tuple[PeerEvent | None, float]:
    """Returns the next event, None at the deadline, and how long it was waited for."""
    started = now()
    try:
        return await queue.get(), now() - started
    except TimeoutError:
        return None, now() - started


@in_virtual_time
async def test_deadline_is_kept_however_it_was_moved() -> None:
    queue = EventQueue()
    for seconds in (5.0, 0.25, 30.0, 1.0, 0.0):
        queue.set_timeout(seconds)
        assert await waited(queue) == (None, pytest.approx(seconds))
    queue.set_timeout(60.0)
    later = asyncio.get_running_loop().call_later(1.0, TaggedInbox(queue, 0).put_nowait, DrafterReady())
    event, seconds = await waited(queue)
    assert (event is not None, seconds, later.cancelled()) == (True, pytest.approx(1.0), False)
    queue.set_timeout(0.5)  # before the timer that was set for the minute
    assert await waited(queue) == (None, pytest.approx(0.5))


@in_virtual_time
async def test_event_that_waits_is_read_after_the_deadline() -> None:
    """Who reads the text may have been away: what came meanwhile is no timeout."""
    queue = EventQueue()
    queue.set_timeout(1.0)
    TaggedInbox(queue, 0).put_nowait(DrafterReady())
    await asyncio.sleep(2.0)
    event, _ = await waited(queue)
    assert event is not None
    assert event.arrived_at == pytest.approx(now() - 2.0)
    assert await waited(queue) == (None, 0.0)


@in_virtual_time
async def test_rounds_share_a_timer_and_none_is_left() -> None:
    queue, loop = EventQueue(), asyncio.get_running_loop()
    inbox = TaggedInbox(queue, 0)
    with patch.object(loop, "call_at", wraps=loop.call_at) as call_at:
        for _ in range(100):
            queue.set_timeout(10.0)
            loop.call_soon(inbox.put_nowait, DrafterReady())
            await queue.get()
    assert call_at.call_count == 1
    queue.close()
    queue.set_timeout(math.inf)
    waiting = asyncio.ensure_future(queue.get())
    await asyncio.sleep(100.0)
    assert not waiting.done()
    waiting.cancel()
