"""Deadlines and slow readers: whoever has gone frees what it held, and whoever is slow holds up nobody else."""

import time
from collections.abc import Iterator

import pytest
from observing import read_metric, wait_until

from draftwire.client import Client, CompletionStream
from draftwire.errors import UnavailableError
from draftwire.models.script import expected_tokens
from tests.in_process import InProcessStack

PROMPT = [1, 2, 3, 4, 5]
SCRIPT = "scripted:acceptance=1,verify_ms=10,draft_ms=1"
FREE_SECONDS = 2.0
"""For a busy machine: a step takes 10 ms."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[InProcessStack]:
    with InProcessStack({"verifier": {"model": SCRIPT}, "drafter": {"model": SCRIPT}, "gateway": {}}) as stack:
        with Client(stack.address) as client:
            while not client.generate(PROMPT, max_tokens=30, temperature=0.0).statistics.num_drafts:
                pass
        yield stack


def read(stream: CompletionStream, token_ids: list[int]) -> None:
    for piece in stream:
        token_ids += piece.token_ids


def wait_until_free(stack: InProcessStack) -> None:
    held = [(service, name) for service in ("verifier", "drafter") for name in ("num_sessions", "kv_cache_usage_perc")]
    wait_until(lambda: not any(read_metric(stack, *what) for what in held), "all is free", FREE_SECONDS)


def test_deadline_ends_the_work_on_both_sides(scripted: InProcessStack) -> None:
    with Client(scripted.address) as client:
        for num_speculative_tokens in (0, 4):
            how = {"max_tokens": 20_000, "num_speculative_tokens": num_speculative_tokens}
            stream = client.stream(PROMPT, temperature=0.0, timeout_s=0.7, **how)
            token_ids: list[int] = []
            with pytest.raises(UnavailableError, match="Deadline"):
                read(stream, token_ids)
            assert 0 < len(token_ids) < 20_000
            assert token_ids == expected_tokens(len(PROMPT), len(token_ids))
            wait_until_free(scripted)


@pytest.mark.slow
def test_whoever_does_not_read_holds_up_nobody_and_misses_nothing(scripted: InProcessStack) -> None:
    def seconds() -> float:
        started = time.monotonic()
        done = client.generate(PROMPT, max_tokens=200, temperature=0.0)
        assert done.token_ids == expected_tokens(len(PROMPT), 200)
        return time.monotonic() - started

    with Client(scripted.address) as client, Client(scripted.address) as sleeper:
        alone = min(seconds() for _ in range(3))
        streams = [sleeper.stream(PROMPT, max_tokens=2_000, temperature=0.0) for _ in range(4)]
        beside = min(seconds() for _ in range(3))
        assert beside < 5.0 * alone + 1.0  # the four run, unread; a step takes all of them along
        for stream in streams:
            token_ids: list[int] = []
            read(stream, token_ids)
            assert token_ids == expected_tokens(len(PROMPT), 2_000)
        wait_until_free(scripted)
