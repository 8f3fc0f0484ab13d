"""Calls that run and requests that arrive are limited, and who is slow keeps nobody else out."""

import asyncio
from collections.abc import Callable

import pytest

from draftwire.errors import NoRoomError
from draftwire.runtime import call_limits
from draftwire.runtime.call_limits import (
    MAX_STREAMS,
    SPARE_CALLS,
    Arrivals,
    CallCounter,
    CallLimits,
    PeerStreams,
    StreamUse,
)


async def settled() -> None:
    """Lets everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def at_once() -> str:
    return "request"


async def never() -> str:
    await asyncio.Event().wait()
    return ""


def start(arrivals: Arrivals, count: int) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(arrivals.receive(never)) for _ in range(count)]


async def test_number_of_slow_arrivals_is_limited_and_the_oldest_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_limits, "GRACE_SECONDS", 0.0)
    arrivals = Arrivals(2)
    tasks = start(arrivals, 2)
    await settled()
    assert not any(task.done() for task in tasks)
    tasks += start(arrivals, 3)
    await settled()
    assert [task.done() for task in tasks] == [True] * 3 + [False] * 2
    for task in tasks[:3]:
        with pytest.raises(NoRoomError, match="took too long to arrive"):
            await task
    assert await arrivals.receive(at_once) == "request"
    for task in tasks:
        task.cancel()
    await settled()
    assert not arrivals._unhurried, "nothing is left of those that are gone"
    assert not arrivals._hurried


async def test_quick_request_has_time_beside_thousands_of_slow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_limits, "GRACE_SECONDS", 60.0)
    arrivals = Arrivals(2)
    slow = start(arrivals, 2000)
    await settled()
    assert [task.done() for task in slow] == [True] * 1996 + [False] * 4
    assert await asyncio.gather(*(arrivals.receive(at_once) for _ in range(100))) == ["request"] * 100
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_many_that_come_together_have_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody is refused who only comes with others."""
    monkeypatch.setattr(call_limits, "GRACE_SECONDS", 60.0)
    arrivals = Arrivals(2)
    tasks = start(arrivals, 4)
    await settled()
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("grace_s", [10.0, 100.0])
async def test_grace_begins_with_too_many_arrivals_and_ends_with_the_time_of_all(
    monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """Whoever has been sending for longer than the grace is not refused by the next one that comes."""
    monkeypatch.setattr(call_limits, "GRACE_SECONDS", grace_s)
    loop, arrivals = asyncio.get_running_loop(), Arrivals(1)
    earliest = loop.time()
    tasks = start(arrivals, 1)
    await settled()
    latest = loop.time()
    await asyncio.sleep(0.01)
    hurried_at = loop.time()
    tasks += start(arrivals, 1)
    await settled()
    (oldest,) = arrivals._hurried
    ends_at = oldest.when()
    assert ends_at is not None
    if grace_s < call_limits.ARRIVAL_SECONDS:
        assert ends_at >= hurried_at + grace_s
    else:
        assert earliest <= ends_at - call_limits.ARRIVAL_SECONDS <= latest
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_request_that_never_ends_is_given_up_though_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "ARRIVAL_SECONDS", 0.0)
    with pytest.raises(NoRoomError):
        await Arrivals(2).receive(never)


async def test_error_of_a_request_is_passed_on() -> None:
    async def fail() -> str:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await Arrivals(2).receive(fail)


def test_calls_are_counted_until_they_end_however_they_do() -> None:
    calls = CallCounter("calls", 1)
    for error in (None, ValueError):
        try:
            with calls.one():
                with pytest.raises(NoRoomError, match="1 calls are running"), calls.one():
                    pass
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert calls.num_running == 0


@pytest.mark.parametrize(("max_request_bytes", "max_arriving"), [(2**20, 128), (8 * 2**20, 16), (2**31 - 1, 4)])
def test_requests_that_arrive_hold_no_more_memory_the_larger_they_may_be(
    max_request_bytes: int, max_arriving: int
) -> None:
    limits = CallLimits(max_request_bytes)
    assert limits.max_arriving == max_arriving
    assert 2 * max_arriving * max_request_bytes <= call_limits.ARRIVING_BYTES or max_arriving == 4


def test_peers_may_send_the_prompts_of_all_sessions_at_once() -> None:
    assert CallLimits(2**26, 300 + SPARE_CALLS).max_arriving == 300
    assert CallLimits(2**26, 300 + SPARE_CALLS, is_public=True).max_arriving == 4
    assert CallLimits(2**20, 3 + SPARE_CALLS).max_arriving == 128


async def keep(streams: PeerStreams, use: Callable[[], StreamUse]) -> None:
    async with streams.one(use):
        await asyncio.Event().wait()


async def test_oldest_unused_stream_makes_room_first_one_that_never_was_used() -> None:
    uses = [StreamUse.PRESENT, StreamUse.PAST, *[StreamUse.NONE] * 4]
    streams = PeerStreams("streams of gateways", 4)
    tasks = [asyncio.create_task(keep(streams, lambda number=number: uses[number])) for number in range(6)]
    await settled()
    assert [number for number, task in enumerate(tasks) if task.done()] == [2, 3]
    with pytest.raises(NoRoomError, match="4 streams of gateways are open, the limit, and this one was idle"):
        await tasks[2]
    uses[4:] = [StreamUse.PRESENT] * 2
    tasks.append(asyncio.create_task(keep(streams, lambda: StreamUse.PRESENT)))
    await settled()
    assert tasks[1].done(), "it was used before, and is not now"
    with pytest.raises(NoRoomError, match="retry in a second"):
        await keep(streams, lambda: StreamUse.NONE)
    tasks[0].cancel()
    await settled()
    async with streams.one(lambda: StreamUse.NONE):
        assert len(streams._open) == 4, "whoever leaves makes room"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not streams._open


async def test_error_of_a_stream_is_passed_on_though_it_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="of its own"):
        async with PeerStreams("streams").one(lambda: StreamUse.NONE):
            raise TimeoutError("of its own")


def test_two_kinds_of_streams_leave_room_for_other_calls() -> None:
    assert 2 * MAX_STREAMS <= 3 * SPARE_CALLS // 4
