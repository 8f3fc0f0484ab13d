"""`draftwire bench`: what is asked for, and what is made of the times."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import completion

from draftwire.cli.bench_command import (
    PROMPTS,
    BenchPlan,
    _warnings,
    default_requests,
    percentile,
    read_prompts,
    speedup,
    summary,
)
from draftwire.client import Completion, Piece
from draftwire.client.measuring import Run, Timing, measure
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError


def plan(**changes: Any) -> BenchPlan:
    values: dict[str, Any] = {
        "prompts": list(PROMPTS),
        "options": {"num_speculative_tokens": None, "seed": None, "max_tokens": 9},
        "num_requests": 10,
        "concurrency": 3,
        "num_runs": 2,
        "beside_plain": True,
    }
    return BenchPlan(**{**values, **changes})


def run(*seconds: tuple[float, float], duration_s: float = 2.0) -> Run:
    """Returns completions of six tokens, each by its time to the first token and its whole time."""
    return Run([Timing(completion(), first, whole) for first, whole in seconds], duration_s)


# What is asked for


def test_columns_differ_in_speculation_alone() -> None:
    columns = plan().variants
    assert list(columns) == ["speculation", "plain"]
    assert columns["plain"] == {**columns["speculation"], "num_speculative_tokens": 0}
    assert list(plan(beside_plain=False).variants) == ["speculation"]
    assert list(plan(options={"num_speculative_tokens": 0}).variants) == ["plain"]


def test_no_request_shares_its_cached_prefix_and_prompts_are_used_again() -> None:
    one = plan()
    jobs = [job for run in range(2) for options in one.variants.values() for job in one.jobs(run, options, 10)]
    assert len({options["cache_salt"] for _, options in jobs}) == len(jobs) == 40
    assert [prompt for prompt, _ in jobs[:10]] == [*PROMPTS, *PROMPTS[:2]]
    assert {options["seed"] for _, options in jobs} == {None}


def test_a_run_is_more_than_one_wave_by_default() -> None:
    assert [default_requests(concurrency) for concurrency in (1, 4, 5, 16, 64)] == [16, 16, 20, 64, 256]


def test_seeds_are_those_of_the_run_and_all_different() -> None:
    one = plan(options={"num_speculative_tokens": None, "seed": 2**64 - 3})
    fast, plain = ([o["seed"] for _, o in one.jobs(0, options, 10)] for options in one.variants.values())
    later = [options["seed"] for _, options in one.jobs(1, one.options, 10)]
    assert fast == plain
    assert len({*fast, *later}) == 20
    with pytest.raises(InvalidRequestError, match="seed"):
        one.jobs(0, {**one.options, "seed": -1}, 1)


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffdef f(x):\r\n\n  \nïm\rport\n".encode())
    (tmp_path / "b.jsonl").write_text('"a\\nb\u2028"\n[1, 2]\n[{"role": "user", "content": "x"}]\n')
    assert list(read_prompts(tmp_path / "a.txt")) == ["def f(x):", "ïm\rport"]
    assert list(read_prompts(tmp_path / "b.jsonl")) == ["a\nb\u2028", [1, 2], [{"role": "user", "content": "x"}]]


UNREADABLE = [
    ("a.txt", b"\n \n", "no prompt"),
    ("a.jsonl", b'"a"\nb\n', "line 2: this is no JSON"),
    ("a.jsonl", b"[" * 100_000, "line 1: this is no JSON"),
    ("a.jsonl", b'\n["a", "b"]', "line 2: a line holds one prompt"),
    ("a.jsonl", b"5", "line 1: a prompt is text, token ids or chat messages"),
    ("a.jsonl", b"[-1]", "line 1: prompt: a number is out of range"),
    ("a.txt", b"\xff", "cannot be read"),
]


def test_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for name, content, message in UNREADABLE:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidRequestError, match=message):
            list(read_prompts(tmp_path / name))


# What is made of it


def test_percentile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (1, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([], 50) is None


def test_numbers_of_a_column() -> None:
    column = summary([run((0.1, 0.6), (0.3, 1.3)), run((0.2, 0.7), duration_s=1.0), run((0.2, 0.7), duration_s=3.0)])
    expected = {
        "tokens": 24,
        "tokens_per_second_of_runs": [6.0, 6.0, 2.0],
        "tokens_per_second": 6.0,
        "completions_per_second": 1.0,
        "block_efficiency": 2.0,
        "acceptance_rate": 0.75,
        "time_to_first_token_ms": pytest.approx({"p50": 200.0, "p90": 300.0, "p99": 300.0}),
        "time_per_token_ms": pytest.approx({"p50": 100.0, "p90": 200.0, "p99": 200.0}),
        "completion_ms": pytest.approx({"p50": 700.0, "p90": 1300.0, "p99": 1300.0}),
    }
    assert {name: column[name] for name in expected} == expected
    plain = Run([Timing(completion(num_draft_tokens=0, num_accepted_tokens=0), 0.1, 0.2)], 1.0)
    assert summary([plain])["acceptance_rate"] is None, "without drafts there is none"
    trees = completion(num_draft_tokens=24, num_draft_positions=4, num_accepted_tokens=3)
    assert summary([Run([Timing(trees, 0.1, 0.2)], 1.0)])["acceptance_rate"] == 0.75, "of a path, not of all nodes"


def test_what_must_be_known_of_the_numbers_is_counted() -> None:
    strange = completion(is_lossy=True, drafter_error="gone")
    column = summary([Run([Timing(completion(), 0.1, 0.2), Timing(strange, 0.1, 0.2)], 1.0)])
    assert (column["is_lossy"], column["without_drafter"], column["resumed"]) == (True, 1, 0)
    assert len(list(_warnings(column))) == 2
    assert not list(_warnings(summary([run((0.1, 0.2))])))


def test_speedup_compares_runs_that_lay_side_by_side() -> None:
    fast = [run((0.1, 0.2), duration_s=seconds) for seconds in (1.0, 2.0, 1.0)]
    slow = [run((0.1, 0.2), duration_s=seconds) for seconds in (2.0, 6.0, 8.0)]
    assert speedup(fast, slow) == {"median": 3.0, "least": 2.0, "most": 8.0}


# Measuring


class FakeAsyncClient:
    """Remembers the order of prompts. Streams take 30 ms, and it counts how many do at once."""

    def __init__(self, failing: str = "") -> None:
        self.running = self.most = 0
        self.asked: list[str] = []
        self._failing = failing

    @asynccontextmanager
    async def stream(self, prompt: str, **_options: Any) -> AsyncIterator["FakeStream"]:
        self.asked.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield FakeStream(prompt == self._failing)
        finally:
            self.running -= 1


@dataclass
class FakeStream:
    fails: bool
    completion: Completion = field(default_factory=completion)

    async def __aiter__(self) -> Any:
        await asyncio.sleep(0.01)
        if self.fails:
            raise NoRoomError("full")
        yield Piece([], "echo")
        await asyncio.sleep(0.01)
        yield Piece([1], "a")
        await asyncio.sleep(0.01)


def jobs(count: int) -> list[Any]:
    return [(str(number), {}) for number in range(count)]


async def test_concurrency_is_bounded_and_each_run_is_timed_from_its_own_start() -> None:
    client: Any = FakeAsyncClient()
    ended: list[None] = []
    result = await measure(client, jobs(7), 3, lambda: ended.append(None))
    assert (client.most, client.running, len(ended), len(result.timings)) == (3, 0, 7, 7)
    assert client.asked == [str(number) for number in range(7)]
    for timing in result.timings:
        assert 0.019 < timing.first_token_s < timing.duration_s
        assert timing.duration_s >= timing.first_token_s + 0.009
    assert result.duration_s >= 0.085
    assert result.num_tokens == 42


async def test_job_for_several_completions_is_refused() -> None:
    client: Any = FakeAsyncClient()
    several: list[Any] = [(["a", "b"], {}), ("a", {"num_choices": 2})]
    for job in several:
        with pytest.raises(InvalidRequestError, match="generate_many"):
            await measure(client, [("a", {}), job], 2)
    assert client.asked == []


async def test_failure_ends_all() -> None:
    client: Any = FakeAsyncClient(failing="2")
    with pytest.raises(DraftwireError, match="full"):
        await measure(client, jobs(50), 4)
    assert client.running == 0
    assert len(client.asked) < 20
