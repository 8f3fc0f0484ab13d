"""Batches of the Python clients, on threads and as tasks, against a server that says how many it serves at once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from client_fakes import Code, Failure, delta, finish_of, nothing
from observing import wait_until

from draftwire.client import AsyncCompletionStream, Completion, CompletionStream, Options
from draftwire.client import batch as batch_module
from draftwire.client.batch import Batch, Job, seed_of
from draftwire.client.batch_tasks import BatchTasks
from draftwire.client.batch_threads import BatchThreads
from draftwire.client.request_maker import make_request
from draftwire.client.request_progress import RequestProgress
from draftwire.client.retry_policy import RetryPolicy
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.method.keys import MAX_SEED
from draftwire.v1 import gateway_pb2

SECONDS = 10.0
STEP_S = 0.01

Outcome = Completion | DraftwireError
Run = Callable[..., list[Outcome]]


class Server:
    """Answers "n" with the token n, after a while. Keeps count of the calls that run."""

    def __init__(self, room: int = 1_000) -> None:
        self.room = room
        self.retry_ms: int | None = 20
        self.failing: dict[str, Code] = {}
        self.hanging: set[str] = set()
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.num_running = 0
        self.most_running = 0
        self.num_refused = 0
        self.num_cancelled = 0
        self._lock = threading.Lock()

    def start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> "ServedCall":
        with self._lock:
            self.requests.append(request)
        return ServedCall(self, request)

    def enter(self) -> None:
        with self._lock:
            if self.num_running >= self.room:
                self.num_refused += 1
                raise Failure(Code.RESOURCE_EXHAUSTED, self.retry_ms)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)

    def leave(self) -> None:
        with self._lock:
            self.num_running -= 1


class ServedCall:
    def __init__(self, server: Server, request: gateway_pb2.GenerateRequest) -> None:
        self._server, self._request, self._is_cancelled = server, request, False

    def steps(self) -> Iterator[gateway_pb2.GenerateResponse | None]:
        """Yields responses, and None to wait."""
        self._server.enter()
        try:
            started_at = time.monotonic()
            yield None
            while self._request.text in self._server.hanging or self._is_cancelled:
                assert time.monotonic() - started_at < SECONDS, "was not cancelled"
                if self._is_cancelled:
                    raise Failure(Code.CANCELLED)
                yield None
            if self._request.text in self._server.failing:
                raise Failure(self._server.failing[self._request.text])
            yield delta(int(self._request.text))
            finish = finish_of(0)
            finish.finish.seed = self._request.seed
            yield finish
        finally:
            self._server.leave()

    def __iter__(self) -> Iterator[gateway_pb2.GenerateResponse]:
        for step in self.steps():
            if step is not None:
                yield step
            time.sleep(STEP_S)

    async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        for step in self.steps():
            if step is not None:
                yield step
            await asyncio.sleep(STEP_S)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._server.num_cancelled += 1


def threads(batch: Batch, server: Server) -> BatchThreads:
    return BatchThreads(batch, lambda job: CompletionStream(server.start, progress_of(job)))


def tasks(batch: Batch, server: Server) -> BatchTasks:
    return BatchTasks(batch, lambda job: AsyncCompletionStream(server.start, progress_of(job), nothing))


def progress_of(job: Job) -> RequestProgress:
    return RequestProgress(make_request(job.prompt, job.options), RetryPolicy(1, 30.0, None))


@pytest.fixture(params=[threads, tasks])
def run(request: pytest.FixtureRequest) -> Run:
    def on(
        server: Server,
        prompts: Any,
        options: Options | None = None,
        concurrency: int = 4,
        returns: bool = False,
        room_timeout_s: float = SECONDS,
    ) -> list[Outcome]:
        batch = Batch(prompts, options or {}, concurrency, returns, room_timeout_s)
        work = request.param(batch, server).run(prompts)
        if work is not None:
            asyncio.run(work)
        return batch.outcomes()

    return on


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def ids_of(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.token_ids for outcome in outcomes if isinstance(outcome, Completion)]


def test_completions_are_in_prompt_order_and_concurrency_is_bounded(run: Run) -> None:
    """With the seeds that follow from the batch's and the index."""
    for _ in range(2):
        server = Server()
        outcomes = run(server, numbers(30), {"seed": 5})
        assert ids_of(outcomes) == [[number] for number in range(30)]
        assert [one.seed for one in outcomes if isinstance(one, Completion)] == [seed_of(5, n) for n in range(30)]
        assert (server.most_running, len(server.requests)) == (4, 30)
    assert run(server, []) == []


def test_prompts_are_taken_on_the_callers_thread_when_there_is_room(run: Run) -> None:
    server = Server()
    ahead: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(20):
            assert threading.current_thread() is threading.main_thread()
            ahead.append(number - (len(server.requests) - server.num_running))
            yield str(number)

    assert len(run(server, prompts(), concurrency=3)) == 20
    assert max(ahead) <= 3


async def test_async_iterable_of_prompts_works_and_a_failure_ends_its_next_wait() -> None:
    async def prompts(count: int, then_s: float) -> AsyncIterator[str]:
        for number in range(count):
            await asyncio.sleep(0)
            yield str(number)
        await asyncio.sleep(then_s)

    server = Server()
    batch = Batch(prompts(5, 0.0), {}, 2, False, SECONDS)
    await tasks(batch, server).run(prompts(5, 0.0))
    assert ids_of(batch.outcomes()) == [[number] for number in range(5)]
    server.failing = {"0": Code.INVALID_ARGUMENT}
    started_at = time.monotonic()
    with pytest.raises(InvalidRequestError) as raised:
        await tasks(Batch([], {}, 4, False, SECONDS), server).run(prompts(1, SECONDS))
    assert time.monotonic() - started_at < SECONDS / 2
    assert isinstance(raised.value.__cause__, Failure)


# Errors


def test_error_of_one_prompt_stands_in_its_place(run: Run) -> None:
    """Also that of what is no single prompt."""
    server = Server()
    server.failing = {"2": Code.INVALID_ARGUMENT, "5": Code.UNAVAILABLE}
    prompts: list[Any] = [*numbers(8), ["a", "b"], 5, None, {"role": "user"}, "\ud800", "8"]
    outcomes = run(server, prompts, returns=True)
    expected = [Completion] * 8 + [InvalidRequestError] * 5 + [Completion]
    expected[2], expected[5] = InvalidRequestError, UnavailableError
    assert [type(outcome) for outcome in outcomes] == expected
    assert ids_of(outcomes) == [[number] for number in range(9) if number not in (2, 5)]


def test_first_error_is_raised_and_what_runs_is_cancelled(run: Run) -> None:
    server = Server()
    server.failing = {"2": Code.INVALID_ARGUMENT}
    server.hanging = {"0", "1", "3"}
    with pytest.raises(InvalidRequestError):
        run(server, numbers(1_000))
    assert (server.num_cancelled >= 3, server.num_running) == (True, 0)
    assert len(server.requests) <= 5, "no further ones are begun"


def test_no_prompt_is_taken_behind_a_failure_though_there_is_room(run: Run) -> None:
    server = Server()
    server.failing = {"0": Code.INVALID_ARGUMENT}
    taken = []

    def prompts() -> Iterator[str]:
        yield "0"
        deadline = time.monotonic() + 20 * STEP_S
        for number in range(1, 100):
            taken.append(number)
            while server.num_running and time.monotonic() < deadline:  # on threads, this lets it fail
                time.sleep(STEP_S)
            yield str(number)

    with pytest.raises(InvalidRequestError):
        run(server, prompts(), concurrency=1_000)
    assert len(taken) < 50


async def test_tasks_that_fail_are_noticed_where_prompts_come_without_waiting() -> None:
    taken = []
    prompts = (taken.append(number) or ["a", "b"] for number in range(100))
    with pytest.raises(InvalidRequestError):
        await tasks(Batch([], {}, 1_000, False, 1.0), Server()).run(prompts)  # type: ignore[arg-type]
    assert len(taken) < 5


def test_failure_on_a_thread_cancels_what_runs_before_the_next_prompt() -> None:
    server = Server()
    server.failing = {"1": Code.INVALID_ARGUMENT}
    server.hanging = {"0"}

    def prompts() -> Iterator[str]:
        yield "0"
        wait_until(lambda: server.num_running > 0, "the first one runs")
        yield "1"
        wait_until(lambda: server.num_cancelled >= 2, "what runs is cancelled", SECONDS / 2)  # what failed is the first

    with pytest.raises(InvalidRequestError):
        threads(Batch([], {}, 4, False, SECONDS), server).run(prompts())


@pytest.mark.parametrize("kind", [BatchThreads, BatchTasks])
def test_first_of_several_failures_at_once_is_raised(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[DraftwireError] = []
    together = threading.Barrier(8)

    def fail_on_threads(_self: BatchThreads, job: Job) -> None:
        together.wait(SECONDS)
        raise InvalidRequestError(f"prompt {job.index}")

    async def fail_as_tasks(_self: BatchTasks, job: Job) -> None:
        await asyncio.sleep(0.05 - time.monotonic() % 0.05)
        failed.append(InvalidRequestError(f"prompt {job.index}"))
        raise failed[-1]

    monkeypatch.setattr(kind, "_work", fail_on_threads if kind is BatchThreads else fail_as_tasks)
    for _ in range(20):
        failed.clear()
        work = kind(Batch([], {}, 8, False, 1.0), None)
        with pytest.raises(InvalidRequestError) as raised:
            asyncio.run(work.run(numbers(8)))
        assert raised.value is (work._failures if kind is BatchThreads else failed)[0]


def test_error_that_is_no_prompts_is_raised_and_cancels_what_runs(run: Run) -> None:
    server = Server()
    server.hanging = {"0"}

    def prompts() -> Iterator[str]:
        yield "0"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(server, prompts(), returns=True)
    assert server.num_running == 0
    with pytest.raises(TypeError, match="temprature"):
        run(Server(), ["0"], {"temprature": 1.0}, returns=True)  # type: ignore[typeddict-unknown-key]


NO_BATCHES: list[tuple[Any, Any, Any, Any, str]] = [
    ("abc", {}, 1, 1.0, "several prompts"),
    (b"abc", {}, 1, 1.0, "several prompts"),
    ({"role": "user", "content": "a"}, {}, 1, 1.0, "several prompts"),
    ([], {"num_choices": 2}, 1, 1.0, "several"),
    ([], {}, 0, 1.0, "concurrency"),
    ([], {}, 2.5, 1.0, "concurrency"),
    ([], {}, "a", 1.0, "concurrency"),
    ([], {"seed": -1}, 1, 1.0, "seed"),
    ([], {"seed": 2**64}, 1, 1.0, "seed"),
    ([], {"seed": 1.5}, 1, 1.0, "seed"),
    ([], {"seed": "a"}, 1, 1.0, "seed"),
    ([], {"wait_for_server_s": "a"}, 1, 1.0, "wait_for_server_s"),
    ([], {}, 1, "a", "room_timeout_s"),
]
"""Prompts, options, concurrency and time to wait for room, and what the refusal names."""


def test_batch_that_makes_no_sense_is_refused() -> None:
    for prompts, options, concurrency, room_timeout_s, named in NO_BATCHES:
        with pytest.raises(InvalidRequestError, match=named):
            Batch(prompts, options, concurrency, False, room_timeout_s)


# Room


def test_prompt_is_given_up_when_the_server_was_full_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(batch_module.time, "monotonic", lambda: now)
    job = Batch([], {}, 1, False, 5.0).job("a")
    assert job.pause_after(UnavailableError("lost")) is None
    now = 200.0  # the time that counts begins with the first refusal
    assert [job.pause_after(NoRoomError("full", seconds)) for seconds in (0.0, 2.5)] == [0.1, 2.5]
    now = 203.0
    assert [job.pause_after(NoRoomError("full", seconds)) for seconds in (2.0, 2.5)] == [2.0, None]


@pytest.mark.parametrize("seed", [None, 5])
def test_prompt_is_resent_with_its_seed_if_the_batch_has_one(run: Run, seed: int | None) -> None:
    """At a full server each prompt is refused some times; without a seed the server draws one for each attempt."""
    server = Server(room=1)
    run(server, numbers(4), {"seed": seed})
    assert server.num_refused > 0
    sent = {(request.text, request.seed if request.HasField("seed") else None) for request in server.requests}
    assert sent == {(str(number), None if seed is None else seed_of(seed, number)) for number in range(4)}


def test_full_server_is_asked_again_and_no_prompt_is_lost(run: Run) -> None:
    server = Server(room=2)
    assert ids_of(run(server, numbers(12), concurrency=6)) == [[number] for number in range(12)]
    assert (server.most_running, server.num_refused > 0) == (2, True)


def test_full_server_is_not_asked_early_and_is_each_prompts_error(run: Run) -> None:
    server = Server(room=0)
    server.retry_ms = 400
    started_at = time.monotonic()
    with pytest.raises(NoRoomError) as refused:
        run(server, ["0"], room_timeout_s=0.7)
    assert (refused.value.retry_after_s, server.num_refused) == (0.4, 2)
    assert 0.4 <= time.monotonic() - started_at < 2.0
    server = Server(room=0)
    outcomes = run(server, numbers(3), returns=True, room_timeout_s=0.25)
    assert [type(outcome) for outcome in outcomes] == [NoRoomError] * 3
    assert 3 <= server.num_refused <= 3 * 3, "0.1 s apart, whatever the server says"


def test_failure_ends_the_wait_for_room(run: Run) -> None:
    server = Server(room=1)
    server.retry_ms = 60_000
    server.failing = dict.fromkeys("01", Code.INVALID_ARGUMENT)  # whichever comes first
    started_at = time.monotonic()
    with pytest.raises(InvalidRequestError):
        run(server, numbers(2), room_timeout_s=1_000.0)
    assert time.monotonic() - started_at < SECONDS


# Seeds, and what else a prompt is asked for with


def test_seeds_are_those_that_are_documented_stay_in_range_and_apart() -> None:
    """`sha256(bytes(8))` begins with af5570f5a1810b7a."""
    first = int.from_bytes(bytes.fromhex("af5570f5a1810b7a"), "little")
    assert [seed_of(0, index) for index in range(3)] == [first, first + 1, first + 2]
    seeds = [seed_of(batch, index) for batch in (0, 1, 2, MAX_SEED) for index in range(1_000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert seed_of(3, MAX_SEED - seed_of(3, 0) + 1) == 0


def test_prompt_has_the_options_of_the_batch_but_for_seed_and_wait() -> None:
    jobs = [Batch([], {"wait_for_server_s": 5.0, "top_k": 3}, 1, False, 1.0).job("a") for _ in range(2)]
    assert [(job.options["wait_for_server_s"], job.options["top_k"]) for job in jobs] == [(None, 3)] * 2
    assert [job.options["seed"] for job in jobs] == [None, None], "the server draws one for each prompt"
    batch = Batch([], {"seed": np.int64(3)}, np.int64(2), False, 1.0)  # type: ignore[typeddict-item, arg-type]
    assert (batch.job("a").options["seed"], batch.concurrency) == (seed_of(3, 0), 2)
