"""A drafter of two processes: its loss costs speed only, and no process of it outlives another, whatever breaks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from observing import read_metric

from benchmarks.law import VOCAB_SIZE
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client, Completion
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
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with layers enough to run some of them together."""
    return save_tiny_model(tmp_path_factory.mktemp("drafter"), VOCAB_SIZE, seed=9, num_layers=6)


faults = pytest.fixture(scope="module")(rank_faults)
expected = pytest.fixture(scope="module")(greedy_text)


@pytest.fixture(scope="module")
def group(model: Path, faults: Path) -> Iterator[Group]:
    options = {"model": model, "layer_parallel_size": 4, "layer_parallel_ranks": 2}
    group = Group("drafter", {**options, "layer_parallel_timeout_s": TIMEOUT_S})
    group.start()
    yield group
    group.stack.stop()


@pytest.fixture(scope="module")
def gateway(group: Group, pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """A gateway with a verifier and the group."""
    options = {"verifier": {**COMMON, "model": pair[0]}, "gateway": {"block_timeout_s": 1.0, "local_drafts": "none"}}
    with LocalStack({"verifier": options["verifier"]}) as verifier:
        address = f"127.0.0.1:{verifier.services['verifier'].port}"
        with LocalStack({"gateway": {**options["gateway"], "verifier": address, "drafter": group.address}}) as running:
            yield running


def complete(gateway: LocalStack, num_speculative_tokens: int = 4) -> Completion:
    with Client(gateway.address) as client:
        return client.generate(
            PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=num_speculative_tokens
        )


def complete_with_drafts(gateway: LocalStack) -> Completion:
    """Returns a completion that the drafter took part in, which it does again a while after it was lost."""
    deadline = time.monotonic() + 20.0
    while not (done := complete(gateway)).statistics.num_drafts:
        assert time.monotonic() < deadline, "the drafter takes no part"
    return done


# What comes out


def test_blocks_of_two_processes_are_judged_and_the_text_is_the_targets(
    gateway: LocalStack, expected: list[int]
) -> None:
    assert complete_with_drafts(gateway).token_ids == expected
    for num_speculative_tokens in (1, 8):
        assert complete(gateway, num_speculative_tokens).token_ids == expected


def test_idle_group_outlives_the_timeout(group: Group, gateway: LocalStack, expected: list[int]) -> None:
    time.sleep(TIMEOUT_S + 1.0)
    assert complete_with_drafts(gateway).token_ids == expected
    assert group.of("group_lost") == []


def test_step_that_fails_outside_the_group_ends_its_sessions_only(
    group: Group, gateway: LocalStack, faults: Path, expected: list[int]
) -> None:
    assert fail_outside_the_group(group, faults, lambda: complete(gateway)).token_ids == expected


class TestBreakingDrafter(BreakingGroup):
    """Its sessions go on without it."""


def test_group_that_was_lost_takes_part_again_when_it_is_back(
    group: Group, gateway: LocalStack, expected: list[int]
) -> None:
    group.ensure()
    os.kill(group.follower, signal.SIGKILL)
    group.wait_for_end(END_SECONDS)
    alone = complete(gateway)
    assert alone.token_ids == expected
    assert alone.statistics.num_drafts == 0
    group.ensure()
    assert complete_with_drafts(gateway).token_ids == expected


# How it is started and stopped


def test_sigterm_drains_and_all_processes_end_with_status_0(
    group: Group, gateway: LocalStack, faults: Path, expected: list[int]
) -> None:
    group.ensure()
    complete_with_drafts(gateway)
    slow = faults / "verifier_slow"
    slow.touch()  # so that the signal comes while the stream runs
    try:
        with Client(gateway.address) as client:
            pieces = iter(client.stream(PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=1))
            token_ids = list(next(pieces).token_ids)
            assert read_metric(group.stack, "drafter", "num_sessions") > 0
            group.rank_0.send_signal(signal.SIGTERM)
            token_ids += [token for piece in pieces for token in piece.token_ids]
    finally:
        slow.unlink()
    assert token_ids == expected
    end_with_status_0(group)


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({}, {}, "layer_parallel_ranks share what runs together: set layer_parallel_size or layer_groups"),
        ({"layer-parallel-size": 4, "decoder": "transformers"}, {}, "need decoder lean, or auto, not transformers"),
        ({"layer-parallel-size": 4, "device": "cuda:1"}, {}, "with layer_parallel_ranks, cuda gives each process"),
        ({"layer-parallel-size": 4, "model": "scripted:"}, {}, "a scripted model"),  # whichever rank says it first
        ({"layer-groups": "0 1-3 4"}, {}, "0 1-3 4"),  # of a model with six layers
        (
            {"layer-parallel-size": 4},
            {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "torchrun started 3 processes (WORLD_SIZE), but layer_parallel_ranks is 2",
        ),
    ],
)
def test_what_two_processes_cannot_share_is_refused_before_they_serve(
    model: Path, options: dict[str, object], environment: dict[str, str], message: str
) -> None:
    settings = {
        "model": model,
        "port": 0,
        "metrics-port": 0,
        "log-format": "json",
        "layer-parallel-ranks": 2,
        **options,
    }
    options = [f"--{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "draftwire.cli", "serve", "drafter", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert message in done.stderr
