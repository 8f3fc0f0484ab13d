"""Three services, the verifier's on vLLM: the law of the output, kill -9, and the command's refusals.

Gateway and drafter run in the project's environment, as this test does; verifiers by the Python that TEST_VLLM_PYTHON
names, where vLLM is installed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from observing import read_metric, wait_until
from tiny_models import save_tiny_model

from benchmarks.law import CONTEXT_LENGTH, LOSSLESS, VOCAB_SIZE, compare, draw_completions, exact_law, stack_options
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from draftwire.requests.parameters import SamplingParams

PYTHON = os.environ["TEST_VLLM_PYTHON"]
ARGUMENTS = json.dumps({"enforce_eager": True})
SAMPLES = 800
CONCURRENCY = 4
"""More requests at once leave the one drafter no time, and most rounds none of its blocks."""
ALPHA = 1e-3
"""Probability of a false alarm of each rule's test."""


class VllmStack(LocalStack):
    """A stack whose verifier runs where vLLM is installed."""

    def interpreter(self, name: str) -> str:
        return PYTHON if name == "verifier" else sys.executable


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As the pair of the laws, with heads that vLLM can attend with."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny_model(folder / "target", VOCAB_SIZE, seed=6, context_length=CONTEXT_LENGTH, head_dim=32)
    return target, save_tiny_model(folder / "drafter", VOCAB_SIZE, seed=9, context_length=CONTEXT_LENGTH)


def verifier_options(target: Path) -> dict[str, object]:
    return {
        "model": target,
        "metrics_port": 0,
        "dtype": "float32",
        "engine": "vllm",
        "vllm_args": ARGUMENTS,
        "kv_cache_tokens": 16_384,
    }


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    options = stack_options(*pair)
    options["verifier"] = verifier_options(pair[0])
    with VllmStack(options) as running:
        yield running


@pytest.mark.parametrize("rule", LOSSLESS)
def test_outputs_follow_the_law_of_the_target(stack: LocalStack, pair: tuple[Path, Path], rule: str) -> None:
    """Beside requests of all other kinds, which share steps and cached prefixes."""
    law = exact_law(pair[0], SamplingParams())
    completions = list(draw_completions(stack.address, rule, SamplingParams(), range(SAMPLES), CONCURRENCY))
    result = compare(rule, completions, law, CONCURRENCY)
    print(result)
    assert result.share_of_rounds_with_draft > 0.3, "the drafter took part"
    assert result.acceptance_rate > 0.1
    assert all(not completion.drafter_error for completion in completions)
    assert result.p_value > ALPHA, result


def test_killed_verifier_loses_no_text(pair: tuple[Path, Path]) -> None:
    """Two verifiers on vLLM; one gets SIGKILL while all requests run. Greedy texts and coupled ones stay the same."""
    with ExitStack() as exits:
        verifiers = [LocalStackOf(verifier_options(pair[0])) for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: exits.enter_context(one), verifiers))
        addresses = ",".join(f"127.0.0.1:{one.services['verifier'].port}" for one in verifiers)
        drafter = exits.enter_context(LocalStack({"drafter": {"model": pair[1], "threads": 1}}))
        behind = {"verifier": addresses, "drafter": f"127.0.0.1:{drafter.services['drafter'].port}"}
        gateway = exits.enter_context(LocalStack({"gateway": {**behind, "speculation": "fixed"}}))
        with Client(gateway.address) as client:
            before = texts(client, lambda: None)
            moved: list[int] = []

            def kill() -> None:
                wait_until(lambda: read_metric(verifiers[0], "verifier", "num_sessions") > 0, "it has some of them")
                verifiers[0].services["verifier"].process.send_signal(signal.SIGKILL)

            after = texts(client, kill, moved)
    assert after == before
    assert sum(moved), "some were moved in the middle of their text"


class LocalStackOf(VllmStack):
    """One verifier alone."""

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__({"verifier": options})


def texts(client: Client, act: Any, moved: list[int] | None = None) -> list[list[int]]:
    """Returns the texts of requests that run at the same time; acts when the first has begun."""
    streams = [
        client.stream(
            [number % 3, 1, 2],
            max_tokens=50,
            temperature=float(number % 2),
            rejection_sample_method="coupled",
            seed=number,
            num_speculative_tokens=3,
        )
        for number in range(24)
    ]
    pieces = {stream: iter(stream) for stream in streams}
    next(pieces[streams[0]])
    act()

    def read(stream: Any) -> list[int]:
        for _ in pieces[stream]:
            pass
        if moved is not None:
            moved.append(stream.completion.statistics.num_verifiers_lost)
        return list(stream.completion.token_ids)

    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(read, streams))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vllm-args", '{"pipeline_parallel_size": 2}'], "pipeline_parallel_size must be 1"),
        (["--vllm-args", '{"tensor_paralel_size": 2}'], "did you mean tensor_parallel_size"),
        (["--vllm-args", '{"dtype": "half"}'], "dtype is set by --dtype"),
        (["--vllm-args", '{"max_model_len": 9999}'], "vLLM refuses the settings"),
    ],
)
def test_refusal_is_one_line(pair: tuple[Path, Path], options: list[str], message: str) -> None:
    command = ["-m", "draftwire.cli", "serve", "verifier", "--model", str(pair[0]), "--engine", "vllm", *options]
    ended = subprocess.run([PYTHON, *command], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert message in ended.stderr, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr


def test_metrics_count_what_vllm_does(stack: LocalStack) -> None:
    with Client(stack.address) as client:
        done = client.generate([1, 2, 0] * 4, max_tokens=20, seed=1)
    assert len(done.token_ids) == 20
    assert read_metric(stack, "verifier", "engine_steps_total") > 0
