"""Drafters that lie, against the real services: nobody else notices, and they are found out."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from observing import read_metric, wait_until

from benchmarks.law import stack_options
from draftwire.client import Client
from tests.dishonest_drafter import CORRUPTED_TEMPERATURE
from tests.in_process import InProcessStack

PROMPT = [0, 2, 1, 1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def stack_with(
    pair: tuple[Path, Path], way: str, logs: list, *, metrics_port: int = 0, address: str = "127.0.0.1:{port}"
) -> Iterator[InProcessStack]:
    """Runs an honest verifier and gateway with a drafter that is not, which the gateway finds at an address."""
    port = free_port()
    arguments = [f"--model={pair[1]}", f"--port={port}", f"--metrics-port={metrics_port}", "--log-format=json"]
    drafter = subprocess.Popen(
        [sys.executable, "-m", "tests.dishonest_drafter", way, *arguments],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    options = stack_options(*pair)
    options["gateway"]["drafter"] = address.format(port=port)
    del options["drafter"]
    try:
        with InProcessStack(options, on_log=lambda name, line: logs.append((name, line))) as running:
            yield running
    finally:
        drafter.terminate()
        drafter.wait(30)


@pytest.mark.parametrize("way", ["argmax", pytest.param("too_cold", marks=pytest.mark.slow)])
def test_drafter_that_draws_otherwise_than_it_says_is_quarantined_without_a_gap(
    pair: tuple[Path, Path], way: str
) -> None:
    logs: list = []
    with stack_with(pair, way, logs) as stack, Client(stack.address) as client, ThreadPoolExecutor(8) as pool:

        def generate(seed: int):
            return client.generate(PROMPT, max_tokens=50, seed=seed, num_speculative_tokens=4)

        for rounds in range(40):  # of some 300 draft tokens
            completions = list(pool.map(generate, range(8 * rounds, 8 * rounds + 8)))
            assert all(len(completion.token_ids) == 50 for completion in completions)
            if read_metric(stack, "verifier", "drafter_quarantined"):
                break
        assert read_metric(stack, "verifier", "drafter_quarantined") == 1.0
        later = generate(1)
        assert len(later.token_ids) == 50
        assert later.statistics.num_drafts == 0
        coupled = client.generate(PROMPT, max_tokens=50, rejection_sample_method="coupled")
        assert len(coupled.token_ids) == 50
    events = [line for name, line in logs if line["event"] == "verifier.drafter_quarantined"]
    assert len(events) == 1
    assert "does not draw from the distributions that it sends" in events[0]["reason"]


def test_corrupt_block_ends_speculation_of_its_session_alone(pair: tuple[Path, Path]) -> None:
    logs: list = []
    with stack_with(pair, "corrupt", logs) as stack, Client(stack.address) as client, ThreadPoolExecutor(8) as pool:

        def generate(seed: int):
            temperature = CORRUPTED_TEMPERATURE if seed % 2 else 1.0
            return client.generate(PROMPT, max_tokens=50, seed=seed, temperature=temperature)

        completions = list(pool.map(generate, range(16)))
        assert all(len(completion.token_ids) == 50 for completion in completions)
        for completion in completions[1::2]:
            assert "draft weights do not sum to 65536" in completion.drafter_error
            assert completion.statistics.num_drafts == 0
        for completion in completions[::2]:
            assert completion.drafter_error == ""
            assert completion.statistics.num_drafts > 5
        assert read_metric(stack, "verifier", "blocks_refused", 'violation="weights"') == 8.0


def test_drafter_with_a_forged_permit_gets_no_block_in_and_costs_its_sessions_nothing_but_speed(
    pair: tuple[Path, Path],
) -> None:
    with stack_with(pair, "forge", []) as stack, Client(stack.address) as client:

        def is_refused() -> bool:
            completion = client.generate(PROMPT, max_tokens=50, seed=1)
            assert len(completion.token_ids) == 50
            assert completion.statistics.num_drafts == 0
            return read_metric(stack, "verifier", "blocks_refused", 'violation="peer"') >= 1.0

        wait_until(is_refused, "a completion lasts until the drafter's first block has come")


def test_honest_drafter_is_not_suspected_and_its_bytes_are_counted(client: Client, stack: InProcessStack) -> None:
    before = read_metric(stack, "verifier", "spec_decode_num_draft_bytes")
    statistics = client.generate(PROMPT, max_tokens=50, seed=3).statistics
    sent = read_metric(stack, "verifier", "spec_decode_num_draft_bytes") - before
    assert 10 < sent / statistics.num_draft_tokens < 100  # 3 tokens: 9 bytes a distribution, and what goes around it
    assert read_metric(stack, "verifier", "draft_bytes_per_emitted_token") > 0.0
    assert read_metric(stack, "verifier", "audit_evidence") < 0.0
    assert read_metric(stack, "verifier", "audit_draft_tokens") > 0.0
    assert read_metric(stack, "verifier", "drafter_quarantined") == 0.0
