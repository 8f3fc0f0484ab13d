"""Who waits is served in turn, and nobody waits for what is there."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from virtual_time import in_virtual_time

from draftwire.errors import NoRoomError
from draftwire_gateway.request_queue import QueuePlace, RequestQueue


class Verifier:
    """Has room for so many requests, and refuses others."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_open = 0
        self.num_refusals = 0


async def serve(
    queue: RequestQueue, verifier: Verifier, served: list[str], caller: str, name: str = "", *, seconds: float = 1.0
) -> None:
    """One request: is opened when the verifier has room, and runs for a second."""
    async with queue.place(1, caller) as place:
        while verifier.num_open >= verifier.room:
            verifier.num_refusals += 1
            await queue.wait_for_room(place, NoRoomError("full"))
        verifier.num_open += 1
        queue.mark_open(place)
        served.append(name or caller)
        await asyncio.sleep(seconds)
        verifier.num_open -= 1


@in_virtual_time
async def test_three_hundred_at_once_are_all_served_at_the_rate_of_the_places() -> None:
    queue, verifier, served = RequestQueue(256, 1024, 300.0), Verifier(64), list[str]()
    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(serve(queue, verifier, served, "", str(number)))
    assert served == list(map(str, range(300))), "in order of arrival"
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.1), "300 of 64 at a time"
    assert verifier.num_refusals < 300, "after the first refusals places are tried one by one"
    assert (queue.num_running, queue.num_waiting) == (0, 0)


@in_virtual_time
async def test_callers_take_turns_however_many_requests_one_has() -> None:
    queue, verifier, served = RequestQueue(2, 1024, 300.0), Verifier(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(serve(queue, verifier, served, "flood"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            group.create_task(serve(queue, verifier, served, "other"))
    places = [place for place, caller in enumerate(served) if caller == "other"]
    assert places[0] <= 3
    assert all(after - before <= 2 for before, after in pairwise(places))


@in_virtual_time
async def test_turns_are_fair_too_where_verifiers_are_what_is_full() -> None:
    queue, verifier, served = RequestQueue(256, 1024, 300.0), Verifier(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(serve(queue, verifier, served, "flood"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            group.create_task(serve(queue, verifier, served, "other"))
    places = [place for place, caller in enumerate(served) if caller == "other"]
    assert places[-1] <= 9


@in_virtual_time
async def test_request_is_refused_if_the_queue_is_full_or_it_waited_too_long() -> None:
    queue = RequestQueue(2, 1, 10.0)
    async with queue.place(2, ""):
        waiting = asyncio.create_task(queue.place(1, "").__aenter__())
        await asyncio.sleep(1.0)
        assert queue.num_waiting == 1
        with pytest.raises(NoRoomError, match="2 requests are running, of 2 at most and 1 wait, of 1"):
            queue.refuse_if_full()
        with pytest.raises(NoRoomError, match="2 requests are running"):
            await queue.place(1, "").__aenter__()
        with pytest.raises(NoRoomError, match="has waited 10 s"):
            await waiting
        assert asyncio.get_running_loop().time() == 10.0
        assert queue.num_waiting == 0
    assert queue.num_running == 0


@in_virtual_time
async def test_verifiers_refusal_is_the_error_if_nobody_may_wait_or_time_is_over() -> None:
    for max_waiting, seconds in ((0, 0.0), (5, 10.0)):
        queue, started = RequestQueue(2, max_waiting, 10.0), asyncio.get_running_loop().time()
        with pytest.raises(NoRoomError, match="full"):
            await serve(queue, Verifier(0), [], "")
        assert asyncio.get_running_loop().time() - started == pytest.approx(seconds)
        assert (queue.num_running, queue.num_waiting) == (0, 0)


@in_virtual_time
async def test_room_that_others_left_is_found_within_a_second() -> None:
    """Another gateway had it: nothing ends here."""
    queue, verifier, served = RequestQueue(4, 4, 300.0), Verifier(0), list[str]()
    task = asyncio.create_task(serve(queue, verifier, served, ""))
    await asyncio.sleep(5.5)
    verifier.room = 1
    await task
    assert asyncio.get_running_loop().time() <= 7.5


@in_virtual_time
async def test_large_request_is_not_overtaken_for_ever() -> None:
    queue, order = RequestQueue(4, 100, 300.0), list[str]()

    async def run(num_choices: int, name: str) -> None:
        async with queue.place(num_choices, ""):
            order.append(name)
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        group.create_task(run(3, "first"))
        await asyncio.sleep(0.1)
        group.create_task(run(4, "large"))
        for number in range(5):
            group.create_task(run(1, f"small {number}"))
    assert order[:2] == ["first", "large"]


@in_virtual_time
async def test_whoever_leaves_the_queue_takes_nobodys_place() -> None:
    queue = RequestQueue(1, 100, 300.0)
    entered = list[int]()

    async def run(number: int) -> None:
        async with queue.place(1, ""):
            entered.append(number)
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(run(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    await asyncio.sleep(0.6)  # the third is running
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert entered == [0, 2, 3]
    assert (queue.num_running, queue.num_waiting) == (0, 0)


@in_virtual_time
async def test_turn_that_comes_as_its_request_is_cancelled_goes_to_the_next() -> None:
    queue = RequestQueue(1, 100, 300.0)
    async with AsyncExitStack() as running:
        await running.enter_async_context(queue.place(1, ""))
        waiting: list[asyncio.Task[QueuePlace]] = [
            asyncio.create_task(running.enter_async_context(queue.place(1, ""))) for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        assert queue.num_waiting == 2
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert (queue.num_running, queue.num_waiting) == (1, 0)


@in_virtual_time
async def test_request_far_from_a_verifier_holds_others_back_a_second_at_most() -> None:
    """It may be rendered for long, or its client may not read."""
    queue, verifier, served = RequestQueue(2, 100, 300.0), Verifier(1), list[str]()

    async def slow() -> None:
        async with queue.place(1, "slow"):
            await asyncio.sleep(100.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(serve(queue, verifier, served, "first"))
        await asyncio.sleep(0.5)
        hanging = group.create_task(slow())
        group.create_task(serve(queue, verifier, served, "other"))
        await asyncio.sleep(6.0)
        assert served == ["first", "first", "other"]
        hanging.cancel()


@in_virtual_time
async def test_large_request_does_not_keep_others_out_and_is_served_in_the_end() -> None:
    """A verifier of which the large one needs all: others overtake it for a while."""
    queue, order = RequestQueue(64, 1000, 300.0), list[str]()
    free = 4

    async def run(caller: str, size: int) -> None:
        nonlocal free
        async with queue.place(1, caller) as place:
            while free < size:
                await queue.wait_for_room(place, NoRoomError("full"))
            free -= size
            queue.mark_open(place)
            order.append(caller)
            await asyncio.sleep(1.0)
            free += size

    async with asyncio.TaskGroup() as group:
        for number in range(200):  # five in a second, of which four can be served
            group.create_task(run(f"small {number % 3}", 1))
            if number == 4:
                group.create_task(run("large", 4))
            await asyncio.sleep(0.2)
    place = order.index("large")
    assert 5 < place < 150, "overtaken, but not by all"
    assert (queue.num_running, queue.num_waiting) == (0, 0)


@in_virtual_time
async def test_verifier_cannot_have_requests_wait_for_an_hour() -> None:
    queue, verifier = RequestQueue(4, 4, 3000.0), Verifier(0)

    async def run() -> None:
        async with queue.place(1, "") as place:
            while verifier.num_open >= verifier.room:
                await queue.wait_for_room(place, NoRoomError("full", retry_after_s=3600.0))

    task = asyncio.create_task(run())
    await asyncio.sleep(1.0)
    verifier.room = 1
    await task
    assert asyncio.get_running_loop().time() <= 11.0


@in_virtual_time
async def test_whoever_leaves_the_queue_has_nobody_tried() -> None:
    queue, verifier = RequestQueue(4, 100, 300.0), Verifier(0)
    waiting = [asyncio.create_task(serve(queue, verifier, [], "a")) for _ in range(20)]
    await asyncio.sleep(0.5)
    before = verifier.num_refusals
    for task in waiting[10:]:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert verifier.num_refusals == before
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert (queue.num_running, queue.num_waiting) == (0, 0)
