"""A verifier of two processes: what comes out of it, and that no process of it outlives another, whatever breaks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from observing import is_alive, read_metric

from benchmarks.law import COMPARED, compare, draw_completions, exact_law
from benchmarks.relay import free_port
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from draftwire.errors import UnavailableError
from draftwire.requests.parameters import SamplingParams
from tests.breakable_group import (
    COMMON,
    END_SECONDS,
    LENGTH,
    PROMPT,
    TIMEOUT_S,
    BreakingGroup,
    Group,
    end_with_status_0,
    fail_outside_the_group,
    greedy_text,
    rank_faults,
)

ALPHA = 1e-6
"""Probability of a false alarm of the test of the law."""


faults = pytest.fixture(scope="module")(rank_faults)
expected = pytest.fixture(scope="module")(greedy_text)


@pytest.fixture(scope="module")
def group(pair: tuple[Path, Path], faults: Path) -> Iterator[Group]:
    options = {"model": pair[0], "tensor_parallel_size": 2, "tensor_parallel_timeout_s": TIMEOUT_S}
    group = Group("verifier", options)
    group.start()
    yield group
    group.stack.stop()


@pytest.fixture(scope="module")
def plain_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def gateway(group: Group, plain_port: int, pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """A gateway with a drafter, the group, and a plain verifier that is not there yet."""
    options: dict[str, dict[str, object]] = {
        "drafter": {**COMMON, "model": pair[1]},
        "gateway": {"verifier": f"{group.address},127.0.0.1:{plain_port}"},
    }
    options["gateway"]["failover_timeout_s"] = 30.0
    with contextlib.ExitStack() as stack:
        drafter = stack.enter_context(LocalStack({"drafter": options["drafter"]}))
        options["gateway"]["drafter"] = f"127.0.0.1:{drafter.services['drafter'].port}"
        yield stack.enter_context(LocalStack({"gateway": options["gateway"]}))


@pytest.fixture(scope="module")
def plain(gateway: LocalStack, plain_port: int, pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """The plain verifier of the same weights."""
    with LocalStack({"verifier": {**COMMON, "model": pair[0], "port": plain_port}}) as running:
        yield running


# What comes out


def test_greedy_output_of_two_processes_is_what_transformers_computes(gateway: LocalStack, expected: list[int]) -> None:
    with Client(gateway.address) as client:
        for num_speculative_tokens in (0, 1, 4, 8):
            done = client.generate(
                PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=num_speculative_tokens
            )
            assert done.token_ids == expected


def test_sampled_outputs_of_two_processes_follow_the_law_of_the_target(
    gateway: LocalStack, pair: tuple[Path, Path]
) -> None:
    """Beside requests of all other kinds, which share steps and cached prefixes. False alarm: 1e-6, by chi-square."""
    completions = list(draw_completions(gateway.address, "block", SamplingParams(), range(300), 8))
    law = exact_law(pair[0], SamplingParams())
    results = [compare("block", completions, law, 8, judged) for judged in COMPARED]
    assert results[0].share_of_rounds_with_draft > 0.1, "the drafter took part"
    assert min(result.p_value for result in results) > ALPHA / len(COMPARED), results


def test_start_is_told_in_the_log_and_as_a_metric(group: Group) -> None:
    (started,) = group.of("server_started")
    assert 0 < started["startup_ms"] < 100_000
    assert abs(read_metric(group.stack, "verifier", "startup_seconds") * 1e3 - started["startup_ms"]) < 1.0
    told = group.of("weights_read")[-1]
    assert told["share"] == 1.0
    assert told["read_bytes"] == told["total_bytes"] > 0


def test_idle_group_outlives_the_timeout(group: Group, gateway: LocalStack, expected: list[int]) -> None:
    time.sleep(TIMEOUT_S + 1.0)
    with Client(gateway.address) as client:
        assert client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH).token_ids == expected
    assert group.of("group_lost") == []


def test_step_that_fails_outside_the_group_ends_its_sessions_only(
    group: Group, gateway: LocalStack, faults: Path, expected: list[int]
) -> None:
    with Client(gateway.address) as client:
        done = fail_outside_the_group(
            group, faults, lambda: client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH)
        )
    assert done.token_ids == expected


@pytest.mark.usefixtures("plain")
class TestBreakingVerifier(BreakingGroup):
    """Its sessions move to the plain verifier."""


# How it is started and stopped


def test_sigterm_lets_requests_finish_and_all_processes_exit_with_0(group: Group, gateway: LocalStack) -> None:
    group.ensure()
    with Client(gateway.address) as client:
        pieces = iter(client.stream(PROMPT, max_tokens=LENGTH, num_speculative_tokens=1))
        count = len(next(pieces).token_ids)
        group.rank_0.send_signal(signal.SIGTERM)
        count += sum(len(piece.token_ids) for piece in pieces)
    assert count == LENGTH
    end_with_status_0(group)


def test_model_that_cannot_be_split_is_refused_with_the_sizes_that_can(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[0], tmp_path / "one_head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 1}))
    options = {"verifier": {**COMMON, "model": folder, "tensor_parallel_size": 2}}
    with pytest.raises(UnavailableError, match="cannot be spread over 2 processes; over 1 it can"):
        LocalStack(options).__enter__()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return line
    raise AssertionError(f"{text} was not said: {said}")


def test_torchrun_starts_all_ranks_and_none_of_them_outlives_another(pair: tuple[Path, Path]) -> None:
    options = {"model": pair[0], "port": 0, "log-format": "json", "threads": 1, "kv-cache-tokens": 4096}
    options |= {"tensor-parallel-size": 2, "tensor-parallel-timeout-s": TIMEOUT_S}
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"),
            *("-m", "draftwire.cli", "serve", "verifier", *(f"--{name}={value}" for name, value in options.items())),
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        read_until(launcher, "verifier.server_started")
        rank_0, rank_1 = children_of(launcher.pid)
        os.kill(rank_1, signal.SIGKILL)
        assert launcher.wait(TIMEOUT_S + END_SECONDS) != 0
        assert not is_alive(rank_0)
    finally:
        launcher.kill()


def test_launcher_of_another_size_is_refused(pair: tuple[Path, Path]) -> None:
    environment: dict[str, Any] = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "draftwire.cli", "serve", "verifier", f"--model={pair[0]}", "--tensor-parallel-size=2"],
        env={**os.environ, **environment, "MASTER_PORT": "29500"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "torchrun started 3 processes (WORLD_SIZE), but tensor_parallel_size is 2" in done.stderr
