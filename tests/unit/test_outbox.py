"""The outbox: nothing lost, nothing late, never a waiting producer, never without a bound."""

import asyncio

import pytest

from draftwire.errors import UnavailableError
from draftwire.services.outbox import Outbox

SOON_SECONDS = 5.0  # a deadline for what should happen at once
A_MOMENT_SECONDS = 0.02  # long enough for a task that could run to have run


async def taken(outbox: Outbox[int]) -> list[int]:
    async with asyncio.timeout(SOON_SECONDS):
        return await outbox.take_all()


async def test_everything_put_before_the_consumer_runs_is_taken_at_once_in_order() -> None:
    outbox = Outbox[int]()
    for item in range(5):
        outbox.put(item)
    assert await taken(outbox) == [0, 1, 2, 3, 4]


async def test_what_was_taken_is_not_taken_again() -> None:
    outbox = Outbox[int]()
    outbox.put(1)
    assert await taken(outbox) == [1]
    outbox.put(2)
    assert await taken(outbox) == [2]


async def test_consumer_waits_while_there_is_nothing() -> None:
    outbox = Outbox[int]()
    outbox.put(1)
    await taken(outbox)
    waiting = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(A_MOMENT_SECONDS)
    assert not waiting.done()
    outbox.put(2)
    outbox.put(3)
    assert await asyncio.wait_for(waiting, SOON_SECONDS) == [2, 3]


async def test_list_that_was_taken_does_not_change_later() -> None:
    outbox = Outbox[int]()
    outbox.put(1)
    first = await taken(outbox)
    outbox.put(2)
    assert first == [1]


async def test_put_beyond_the_bound_is_refused_and_the_rest_is_kept() -> None:
    outbox = Outbox[int](bound=2)
    outbox.put(1)
    outbox.put(2)
    with pytest.raises(UnavailableError):
        outbox.put(3)
    assert await taken(outbox) == [1, 2]
    outbox.put(4)  # taking makes room
    assert await taken(outbox) == [4]


async def test_outbox_is_bounded_by_default() -> None:
    outbox = Outbox[int]()

    def fill() -> None:
        for item in range(1_000_000):
            outbox.put(item)

    with pytest.raises(UnavailableError):
        fill()


async def test_close_lets_the_consumer_take_what_is_left_and_then_ends() -> None:
    outbox = Outbox[int]()
    outbox.put(1)
    outbox.close()
    assert await taken(outbox) == [1]
    assert await taken(outbox) == []
    assert await taken(outbox) == []  # and stays closed


async def test_close_wakes_a_waiting_consumer() -> None:
    outbox = Outbox[int]()
    waiting = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(A_MOMENT_SECONDS)
    outbox.close()
    assert await asyncio.wait_for(waiting, SOON_SECONDS) == []


async def test_put_after_close_is_dropped_even_beyond_the_bound() -> None:
    outbox = Outbox[int](bound=1)
    outbox.put(1)
    outbox.close()
    outbox.put(2)
    assert await taken(outbox) == [1]
    outbox.put(3)
    assert await taken(outbox) == []


async def test_closing_twice_does_no_harm() -> None:
    outbox = Outbox[int]()
    outbox.close()
    outbox.close()
    assert await taken(outbox) == []


async def test_consumer_that_is_cancelled_while_waiting_loses_nothing() -> None:
    outbox = Outbox[int]()
    waiting = asyncio.create_task(outbox.take_all())
    await asyncio.sleep(A_MOMENT_SECONDS)
    waiting.cancel()
    outbox.put(1)
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert await taken(outbox) == [1]
