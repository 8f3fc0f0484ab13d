"""Who waits is served in turn, and nobody waits for what is there."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from gateway_fakes import in_virtual_time

from draftwire.errors import NoRoomError
from draftwire_gateway.admission import Admission, Place


class Verifier:
    """Has room for so many requests, and refuses others."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_open = 0
        self.num_refusals = 0


async def serve(
    admission: Admission, verifier: Verifier, served: list[str], caller: str, name: str = "", *, seconds: float = 1.0
) -> None:
    """One request: is opened when the verifier has room, and runs for a second."""
    async with admission.place(1, caller) as place:
        while verifier.num_open >= verifier.room:
            verifier.num_refusals += 1
            await admission.wait_for_room(place, NoRoomError("full"))
        verifier.num_open += 1
        admission.mark_open(place)
        served.append(name or caller)
        await asyncio.sleep(seconds)
        verifier.num_open -= 1


@in_virtual_time
async def test_three_hundred_at_once_are_all_served_at_the_rate_of_the_places() -> None:
    admission, verifier, served = Admission(256, 1024, 300.0), Verifier(64), list[str]()
    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(serve(admission, verifier, served, "", str(number)))
    assert served == list(map(str, range(300))), "in order of arrival"
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.1), "300 of 64 at a time"
    assert verifier.num_refusals < 300, "after the first refusals places are tried one by one"
    assert (admission.num_running, admission.num_waiting) == (0, 0)


@in_virtual_time
async def test_callers_take_turns_however_many_requests_one_has() -> None:
    admission, verifier, served = Admission(2, 1024, 300.0), Verifier(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(serve(admission, verifier, served, "flood"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            group.create_task(serve(admission, verifier, served, "other"))
    places = [place for place, caller in enumerate(served) if caller == "other"]
    assert places[0] <= 3
    assert all(after - before <= 2 for before, after in pairwise(places))


@in_virtual_time
async def test_turns_are_fair_too_where_verifiers_are_what_is_full() -> None:
    admission, verifier, served = Admission(256, 1024, 300.0), Verifier(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(serve(admission, verifier, served, "flood"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            group.create_task(serve(admission, verifier, served, "other"))
    places = [place for place, caller in enumerate(served) if caller == "other"]
    assert places[-1] <= 9


@in_virtual_time
async def test_request_is_refused_when_the_queue_is_full_or_it_has_waited_too_long() -> None:
    admission = Admission(2, 1, 10.0)
    async with admission.place(2, ""):
        waiting = asyncio.create_task(admission.place(1, "").__aenter__())
        await asyncio.sleep(1.0)
        assert admission.num_waiting == 1
        with pytest.raises(NoRoomError, match="2 requests are running, of 2 at most and 1 wait, of 1"):
            admission.refuse_if_full()
        with pytest.raises(NoRoomError, match="2 requests are running"):
            await admission.place(1, "").__aenter__()
        with pytest.raises(NoRoomError, match="has waited 10 s"):
            await waiting
        assert asyncio.get_running_loop().time() == 10.0
        assert admission.num_waiting == 0
    assert admission.num_running == 0


@in_virtual_time
async def test_refusal_of_a_verifier_is_the_error_where_nobody_may_wait_or_the_time_is_over() -> None:
    for max_waiting, seconds in ((0, 0.0), (5, 10.0)):
        admission, started = Admission(2, max_waiting, 10.0), asyncio.get_running_loop().time()
        with pytest.raises(NoRoomError, match="full"):
            await serve(admission, Verifier(0), [], "")
        assert asyncio.get_running_loop().time() - started == pytest.approx(seconds)
        assert (admission.num_running, admission.num_waiting) == (0, 0)


@in_virtual_time
async def test_room_that_others_left_is_found_within_a_second() -> None:
    """Another gateway had it: nothing ends here."""
    admission, verifier, served = Admission(4, 4, 300.0), Verifier(0), list[str]()
    task = asyncio.create_task(serve(admission, verifier, served, ""))
    await asyncio.sleep(5.5)
    verifier.room = 1
    await task
    assert asyncio.get_running_loop().time() <= 7.5


@in_virtual_time
async def test_large_request_is_not_overtaken_for_ever() -> None:
    admission, order = Admission(4, 100, 300.0), list[str]()

    async def run(num_choices: int, name: str) -> None:
        async with admission.place(num_choices, ""):
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
    admission = Admission(1, 100, 300.0)
    entered = list[int]()

    async def run(number: int) -> None:
        async with admission.place(1, ""):
            entered.append(number)
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(run(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    await asyncio.sleep(0.6)  # the third is running
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert entered == [0, 2, 3]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


@in_virtual_time
async def test_turn_that_comes_as_its_request_is_cancelled_goes_to_the_next() -> None:
    admission = Admission(1, 100, 300.0)
    async with AsyncExitStack() as running:
        await running.enter_async_context(admission.place(1, ""))
        waiting: list[asyncio.Task[Place]] = [
            asyncio.create_task(running.enter_async_context(admission.place(1, ""))) for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        assert admission.num_waiting == 2
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert (admission.num_running, admission.num_waiting) == (1, 0)
