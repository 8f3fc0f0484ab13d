"""What both Python clients promise, and what the async one promises its tasks, against the three services."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from observing import read_metric, wait_until
from test_services import PROMPT, greedy_ids

from benchmarks.relay import Relay
from draftwire import AsyncClient
from draftwire.client import AsyncCompletionStream
from draftwire.client.batch import Job
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.script import expected_tokens
from tests.in_process import InProcessStack
from tests.twins import TWINS

SECONDS = 20.0
SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
LONG: dict[str, Any] = {"max_tokens": 4_000, "temperature": 0.0, "num_speculative_tokens": 1}
"""Twenty seconds of the scripted pair at least."""


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[InProcessStack]:
    """A target that takes its time, and room for two."""
    model = {"model": SCRIPT}
    with InProcessStack(
        {"verifier": model, "drafter": model, "gateway": {"max_requests": 2, "max_waiting_requests": 0}}
    ) as running:
        yield running


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest) -> Any:
    """One of the two clients, whose calls block. Connects to an address."""
    return TWINS[request.param]


@pytest.fixture
async def slow_client(slow_stack: InProcessStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(slow_stack.address) as connected:
        yield connected


def wait_until_idle(stack: InProcessStack) -> None:
    for service in ("verifier", "drafter"):
        wait_until(lambda service=service: read_metric(stack, service, "num_sessions") == 0, f"{service} is idle")


# Both clients


def test_both_clients_get_the_same_stream_and_the_same_refusals(stack: InProcessStack) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 7, "rejection_sample_method": "coupled", "logprobs": 1}
    found = []
    for kind in TWINS.values():
        with kind(stack.address) as client, client.stream(PROMPT, **options) as stream:
            first = next(stream)
            assert stream.completion is None
            pieces = [first, *stream]
            one, many = stream.completion, client.generate_many([PROMPT, [1, 2]], num_choices=2, **options)
            assert one is not None
            assert len(pieces) > 5
            assert all(piece.token_ids for piece in pieces)
            assert [token for piece in pieces for token in piece.token_ids] == one.token_ids
            assert [source for piece in pieces for source in piece.sources] == one.sources
            assert ([said.token_id for said in one.logprobs or []], one.seed) == (one.token_ids, 7)
            assert client.generate(PROMPT, **options).token_ids == one.token_ids
            assert [len(group) for group in many] == [2, 2]
            shown = [[(each.choice, each.token_ids) for each in group] for group in many]
            found.append((one.token_ids, one.text, shown, client.server()))
            for method, prompt, wrong, says in (
                (client.generate, PROMPT, {"temperature": -1.0}, "temperature"),
                (client.generate, [PROMPT, PROMPT], {}, "generate_many"),
                (client.stream, PROMPT, {"allowed_token_ids": []}, "allowed_token_ids"),
            ):
                with pytest.raises(InvalidRequestError, match=says):
                    method(prompt, **wrong)
    assert found[0] == found[1]


def test_absent_server_is_reported_in_time_and_one_gateway_is_enough(stack: InProcessStack, twin: Any) -> None:
    with twin("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"no gateway answered at 127\.0\.0\.1:1 within 0\.3 s"):
            client.wait_ready(0.3)
        with pytest.raises(UnavailableError, match=r"within 0\.2 s"):
            client.generate("a", wait_for_server_s=0.2)
        with pytest.raises(UnavailableError):
            client.server()
    with twin(f"127.0.0.1:1, {stack.address}") as client:
        client.wait_ready(SECONDS)
        assert client.server().target.name
        for _ in range(3):
            assert len(client.generate(PROMPT, max_tokens=5, wait_for_server_s=SECONDS).token_ids) == 5


def test_completion_that_is_left_or_late_frees_what_it_held(slow_stack: InProcessStack, twin: Any) -> None:
    with twin(slow_stack.address) as client:
        for way in ("loop", "block", "drop", "deadline"):
            started_at = time.monotonic()
            stream = client.stream([1], timeout_s=0.5 if way == "deadline" else None, **LONG)
            next(stream)
            match way:
                case "loop":
                    for _ in stream:
                        break
                case "block":
                    with stream:
                        next(stream)
                case "drop":
                    del stream
                case "deadline":
                    with pytest.raises(UnavailableError):
                        list(stream)
                    assert 0.4 < time.monotonic() - started_at < 5.0
            wait_until_idle(slow_stack)
        assert len(client.generate([1], max_tokens=3).token_ids) == 3


def test_closed_client_ends_what_runs_and_takes_no_more(slow_stack: InProcessStack, twin: Any) -> None:
    with twin(slow_stack.address) as client:
        stream = client.stream([1], **LONG)
        next(stream)
        client.close()
        for refused in (
            lambda: list(stream),
            client.server,
            lambda: client.generate([1]),
            lambda: client.wait_ready(1.0),
        ):
            with pytest.raises(UnavailableError, match="the client is closed"):
                refused()
    wait_until_idle(slow_stack)


def test_completion_is_resumed_where_its_connection_breaks(slow_stack: InProcessStack, twin: Any) -> None:
    with (
        Relay(slow_stack.services["gateway"].port) as relay,
        twin([f"127.0.0.1:{relay.port}"] * 2) as client,
        client.stream([1], max_tokens=150, temperature=0.0, num_speculative_tokens=1) as stream,
    ):
        token_ids: list[int] = []
        for piece in stream:
            token_ids += piece.token_ids
            if len(token_ids) < 40 and len(relay.open_connections) > 0:
                relay.cut()
        assert token_ids == expected_tokens(1, 150)
        assert stream.completion is not None
        assert stream.completion.token_ids == token_ids
        assert stream.completion.num_resumed >= 1


def test_batch_retries_a_full_gateway_and_gives_up_one_that_stays_full(
    slow_stack: InProcessStack, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two, and six at a time."""
    prompts = [[1] * length for length in range(1, 13)]
    options: dict[str, Any] = {"concurrency": 6, "max_tokens": 20, "temperature": 0.0}
    refused: list[DraftwireError] = []
    pause_after = Job.pause_after

    def noted(job: Job, error: DraftwireError) -> float | None:
        refused.append(error)
        return pause_after(job, error)

    monkeypatch.setattr(Job, "pause_after", noted)
    with twin(slow_stack.address) as client:
        completions = client.generate_batch(iter(prompts), **options)
        assert [one.token_ids for one in completions] == [expected_tokens(len(prompt), 20) for prompt in prompts]
        assert {type(error) for error in refused} == {NoRoomError}
        with pytest.raises(InvalidRequestError):
            client.generate_batch([*prompts, ""], **options)
        wait_until_idle(slow_stack)
        with client.stream([1], **LONG) as first, client.stream([1], **LONG) as second:
            assert (next(first).choice, next(second).choice) == (0, 0)
            outcomes = client.generate_batch([[1], [2]], room_timeout_s=0.1, return_exceptions=True, max_tokens=1)
        assert [type(outcome) for outcome in outcomes] == [NoRoomError] * 2
    wait_until_idle(slow_stack)


def test_same_seed_gives_the_same_batch(stack: InProcessStack, twin: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "rejection_sample_method": "coupled"}
    with twin(stack.address) as client:
        batches = [client.generate_batch([PROMPT] * 6, seed=seed, **options) for seed in (1, 1, 2)]
    first, again, other = ([completion.token_ids for completion in batch] for batch in batches)
    assert first == again
    assert len({tuple(ids) for ids in first + other}) == 12, "equal prompts have different texts"


# Tasks


async def test_one_client_serves_several_tasks_at_once(stack: InProcessStack, pair: tuple[Path, Path]) -> None:
    async with AsyncClient(stack.address) as client:
        completions = await asyncio.gather(*(client.generate(PROMPT, max_tokens=40, temperature=0.0) for _ in range(8)))
    assert [completion.token_ids for completion in completions] == [greedy_ids(pair[0], PROMPT, 40)] * 8


async def test_request_is_sent_when_the_first_piece_is_asked_for(stack: InProcessStack) -> None:
    wait_until_idle(stack)
    before = read_metric(stack, "verifier", "prefix_cache_queries")
    async with AsyncClient(stack.address) as client:
        stream = client.stream(PROMPT, max_tokens=2)
        await asyncio.sleep(0.3)
        assert read_metric(stack, "verifier", "prefix_cache_queries") == before
        assert [token async for piece in stream for token in piece.token_ids]
    assert read_metric(stack, "verifier", "prefix_cache_queries") > before


async def test_completion_frees_what_it_held_if_cancelled_or_its_client_closed(
    slow_stack: InProcessStack,
) -> None:
    async def read(stream: AsyncCompletionStream, has_begun: asyncio.Event) -> None:
        async for _ in stream:
            has_begun.set()

    ways: dict[str, tuple[type[BaseException], str]] = {
        "call": (UnavailableError, "the completion was cancelled"),
        "task": (asyncio.CancelledError, ""),
        "client": (UnavailableError, "the client is closed"),
    }
    for way, (expected, says) in ways.items():
        async with AsyncClient(slow_stack.address) as client:
            stream, has_begun = client.stream([1], **LONG), asyncio.Event()
            task = asyncio.create_task(read(stream, has_begun))
            await asyncio.wait_for(has_begun.wait(), SECONDS)
            match way:
                case "call":
                    stream.cancel()
                case "task":
                    task.cancel()
                case "client":
                    await client.close()
            with pytest.raises(expected) as raised:
                await task
            assert says in str(raised.value)
            assert task.cancelled() == (way == "task"), "the call was cancelled, and not the task"
            await asyncio.to_thread(wait_until_idle, slow_stack)


async def test_timed_out_or_failed_completion_and_batch_free_what_they_held(
    slow_stack: InProcessStack, slow_client: AsyncClient
) -> None:
    async def fail() -> None:
        await asyncio.to_thread(
            wait_until, lambda: read_metric(slow_stack, "verifier", "num_sessions") > 0, "the completion runs"
        )
        raise ZeroDivisionError

    async def run_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_client.generate([1], **LONG))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await run_both()
    await asyncio.to_thread(wait_until_idle, slow_stack)
    for work in (slow_client.generate([1], **LONG), slow_client.generate_batch([[1]] * 5, **LONG)):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.5)
        await asyncio.to_thread(wait_until_idle, slow_stack)


def test_client_of_another_event_loop_says_so(stack: InProcessStack) -> None:
    client = AsyncClient(stack.address)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.server())
        with pytest.raises(RuntimeError, match="event loop"):
            second.run(client.server())
        first.run(client.close())
