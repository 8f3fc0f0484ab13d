"""Heads and processes: a verifier of two, whose features rank 0 alone has, and drafters with a head that are killed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from observing import read_metric

from benchmarks.relay import free_port
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from tests.breakable_group import COMMON, PROMPT
from tests.tiny_heads import EAGLE3, save_tiny_head

REMOTE = "fed"
"""Name of the drafters, and of the folder of their head, which is the verifier's own."""
GREEDY: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "num_speculative_tokens": 3}
SLOW = Path(__file__).parents[1] / "injected" / "slow_steps"


def greedy_texts(address: str, **request: Any) -> list[list[int]]:
    """Returns greedy texts, most of whose rounds the head has drafted."""
    with Client(address) as client:
        done = [client.generate([*PROMPT, first], **GREEDY, **request) for first in range(3)]
    assert sum(one.statistics.num_draft_tokens for one in done) > 30
    assert sum(one.statistics.num_accepted_tokens for one in done) > 0
    return [one.token_ids for one in done]


@pytest.fixture(scope="module")
def head(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_head(tmp_path_factory.mktemp("head") / REMOTE, pair[0])


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path], head: Path) -> list[list[int]]:
    """Texts of a verifier of one process."""
    return local_texts({"model": pair[0], "draft_head": head})


def local_texts(verifier: dict[str, object]) -> list[list[int]]:
    """Returns greedy texts of a verifier that drafts with its head."""
    gateway: dict[str, object] = {"drafter": "none", "speculation": "fixed"}
    with LocalStack({"verifier": {**COMMON, **verifier}, "gateway": gateway}) as stack:
        return greedy_texts(stack.address)


@dataclass
class Rig:
    """A verifier of two processes, two drafters with its head, and a gateway, all of them processes."""

    verifier: LocalStack
    drafters: list[LocalStack]
    gateway: LocalStack


@pytest.fixture(scope="module")
def rig(pair: tuple[Path, Path], head: Path) -> Iterator[Rig]:
    ports = [free_port() for _ in range(3)]
    ranks = {**COMMON, "model": pair[0], "draft_head": head, "tensor_parallel_size": 2}
    fed = {"threads": 1, "kv_cache_tokens": 4096, "model": pair[0], "head": head, "strategy": EAGLE3}
    stacks = [
        LocalStack({"verifier": {**ranks, "port": ports[0]}}),
        *(LocalStack({"drafter": {**fed, "feature_window": 8, "port": port}}) for port in ports[1:]),
    ]
    peers: dict[str, object] = {
        "verifier": f"127.0.0.1:{ports[0]}",
        "drafter": ",".join(f"127.0.0.1:{port}" for port in ports[1:]),
    }
    slow = patch.dict(os.environ, {"PYTHONPATH": f"{SLOW}:{os.environ.get('PYTHONPATH', '')}"})
    with slow, ExitStack() as running, ThreadPoolExecutor() as pool:
        for stack in stacks:
            running.callback(stack.stop)
        list(pool.map(LocalStack.start, stacks))
        gateway = running.enter_context(LocalStack({"gateway": {**peers, "speculation": "fixed"}}))
        yield Rig(stacks[0], stacks[1:], gateway)


def test_texts_are_those_of_one_process_with_the_head_of_rank_0(rig: Rig, alone: list[list[int]]) -> None:
    assert greedy_texts(rig.gateway.address, drafter=EAGLE3) == alone
    assert read_metric(rig.verifier, "verifier", "local_accepted_tokens", f'strategy="{EAGLE3}"') > 0


def test_texts_are_those_of_one_process_on_transformers_modules(
    pair: tuple[Path, Path], head: Path, alone: list[list[int]]
) -> None:
    assert local_texts({"model": pair[0], "draft_head": head, "decoder": "transformers"}) == alone


def test_head_elsewhere_drafts_from_the_features_of_rank_0(rig: Rig, alone: list[list[int]]) -> None:
    assert greedy_texts(rig.gateway.address, drafter=REMOTE) == alone
    assert read_metric(rig.verifier, "verifier", "feature_bytes") > 0


def test_drafter_after_a_killed_one_needs_no_pass_over_the_prompt(rig: Rig) -> None:
    """The features come out of the target's cache again. Leaves one drafter, so that it is the last test of the rig."""
    prompt = [2, *PROMPT, 2]
    drafters = [stack.services["drafter"] for stack in rig.drafters]
    before = read_metric(rig.verifier, "verifier", "prefix_cache_queries")
    sent = [read_metric(stack, "drafter", "blocks_sent") for stack in rig.drafters]
    killed: list[int] = []
    with Client(rig.gateway.address) as client:
        stream = client.stream(prompt, max_tokens=40, ignore_eos=True, drafter=REMOTE, num_speculative_tokens=3)
        for _ in stream:
            for index, stack in enumerate(rig.drafters if not killed else ()):
                if not killed and read_metric(stack, "drafter", "blocks_sent") >= sent[index] + 2:
                    os.kill(drafters[index].process.pid, signal.SIGKILL)
                    killed.append(index)
    assert killed, "blocks of a drafter came before the text ended"
    left = 1 - killed[0]
    assert read_metric(rig.drafters[left], "drafter", "blocks_sent") > sent[left], "the other one has gone on"
    done = stream.completion.statistics
    assert (done.num_drafters_lost, done.num_verifiers_lost) == (1, 0)
    assert len(stream.completion.token_ids) == 40
    queried = read_metric(rig.verifier, "verifier", "prefix_cache_queries") - before
    assert queried == len(prompt), "its prompt was read once"
