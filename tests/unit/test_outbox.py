"""The outbox: nothing lost, nothing late, never a waiting producer, never without a bound."""

import asyncio
from collections import deque

import pytest

from draftwire.errors import UnavailableError
from draftwire.runtime.outbox import ITEMS_IN_A_TURN, Outbox, exchange, in_turns

SOON_SECONDS = 5.0  # a deadline for what should happen at once
A_MOMENT_SECONDS = 0.02  # long enough for a task that could run to have run


async def taken(outbox: Outbox[int]) -> list[int]:
    async with asyncio.timeout(SOON_SECONDS):
        return await outbox.take_all()


def filled(*items: int, bound: int = 100) -> Outbox[int]:
    outbox = Outbox[int](bound=bound)
    for item in items:
        outbox.put(item)
    return outbox


async def waiting_for(outbox: Outbox[int]) -> asyncio.Task[list[int]]:
    waiting = asyncio.create_task(taken(outbox))
    await asyncio.sleep(A_MOMENT_SECONDS)
    assert not waiting.done()
    return waiting


async def test_everything_put_before_the_consumer_runs_is_taken_once_in_order() -> None:
    outbox = filled(0, 1, 2, 3, 4)
    first = await taken(outbox)
    outbox.put(5)
    assert await taken(outbox) == [5]
    assert first == [0, 1, 2, 3, 4], "a list that was taken does not change later"


async def test_consumer_waits_while_there_is_nothing() -> None:
    outbox = filled(1)
    await taken(outbox)
    waiting = await waiting_for(outbox)
    outbox.put(2)
    outbox.put(3)
    assert await waiting == [2, 3]


async def test_put_beyond_the_bound_is_refused_and_the_rest_is_kept() -> None:
    outbox = filled(1, 2, bound=2)
    with pytest.raises(UnavailableError):
        outbox.put(3)
    assert await taken(outbox) == [1, 2]
    outbox.put(4)  # taking makes room
    assert await taken(outbox) == [4]


async def test_outbox_is_bounded_by_default() -> None:
    outbox = Outbox[int]()
    with pytest.raises(UnavailableError):
        deque(map(outbox.put, range(1_000_000)))


async def test_close_lets_the_consumer_take_what_is_left_and_then_ends() -> None:
    outbox = filled(1, bound=1)
    outbox.close()
    outbox.put(2)  # is dropped, even beyond the bound
    assert await taken(outbox) == [1]
    outbox.put(3)
    outbox.close()  # twice does no harm
    assert [await taken(outbox) for _ in range(2)] == [[], []]


async def test_close_wakes_a_waiting_consumer() -> None:
    waiting = await waiting_for(outbox := filled())
    outbox.close()
    assert await waiting == []


async def test_consumer_that_is_cancelled_while_waiting_loses_nothing() -> None:
    waiting = await waiting_for(outbox := filled())
    waiting.cancel()
    outbox.put(1)
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert await taken(outbox) == [1]


async def fail(error: Exception) -> None:
    raise error


async def write_all(outbox: Outbox[int], written: list[int]) -> None:
    while items := await outbox.take_all():
        await asyncio.sleep(0)  # a write that is waited for
        written += items


@pytest.mark.parametrize("ends", [True, False], ids=["the writer would be ended", "it would be cancelled"])
async def test_writer_that_fails_ends_the_exchange_while_the_reader_waits(ends: bool) -> None:
    cancelled = asyncio.Event()

    async def read() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with asyncio.timeout(SOON_SECONDS):
        with pytest.raises(OSError, match="writer"):
            await exchange(read(), fail(OSError("writer")), filled().close if ends else None)
    assert cancelled.is_set()


async def test_writer_writes_what_is_left_before_the_readers_end_is_the_calls() -> None:
    for reading in (asyncio.sleep(0), fail(OSError("reader"))):
        outbox, written = filled(1), list[int]()
        waiting = exchange(reading, write_all(outbox, written), outbox.close)
        outbox.put(2)
        async with asyncio.timeout(SOON_SECONDS):
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
        assert str(error) == ("reader" if isinstance(error, OSError) else "None")
        assert written == [1, 2]


async def test_failure_of_an_awaited_writer_is_raised_unless_the_reader_failed() -> None:
    for reading, cause in ((asyncio.sleep(0), "writer"), (fail(OSError("reader")), "reader")):
        outbox = filled()

        async def write(outbox: Outbox[int] = outbox) -> None:
            await outbox.take_all()
            await fail(OSError("writer"))

        async with asyncio.timeout(SOON_SECONDS):
            with pytest.raises(OSError, match=cause):
                await exchange(reading, write(), outbox.close)


async def test_others_have_turns_among_many_items_which_come_in_order() -> None:
    num_turns, items = 0, list[int]()

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count())
    async for item in in_turns(range(10 * ITEMS_IN_A_TURN)):
        items.append(item)
    assert items == list(range(10 * ITEMS_IN_A_TURN))
    assert 8 <= num_turns <= 10
    counting.cancel()
