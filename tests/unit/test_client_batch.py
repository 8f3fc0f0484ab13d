"""Batches of the Python clients, on threads and as tasks, against a server that says how many it serves at once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from client_fakes import Code, Failure, delta, finish_of

from draftwire.client import AsyncCompletionStream, Completion, CompletionStream, Options
from draftwire.client import batch as batch_module
from draftwire.client.batch import Batch, Job, seed_of
from draftwire.client.batch_tasks import BatchTasks
from draftwire.client.batch_threads import BatchThreads
from draftwire.client.patience import Patience
from draftwire.client.progress import Progress
from draftwire.client.request import make_request
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.keys import MAX_SEED
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
            if step is None:
                time.sleep(STEP_S)
            else:
                yield step

    async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        for step in self.steps():
            if step is None:
                await asyncio.sleep(STEP_S)
            else:
                yield step

    def cancel(self) -> None:
        self._is_cancelled = True
        self._server.num_cancelled += 1


def progress_of(job: Job) -> Progress:
    return Progress(make_request(job.prompt, job.options), Patience(1, 30.0, None))


async def nothing() -> None: ...


@pytest.fixture(params=["threads", "tasks"])
def run(request: pytest.FixtureRequest) -> Run:
    def on(
        server: Server,
        prompts: Iterable[Any],
        options: Options | None = None,
        concurrency: int = 4,
        returns: bool = False,
        room_timeout_s: float = SECONDS,
    ) -> list[Outcome]:
        batch = Batch(prompts, options or {}, concurrency, returns, room_timeout_s)
        if request.param == "threads":
            BatchThreads(batch, lambda job: CompletionStream(server.start, progress_of(job))).run(prompts)
        else:
            tasks = BatchTasks(batch, lambda job: AsyncCompletionStream(server.start, progress_of(job), nothing))
            asyncio.run(tasks.run(prompts))
        return batch.outcomes()

    return on


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def ids_of(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.token_ids for outcome in outcomes if isinstance(outcome, Completion)]


def test_completions_are_in_the_order_of_the_prompts_and_so_many_run_at_once(run: Run) -> None:
    server = Server()
    assert ids_of(run(server, numbers(30))) == [[number] for number in range(30)]
    assert server.most_running == 4
    assert len(server.requests) == 30


def test_no_prompts_are_no_completions(run: Run) -> None:
    assert run(Server(), []) == []


def test_prompts_are_taken_when_there_is_room_for_them(run: Run) -> None:
    server = Server()
    ahead: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(20):
            ahead.append(number - (len(server.requests) - server.num_running))
            yield str(number)

    assert len(run(server, prompts(), concurrency=3)) == 20
    assert max(ahead) <= 3


def test_prompts_are_taken_on_the_callers_thread(run: Run) -> None:
    threads: set[int] = set()

    def prompts() -> Iterator[str]:
        for number in range(5):
            threads.add(threading.get_ident())
            yield str(number)

    run(Server(), prompts(), concurrency=2)
    assert threads == {threading.get_ident()}


async def test_prompts_may_come_from_an_async_iterable() -> None:
    async def prompts() -> AsyncIterator[str]:
        for number in range(5):
            await asyncio.sleep(0)
            yield str(number)

    server = Server()
    batch = Batch(prompts(), {}, 2, False, SECONDS)
    await BatchTasks(batch, lambda job: AsyncCompletionStream(server.start, progress_of(job), nothing)).run(prompts())
    assert ids_of(batch.outcomes()) == [[number] for number in range(5)]


# Errors


def test_error_of_one_prompt_stands_in_its_place(run: Run) -> None:
    server = Server()
    server.failing = {"2": Code.INVALID_ARGUMENT, "5": Code.UNAVAILABLE}
    outcomes = run(server, numbers(8), returns=True)
    assert [type(outcome) for outcome in outcomes] == [
        UnavailableError if n == 5 else InvalidRequestError if n == 2 else Completion for n in range(8)
    ]
    assert ids_of(outcomes) == [[number] for number in range(8) if number not in (2, 5)]


@pytest.mark.parametrize("prompt", [["a", "b"], 5, None, {"role": "user"}, "\ud800"])
def test_what_is_no_single_prompt_is_the_error_of_its_place(run: Run, prompt: Any) -> None:
    outcomes = run(Server(), ["0", prompt, "2"], returns=True)
    assert isinstance(outcomes[1], InvalidRequestError)
    assert ids_of(outcomes) == [[0], [2]]


def test_first_error_is_raised_and_what_runs_is_cancelled(run: Run) -> None:
    server = Server()
    server.failing = {"2": Code.INVALID_ARGUMENT}
    server.hanging = {"0", "1", "3"}
    with pytest.raises(InvalidRequestError):
        run(server, numbers(1_000))
    assert server.num_cancelled >= 3
    assert server.num_running == 0
    assert len(server.requests) <= 5, "no further ones are begun"


async def test_failure_ends_the_wait_for_the_next_prompt() -> None:
    server = Server()
    server.failing = {"0": Code.INVALID_ARGUMENT}

    async def prompts() -> AsyncIterator[str]:
        yield "0"
        await asyncio.sleep(SECONDS)

    tasks = BatchTasks(
        Batch(prompts(), {}, 4, False, SECONDS),
        lambda job: AsyncCompletionStream(server.start, progress_of(job), nothing),
    )
    started_at = time.monotonic()
    with pytest.raises(InvalidRequestError) as raised:
        await tasks.run(prompts())
    assert time.monotonic() - started_at < SECONDS / 2
    assert isinstance(raised.value.__cause__, Failure)


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
    taken = 0

    def prompts() -> Iterator[Any]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield ["a", "b"]

    tasks = BatchTasks(
        Batch([], {}, 1_000, False, 1.0), lambda job: AsyncCompletionStream(Server().start, progress_of(job), nothing)
    )
    with pytest.raises(InvalidRequestError):
        await tasks.run(prompts())
    assert taken < 5


def test_failure_on_a_thread_cancels_what_runs_before_the_next_prompt_comes() -> None:
    server = Server()
    server.failing = {"1": Code.INVALID_ARGUMENT}
    server.hanging = {"0"}

    def prompts() -> Iterator[str]:
        yield "0"
        while server.num_running == 0:
            time.sleep(STEP_S)
        yield "1"
        deadline = time.monotonic() + SECONDS / 2
        while server.num_cancelled < 2:  # the one that failed is the first
            assert time.monotonic() < deadline, "nothing was cancelled"
            time.sleep(STEP_S)

    batch = Batch([], {}, 4, False, SECONDS)
    with pytest.raises(InvalidRequestError):
        BatchThreads(batch, lambda job: CompletionStream(server.start, progress_of(job))).run(prompts())


@pytest.mark.parametrize("kind", [BatchThreads, BatchTasks])
def test_first_of_several_failures_at_once_is_raised(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[DraftwireError] = []

    together = threading.Barrier(8)

    def fail_on_threads(_self: BatchThreads, job: Job) -> None:
        together.wait(SECONDS)
        fail(job)

    def fail(job: Job) -> None:
        error = InvalidRequestError(f"prompt {job.index}")
        failed.append(error)
        raise error

    async def fail_as_tasks(_self: BatchTasks, job: Job) -> None:
        await asyncio.sleep(0.05 - time.monotonic() % 0.05)
        fail(job)

    monkeypatch.setattr(kind, "_work", fail_on_threads if kind is BatchThreads else fail_as_tasks)
    for _ in range(20):
        failed.clear()
        work = kind(Batch([], {}, 8, False, 1.0), None)
        with pytest.raises(InvalidRequestError) as raised:
            asyncio.run(work.run(numbers(8)))
        assert raised.value is (work._failures if kind is BatchThreads else failed)[0]


def test_prompts_that_break_cancel_what_runs(run: Run) -> None:
    server = Server()
    server.hanging = {"0"}

    def prompts() -> Iterator[str]:
        yield "0"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(server, prompts(), returns=True)
    assert server.num_running == 0


def test_mistake_of_the_program_is_raised_even_where_errors_are_returned(run: Run) -> None:
    with pytest.raises(TypeError, match="temprature"):
        run(Server(), ["0"], {"temprature": 1.0}, returns=True)  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("prompts", ["abc", b"abc", {"role": "user", "content": "a"}])
def test_one_prompt_is_no_batch(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="several prompts"):
        Batch(prompts, {}, 1, False, 1.0)


@pytest.mark.parametrize(
    ("options", "concurrency", "named"),
    [
        ({"num_choices": 2}, 1, "several"),
        ({}, 0, "concurrency"),
        ({}, 2.5, "concurrency"),
        ({}, "a", "concurrency"),
        ({"seed": -1}, 1, "seed"),
        ({"seed": 2**64}, 1, "seed"),
        ({"seed": 1.5}, 1, "seed"),
        ({"seed": "a"}, 1, "seed"),
        ({"wait_for_server_s": "a"}, 1, "wait_for_server_s"),
    ],
)
def test_batch_that_makes_no_sense_is_refused(options: Any, concurrency: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        Batch([], options, concurrency, False, 1.0)


def test_time_to_wait_for_room_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="room_timeout_s"):
        Batch([], {}, 1, False, "a")  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    batch = Batch([], {"seed": np.int64(3)}, np.int64(2), False, 1.0)  # type: ignore[typeddict-item, arg-type]
    assert (batch.job("a").options["seed"], batch.concurrency) == (seed_of(3, 0), 2)


# Room


def test_full_server_is_asked_again_and_no_prompt_is_lost(run: Run) -> None:
    server = Server(room=2)
    assert ids_of(run(server, numbers(12), concurrency=6)) == [[number] for number in range(12)]
    assert server.most_running == 2
    assert server.num_refused > 0


def test_server_is_not_asked_before_it_says_so(run: Run) -> None:
    server = Server(room=0)
    server.retry_ms = 400
    started_at = time.monotonic()
    with pytest.raises(NoRoomError) as refused:
        run(server, ["0"], room_timeout_s=0.7)
    assert refused.value.retry_after_s == 0.4
    assert server.num_refused == 2
    assert 0.4 <= time.monotonic() - started_at < 2.0


def test_server_that_stays_full_is_the_error_of_each_prompt(run: Run) -> None:
    server = Server(room=0)
    outcomes = run(server, numbers(3), returns=True, room_timeout_s=0.25)
    assert [type(outcome) for outcome in outcomes] == [NoRoomError] * 3
    assert 3 <= server.num_refused <= 3 * 3, "0.1 s apart, whatever the server says"


def test_prompt_is_given_up_when_the_server_was_full_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(batch_module.time, "monotonic", lambda: now)
    job = Batch([], {}, 1, False, 5.0).job("a")
    assert job.pause_after(UnavailableError("lost")) is None
    now = 200.0  # the time that counts begins with the first refusal
    assert job.pause_after(NoRoomError("full", 0.0)) == 0.1
    assert job.pause_after(NoRoomError("full", 2.5)) == 2.5
    now = 203.0
    assert job.pause_after(NoRoomError("full", 2.0)) == 2.0
    assert job.pause_after(NoRoomError("full", 2.5)) is None


def test_failure_ends_the_wait_for_room(run: Run) -> None:
    server = Server()
    server.retry_ms = 60_000
    server.room = 1
    server.failing = dict.fromkeys("01", Code.INVALID_ARGUMENT)  # whichever comes first
    started_at = time.monotonic()
    with pytest.raises(InvalidRequestError):
        run(server, numbers(2), room_timeout_s=1_000.0)
    assert time.monotonic() - started_at < SECONDS


# Seeds


def test_seeds_follow_from_the_batchs_and_the_index(run: Run) -> None:
    outcomes = run(Server(), numbers(6), {"seed": 5})
    seeds = [outcome.seed for outcome in outcomes if isinstance(outcome, Completion)]
    assert seeds == [seed_of(5, index) for index in range(6)]
    assert seeds == [
        outcome.seed for outcome in run(Server(), numbers(6), {"seed": 5}) if isinstance(outcome, Completion)
    ]


def test_batches_without_a_seed_differ() -> None:
    first, second = (Batch([], {}, 1, False, 1.0).job("a").options["seed"] for _ in range(2))
    assert first != second


def test_seed_is_the_one_that_is_documented() -> None:
    """`sha256(bytes(8))` begins with af5570f5a1810b7a."""
    first = int.from_bytes(bytes.fromhex("af5570f5a1810b7a"), "little")
    assert [seed_of(0, index) for index in range(3)] == [first, first + 1, first + 2]


def test_seeds_stay_in_range_and_apart() -> None:
    seeds = [seed_of(batch, index) for batch in (0, 1, 2, MAX_SEED) for index in range(1_000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    wraps = MAX_SEED - seed_of(3, 0) + 1
    assert seed_of(3, wraps) == 0


def test_server_is_waited_for_before_the_batch_and_not_by_each_prompt() -> None:
    job = Batch([], {"wait_for_server_s": 5.0, "top_k": 3}, 1, False, 1.0).job("a")
    assert job.options["wait_for_server_s"] is None
    assert job.options["top_k"] == 3
