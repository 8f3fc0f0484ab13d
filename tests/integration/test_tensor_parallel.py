"""A verifier of two processes: what comes out of it, and that no process of it outlives another, whatever breaks."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import pytest
import torch
from conftest import read_metric
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForCausalLM

from benchmarks.law import CONTEXT_LENGTH, compare, draw_completions, exact_law
from benchmarks.relay import free_port
from draftwire.client import Client
from draftwire.client.sync import Completion
from draftwire.errors import UnavailableError
from draftwire.sampling import SamplingParams
from draftwire.services.local_stack import LocalStack, LogLine
from tests.integration.test_orphans import is_alive

PROMPT = [0, 2, 1, 1]
LENGTH = CONTEXT_LENGTH - len(PROMPT)
TIMEOUT_S = 3.0
END_SECONDS = 8.0
"""How long a group may take to end once it knows that it has to."""
ALPHA = 1e-6
"""Probability of a false alarm of the test of the law."""
FAULTS = Path(__file__).parents[1] / "rank_faults"
PR_SET_CHILD_SUBREAPER = 36
COMMON: dict[str, object] = {"threads": 1, "kv_cache_tokens": 4096, "drain_seconds": 5.0}


class Group:
    """A verifier of two processes, which can be broken and started again on its port."""

    def __init__(self, model: Path) -> None:
        self.options = {**COMMON, "model": model, "port": free_port(), "tensor_parallel_size": 2}
        self.options["tensor_parallel_timeout_s"] = TIMEOUT_S
        self.lines: list[LogLine] = []
        self.stack = LocalStack({})

    def start(self) -> None:
        self.lines = []
        self.stack = LocalStack({"verifier": self.options}, on_log=lambda _service, line: self.lines.append(line))
        self.stack.start()

    def ensure(self) -> None:
        """Starts the group unless it runs."""
        if not self.stack.services or self.rank_0.poll() is not None:
            self.start()

    @property
    def rank_0(self) -> subprocess.Popen[str]:
        return self.stack.services["verifier"].process

    @property
    def follower(self) -> int:
        """The other rank's process id."""
        return int(self.of("verifier.follower_started")[0]["pid"])

    def of(self, event: str) -> list[LogLine]:
        return [line for line in self.lines if line["event"] == event]

    def wait_for_end(self, seconds: float) -> float:
        """Waits until no process is left, and returns how long that took."""
        started = time.monotonic()
        while self.rank_0.poll() is None or is_alive(self.follower):
            assert time.monotonic() < started + seconds, "a process of the group is left"
            time.sleep(0.01)
        return time.monotonic() - started


class Load:
    """Greedy completions over and over, by some clients, each of which must come out whole. A context manager."""

    def __init__(self, address: str, expected: list[int], num_clients: int = 4) -> None:
        self.completions: list[Completion] = []
        self.errors: list[Exception] = []
        self._address, self._expected = address, expected
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    @property
    def num_moved(self) -> int:
        return sum(completion.statistics.num_verifiers_lost for completion in self.completions)

    @property
    def are_whole(self) -> bool:
        return all(completion.token_ids == self._expected for completion in self.completions)

    def _ask(self) -> None:
        with Client(self._address) as client:
            while not self._ended.is_set():
                try:
                    done = client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=1)
                except Exception as error:
                    self.errors.append(error)
                    return
                self.completions.append(done)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which a test asks for faults."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patched:
        path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
        patched.setenv("PYTHONPATH", path)
        patched.setenv("RANK_FAULTS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[int]:
    """What the target says at temperature 0, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    ids: list[int] = output[0, len(PROMPT) :].tolist()
    return ids


@pytest.fixture(scope="module")
def group(pair: tuple[Path, Path], faults: Path) -> Iterator[Group]:
    group = Group(pair[0])
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
        "gateway": {"verifier": f"127.0.0.1:{group.options['port']},127.0.0.1:{plain_port}"},
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


def test_greedy_output_of_two_processes_is_the_targets_own_as_transformers_computes_it(
    gateway: LocalStack, expected: list[int]
) -> None:
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
    result = compare("block", completions, exact_law(pair[0], SamplingParams()), 8)
    assert result.share_of_rounds_with_draft > 0.1, "the drafter took part"
    assert result.p_value > ALPHA, result


def test_start_is_told_in_the_log_and_as_a_metric(group: Group) -> None:
    (started,) = group.of("verifier.server_started")
    assert 0 < started["startup_ms"] < 100_000
    assert abs(read_metric(group.stack, "verifier", "startup_seconds") * 1e3 - started["startup_ms"]) < 1.0
    told = group.of("verifier.weights_read")[-1]
    assert told["share"] == 1.0
    assert told["read_bytes"] == told["total_bytes"] > 0


def test_idle_group_outlives_the_timeout(group: Group, gateway: LocalStack, expected: list[int]) -> None:
    time.sleep(TIMEOUT_S + 1.0)
    with Client(gateway.address) as client:
        assert client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH).token_ids == expected
    assert group.of("verifier.group_lost") == []


def test_step_that_fails_outside_the_group_ends_its_sessions_only(
    group: Group, gateway: LocalStack, faults: Path, expected: list[int]
) -> None:
    (faults / "step").touch()
    with Client(gateway.address) as client:
        done = client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH)
    assert done.token_ids == expected
    assert done.statistics.num_verifiers_lost == 1
    assert len(group.of("verifier.step_failed")) == 1
    assert group.rank_0.poll() is None
    assert is_alive(group.follower)


# What breaks


def break_under_load(
    group: Group, gateway: LocalStack, expected: list[int], act: Callable[[], object], seconds: float
) -> float:
    """Breaks the group while it and the plain verifier serve sessions; returns how long the group took to end.

    Every completion must be whole, and as undisturbed.
    """
    group.ensure()
    with Load(gateway.address, expected) as load:
        deadline = time.monotonic() + 20.0
        while read_metric(group.stack, "verifier", "num_sessions") == 0:
            assert time.monotonic() < deadline, "no session came to the group"
        act()
        took = group.wait_for_end(seconds)
    print(f"{took:.2f} s until no process of the group was left")
    assert load.errors == []
    assert load.are_whole
    assert load.num_moved > 0
    assert group.rank_0.returncode != 0
    return took


def ended_statuses(group: Group) -> list[int]:
    return [int(line["status"]) for line in group.of("verifier.follower_ended")]


@pytest.mark.usefixtures("plain")
def test_killed_follower_ends_the_group_at_once_and_its_sessions_move(
    group: Group, gateway: LocalStack, expected: list[int]
) -> None:
    break_under_load(group, gateway, expected, lambda: os.kill(group.follower, signal.SIGKILL), END_SECONDS)
    assert len(group.of("verifier.group_lost")) == 1
    assert ended_statuses(group) == [-signal.SIGKILL]


@pytest.mark.usefixtures("plain")
def test_stopped_follower_ends_the_group_within_the_timeout_and_its_sessions_move(
    group: Group, gateway: LocalStack, expected: list[int]
) -> None:
    seconds = TIMEOUT_S + END_SECONDS
    break_under_load(group, gateway, expected, lambda: os.kill(group.follower, signal.SIGSTOP), seconds)
    assert ended_statuses(group) == [-signal.SIGKILL], "a stopped process is killed"


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_fails_in_the_middle_of_a_step_ends_the_group_at_once_and_its_sessions_move(
    group: Group, gateway: LocalStack, faults: Path, expected: list[int], rank: int
) -> None:
    fault = faults / f"rank_{rank}"
    try:
        break_under_load(group, gateway, expected, fault.touch, END_SECONDS)
    finally:
        fault.unlink()
    (status,) = ended_statuses(group)
    assert status != 0
    (lost,) = group.of("verifier.group_lost")
    assert rank == 1 or "MemoryError" in str(lost["reason"])


@pytest.mark.usefixtures("plain")
def test_killed_rank_0_takes_the_others_with_it_even_one_that_is_stopped(
    group: Group, gateway: LocalStack, expected: list[int]
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that the follower becomes a child of this process
    group.ensure()

    def kill() -> None:
        os.kill(group.follower, signal.SIGSTOP)
        group.rank_0.kill()

    break_under_load(group, gateway, expected, kill, END_SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(group.follower, 0)[1]) != 0


def test_idle_group_that_loses_a_follower_says_so_before_any_request(group: Group) -> None:
    group.ensure()
    with grpc.insecure_channel(f"127.0.0.1:{group.stack.services['verifier'].port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="draftwire.v1.VerifierService")
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        started = time.monotonic()
        os.kill(group.follower, signal.SIGKILL)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert time.monotonic() - started < 5.0
    group.wait_for_end(END_SECONDS)
    assert group.rank_0.returncode == 1


# How it is started and stopped


def test_sigterm_lets_running_requests_finish_and_all_processes_end_with_status_0(
    group: Group, gateway: LocalStack
) -> None:
    group.ensure()
    with Client(gateway.address) as client:
        pieces = iter(client.stream(PROMPT, max_tokens=LENGTH, num_speculative_tokens=1))
        count = len(next(pieces).token_ids)
        group.rank_0.send_signal(signal.SIGTERM)
        count += sum(len(piece.token_ids) for piece in pieces)
    assert count == LENGTH
    assert group.rank_0.wait(END_SECONDS) == 0
    assert not is_alive(group.follower)
    assert ended_statuses(group) == []
    assert len(group.of("verifier.follower_stopped")) == 1


def test_model_that_cannot_be_shared_out_is_refused_with_the_sizes_that_can(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
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
            *("-m", "draftwire.services.verifier", *(f"--{name}={value}" for name, value in options.items())),
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
        [sys.executable, "-m", "draftwire.services.verifier", f"--model={pair[0]}", "--tensor-parallel-size=2"],
        env={**os.environ, **environment, "MASTER_PORT": "29500"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "torchrun started 3 processes (WORLD_SIZE), but tensor_parallel_size is 2" in done.stderr
