"""The async client against the three services, and what both clients promise about calls that are left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observing import read_metric, wait_until
from test_services import PROMPT, greedy_ids

from benchmarks.relay import Relay
from draftwire import AsyncClient, Client, Completion
from draftwire.client.batch import Job
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.scripted import expected_tokens
from tests.in_process import InProcessStack

SECONDS = 20.0
SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
LONG: dict[str, Any] = {"max_tokens": 4_000, "temperature": 0.0, "num_speculative_tokens": 1}
"""Twenty seconds of the scripted pair at least."""


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[InProcessStack]:
    """A target that takes its time, and room for two."""
    model = {"model": SCRIPT}
    with InProcessStack({"verifier": model, "drafter": model, "gateway": {"max_requests": 2}}) as running:
        yield running


@pytest.fixture
async def client(stack: InProcessStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.address) as connected:
        yield connected


@pytest.fixture
async def slow_client(slow_stack: InProcessStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(slow_stack.address) as connected:
        yield connected


async def is_idle(stack: InProcessStack) -> None:
    """Waits until nothing runs."""
    for service in ("verifier", "drafter"):
        await asyncio.to_thread(wait_until, lambda service=service: read_metric(stack, service, "num_sessions") == 0)


# What comes


async def test_both_clients_get_the_same(stack: InProcessStack, client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 7, "rejection_sample_method": "coupled", "logprobs": 1}
    several = {**options, "num_choices": 2}
    with Client(stack.address) as blocking:
        one, many = blocking.generate(PROMPT, **options), blocking.generate_many([PROMPT, [1, 2]], **several)
        described = blocking.server()
    completion = await client.generate(PROMPT, **options)
    assert (completion.token_ids, completion.text, completion.seed) == (one.token_ids, one.text, 7)
    assert [token.token_id for token in completion.logprobs or []] == one.token_ids
    completions = await client.generate_many([PROMPT, [1, 2]], **several)
    assert shown(completions) == shown(many)
    assert [len(group) for group in completions] == [2, 2]
    assert await client.server() == described


def shown(groups: list[list[Completion]]) -> list[list[tuple[int, list[int]]]]:
    return [[(completion.choice, completion.token_ids) for completion in group] for group in groups]


async def test_pieces_come_as_they_are_committed(client: AsyncClient) -> None:
    async with client.stream(PROMPT, max_tokens=30, seed=1) as stream:
        first = await anext(stream)
        assert stream.completion is None
        pieces = [first, *[piece async for piece in stream]]
    assert len(pieces) > 5
    assert stream.completion is not None
    assert [token for piece in pieces for token in piece.token_ids] == stream.completion.token_ids
    assert [source for piece in pieces for source in piece.sources] == stream.completion.sources
    assert [len(piece.token_ids) for piece in pieces].count(0) == 0


async def test_one_client_serves_several_tasks_at_once(pair: tuple[Path, Path], client: AsyncClient) -> None:
    completions = await asyncio.gather(*(client.generate(PROMPT, max_tokens=40, temperature=0.0) for _ in range(8)))
    assert [completion.token_ids for completion in completions] == [greedy_ids(pair[0], PROMPT, 40)] * 8


async def test_request_is_sent_when_the_first_piece_is_asked_for(stack: InProcessStack, client: AsyncClient) -> None:
    await is_idle(stack)
    before = read_metric(stack, "verifier", "prefix_cache_queries")
    stream = client.stream(PROMPT, max_tokens=2)
    await asyncio.sleep(0.3)
    assert read_metric(stack, "verifier", "prefix_cache_queries") == before
    assert [token async for piece in stream for token in piece.token_ids]
    assert read_metric(stack, "verifier", "prefix_cache_queries") > before


async def test_refusals_are_those_of_the_blocking_client(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        await client.generate(PROMPT, temperature=-1.0)
    with pytest.raises(InvalidRequestError, match="generate_many"):
        await client.generate([PROMPT, PROMPT])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        client.stream(PROMPT, allowed_token_ids=[])


# Waiting


async def test_server_that_is_not_there_is_told_within_the_time() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"no gateway answered at 127\.0\.0\.1:1 within 0\.3 s"):
            await client.wait_ready(0.3)
        with pytest.raises(UnavailableError, match=r"within 0\.2 s"):
            await client.generate("a", wait_for_server_s=0.2)
        with pytest.raises(UnavailableError):
            await client.server()


async def test_one_gateway_of_several_is_enough(stack: InProcessStack) -> None:
    async with AsyncClient(f"127.0.0.1:1, {stack.address}") as client:
        await client.wait_ready(SECONDS)
        assert (await client.server()).target.name
        for _ in range(3):
            assert len((await client.generate(PROMPT, max_tokens=5, wait_for_server_s=SECONDS)).token_ids) == 5


async def test_deadline_ends_a_completion(slow_stack: InProcessStack, slow_client: AsyncClient) -> None:
    started_at = asyncio.get_running_loop().time()
    stream = slow_client.stream([1], timeout_s=0.5, **LONG)
    with pytest.raises(UnavailableError):
        _ = [piece async for piece in stream]
    assert 0.4 < asyncio.get_running_loop().time() - started_at < 5.0
    await is_idle(slow_stack)


# What is left before its end

Leave = Callable[[AsyncClient], Awaitable[None]]


async def leave_loop(client: AsyncClient) -> None:
    async for _ in client.stream([1], **LONG):
        break


async def leave_block(client: AsyncClient) -> None:
    async with client.stream([1], **LONG) as stream:
        await anext(stream)


async def drop(client: AsyncClient) -> None:
    stream = client.stream([1], **LONG)
    await anext(stream)
    del stream


async def cancel_stream(client: AsyncClient) -> None:
    stream = client.stream([1], **LONG)
    await anext(stream)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0.1)
    stream.cancel()
    with pytest.raises(UnavailableError):
        await reading
    assert not reading.cancelled(), "the call was cancelled, and not the task"


async def cancel_task(client: AsyncClient) -> None:
    stream = client.stream([1], **LONG)
    await anext(stream)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def time_out(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await client.generate([1], **LONG)


async def fail_beside(client: AsyncClient) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.3)
        raise ZeroDivisionError

    async def run_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(client.generate([1], **LONG))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await run_both()


async def read_all(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    "leave",
    [leave_loop, leave_block, drop, cancel_stream, cancel_task, time_out, fail_beside],
    ids=lambda f: f.__name__,
)
async def test_completion_that_is_left_frees_what_it_held(
    slow_stack: InProcessStack, slow_client: AsyncClient, leave: Leave
) -> None:
    await is_idle(slow_stack)
    await leave(slow_client)
    await is_idle(slow_stack)
    assert len((await slow_client.generate([1], max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("how", ["loop", "block", "drop"])
async def test_blocking_stream_that_is_left_frees_what_it_held(slow_stack: InProcessStack, how: str) -> None:
    with Client(slow_stack.address) as client:
        stream = client.stream([1], **LONG)
        assert [next(stream).choice, next(stream).choice] == [0, 0]
        match how:
            case "loop":
                for _ in stream:
                    break
            case "block":
                with stream:
                    next(stream)
            case "drop":
                del stream
        await is_idle(slow_stack)


async def test_blocking_stream_goes_on_behind_pieces_that_were_taken(slow_stack: InProcessStack) -> None:
    with Client(slow_stack.address) as client:
        stream = client.stream([1, 2], max_tokens=60, temperature=0.0)
        token_ids = [*next(stream).token_ids, *next(stream).token_ids]
        token_ids += [token for piece in stream for token in piece.token_ids]
    assert token_ids == expected_tokens(2, 60)


async def test_closed_client_ends_what_runs_and_takes_no_more(slow_stack: InProcessStack) -> None:
    client = AsyncClient(slow_stack.address)
    stream = client.stream([1], **LONG)
    await anext(stream)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(UnavailableError, match="the client is closed"):
        await reading
    for refused in (client.server(), client.generate([1]), client.wait_ready(1.0)):
        with pytest.raises(UnavailableError, match="the client is closed"):
            await refused
    await is_idle(slow_stack)
    blocking = Client(slow_stack.address)
    pieces = blocking.stream([1], **LONG)
    next(pieces)
    blocking.close()
    with pytest.raises(UnavailableError, match="the client is closed"):
        list(pieces)
    with pytest.raises(UnavailableError, match="the client is closed"):
        blocking.generate([1])


def test_client_of_another_event_loop_says_so(stack: InProcessStack) -> None:
    client = AsyncClient(stack.address)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.server())
        with pytest.raises(RuntimeError, match="event loop"):
            second.run(client.server())
        first.run(client.close())


# Interruptions


async def test_completion_is_resumed_where_its_connection_breaks(slow_stack: InProcessStack) -> None:
    with Relay(slow_stack.services["gateway"].port) as relay:
        async with AsyncClient([f"127.0.0.1:{relay.port}"] * 2) as client:
            stream = client.stream([1], max_tokens=300, temperature=0.0, num_speculative_tokens=1)
            token_ids: list[int] = []
            async for piece in stream:
                token_ids += piece.token_ids
                if len(token_ids) < 40 and len(relay.open_connections) > 0:
                    relay.cut()
    assert token_ids == expected_tokens(1, 300)
    assert stream.completion is not None
    assert stream.completion.token_ids == token_ids
    assert stream.completion.num_resumed >= 1


# Batches


async def test_batch_asks_again_where_the_gateway_is_full(
    slow_stack: InProcessStack, slow_client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two, and six at a time."""
    prompts = [[1] * length for length in range(1, 13)]
    expected = [expected_tokens(len(prompt), 20) for prompt in prompts]
    options: dict[str, Any] = {"concurrency": 6, "max_tokens": 20, "temperature": 0.0}
    refused: list[DraftwireError] = []
    pause_after = Job.pause_after

    def noted(job: Job, error: DraftwireError) -> float | None:
        refused.append(error)
        return pause_after(job, error)

    monkeypatch.setattr(Job, "pause_after", noted)
    completions = await slow_client.generate_batch(prompts, **options)
    assert [completion.token_ids for completion in completions] == expected
    assert {type(error) for error in refused} == {NoRoomError}
    with Client(slow_stack.address) as blocking:
        completions = await asyncio.to_thread(blocking.generate_batch, iter(prompts), **options)
        assert [completion.token_ids for completion in completions] == expected
        with pytest.raises(InvalidRequestError):
            blocking.generate_batch([*prompts, ""], **options)
    await is_idle(slow_stack)


async def test_batch_that_is_cancelled_frees_what_it_held(slow_stack: InProcessStack, slow_client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await slow_client.generate_batch([[1]] * 5, **LONG)
    await is_idle(slow_stack)


async def test_batch_gives_up_a_gateway_that_stays_full(slow_stack: InProcessStack, slow_client: AsyncClient) -> None:
    streams = [slow_client.stream([1], **LONG) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    outcomes = await slow_client.generate_batch([[1], [2]], room_timeout_s=0.1, return_exceptions=True, max_tokens=1)
    assert [type(outcome) for outcome in outcomes] == [NoRoomError] * 2
    for stream in streams:
        await stream.aclose()
    await is_idle(slow_stack)


async def test_same_seed_gives_the_same_batch(client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "rejection_sample_method": "coupled"}
    batches = [await client.generate_batch([PROMPT] * 6, seed=seed, **options) for seed in (1, 1, 2)]
    first, again, other = ([completion.token_ids for completion in batch] for batch in batches)
    assert first == again
    assert len({tuple(ids) for ids in first + other}) == 12, "equal prompts have different texts"
