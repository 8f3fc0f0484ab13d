"""A verifier or drafter of two processes that tests break, and completions that must come out whole all the same."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from observing import is_alive, read_metric, wait_until
from transformers import AutoModelForCausalLM
from typing_extensions import override

from benchmarks.law import CONTEXT_LENGTH
from benchmarks.relay import free_port
from draftwire.cli.local_stack import LocalStack, LogLine
from draftwire.client import Client, Completion
from tests.client_threads import ClientThreads

PROMPT = [0, 2, 1, 1]
LENGTH = CONTEXT_LENGTH - len(PROMPT)
TIMEOUT_S = 3.0
"""How long ranks wait for each other."""
END_SECONDS = 8.0
"""How long a group may take to end once it knows that it has to."""
COMMON: dict[str, object] = {"threads": 1, "kv_cache_tokens": 4096, "drain_seconds": 5.0}
PR_SET_CHILD_SUBREAPER = 36
"""Source: prctl(2)."""
FAULTS = Path(__file__).parent / "injected" / "rank_faults"


class Group:
    """A service of two processes, which can be broken and started again on its port."""

    def __init__(self, service: str, options: dict[str, object]) -> None:
        self.service = service
        self.options = {**COMMON, **options, "port": free_port()}
        self.lines: list[LogLine] = []
        self.stack = LocalStack({})

    def start(self) -> None:
        self.lines = []
        self.stack = LocalStack({self.service: self.options}, on_log=lambda _service, line: self.lines.append(line))
        self.stack.start()

    def ensure(self) -> None:
        """Starts the group unless it runs."""
        if not self.stack.services or self.rank_0.poll() is not None:
            self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.options['port']}"

    @property
    def rank_0(self) -> subprocess.Popen[str]:
        return self.stack.services[self.service].process

    @property
    def follower(self) -> int:
        """The other rank's process id."""
        return int(self.of("follower_started")[0]["pid"])

    @property
    def ended_statuses(self) -> list[int]:
        """Of the other rank, if it ended badly."""
        return [int(line["status"]) for line in self.of("follower_ended")]

    def of(self, event: str) -> list[LogLine]:
        """Returns what the service said of an event."""
        return [line for line in self.lines if line["event"] == f"{self.service}.{event}"]

    def wait_for_end(self, seconds: float) -> float:
        """Waits until no process is left and all that they said is read, and returns how long that took."""
        started, service = time.monotonic(), self.stack.services[self.service]
        wait_until(
            lambda: service.ending is not None and not is_alive(self.follower), "the group's processes end", seconds
        )
        return time.monotonic() - started


class Load(ClientThreads):
    """Greedy completions over and over, by some clients, each of which must come out whole."""

    def __init__(self, address: str, expected: list[int], num_clients: int = 4) -> None:
        super().__init__(num_clients)
        self.completions: list[Completion] = []
        self.errors: list[Exception] = []
        self._address, self._expected = address, expected

    @property
    def are_whole(self) -> bool:
        return all(completion.token_ids == self._expected for completion in self.completions)

    def num_lost(self, service: str) -> int:
        """Returns how often a completion had to go on without the verifier or drafter that it had."""
        return sum(getattr(completion.statistics, f"num_{service}s_lost") for completion in self.completions)

    @override
    def _ask(self, index: int) -> None:
        with Client(self._address) as client:
            while not self._ended.is_set():
                try:
                    done = client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH, num_speculative_tokens=1)
                except Exception as error:
                    self.errors.append(error)
                    return
                self.completions.append(done)


def break_under_load(
    group: Group, gateway: LocalStack, expected: list[int], act: Callable[[], object], seconds: float
) -> float:
    """Breaks the group while it serves sessions; returns how long it took to end.

    Every completion must be whole, and as undisturbed.
    """
    group.ensure()
    with Load(gateway.address, expected) as load:
        deadline = time.monotonic() + 20.0
        while read_metric(group.stack, group.service, "num_sessions") == 0:
            assert time.monotonic() < deadline, "no session came to the group"
        act()
        took = group.wait_for_end(seconds)
    print(f"{took:.2f} s until no process of the group was left")
    assert load.errors == []
    assert load.are_whole
    assert load.num_lost(group.service) > 0
    assert group.rank_0.returncode != 0
    return took


class BreakingGroup:
    """Tests of any group of two that serves a gateway; a class that inherits them stands where its fixtures are."""

    def test_killed_follower_ends_the_group_at_once_and_what_it_served_goes_on(
        self, group: Group, gateway: LocalStack, expected: list[int]
    ) -> None:
        break_under_load(group, gateway, expected, lambda: os.kill(group.follower, signal.SIGKILL), END_SECONDS)
        assert len(group.of("group_lost")) == 1
        assert group.ended_statuses == [-signal.SIGKILL]

    def test_stopped_follower_ends_its_group_and_what_it_served_goes_on(
        self, group: Group, gateway: LocalStack, expected: list[int]
    ) -> None:
        seconds = TIMEOUT_S + END_SECONDS
        break_under_load(group, gateway, expected, lambda: os.kill(group.follower, signal.SIGSTOP), seconds)
        assert group.ended_statuses == [-signal.SIGKILL], "a stopped process is killed"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_rank_that_fails_within_a_step_ends_the_group_and_its_texts_go_on(
        self, group: Group, gateway: LocalStack, faults: Path, expected: list[int], rank: int
    ) -> None:
        fault = faults / f"rank_{rank}"
        try:
            break_under_load(group, gateway, expected, fault.touch, END_SECONDS)
        finally:
            fault.unlink()
        (status,) = group.ended_statuses
        assert status != 0
        (lost,) = group.of("group_lost")
        assert rank == 1 or "MemoryError" in str(lost["reason"])

    def test_killed_rank_0_takes_the_others_with_it_even_one_that_is_stopped(
        self, group: Group, gateway: LocalStack, expected: list[int]
    ) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that the follower becomes a child of this process
        group.ensure()

        def kill() -> None:
            os.kill(group.follower, signal.SIGSTOP)
            group.rank_0.kill()

        break_under_load(group, gateway, expected, kill, END_SECONDS)
        assert os.waitstatus_to_exitcode(os.waitpid(group.follower, 0)[1]) != 0

    def test_idle_group_that_loses_a_follower_says_so_before_any_request(self, group: Group) -> None:
        group.ensure()
        with grpc.insecure_channel(group.address) as channel:
            name = f"draftwire.v1.{group.service.capitalize()}Service"
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            started = time.monotonic()
            os.kill(group.follower, signal.SIGKILL)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert time.monotonic() - started < 5.0
        group.wait_for_end(END_SECONDS)
        assert group.rank_0.returncode == 1


def end_with_status_0(group: Group) -> None:
    """Waits for the end of a group that was told to end, and makes sure that no process of it failed."""
    group.wait_for_end(END_SECONDS)
    assert group.rank_0.returncode == 0
    assert group.ended_statuses == []
    assert len(group.of("follower_stopped")) == 1


def fail_outside_the_group(group: Group, faults: Path, complete: Callable[[], Completion]) -> Completion:
    """Lets one step fail without a word of the other rank, which must cost its sessions only; returns one of them."""
    (faults / f"{group.service}_step").touch()
    done = complete()
    assert getattr(done.statistics, f"num_{group.service}s_lost") == 1
    wait_until(lambda: group.of("step_failed"), "the log tells of the step")
    assert len(group.of("step_failed")) == 1
    assert group.rank_0.poll() is None
    assert is_alive(group.follower)
    return done


def greedy_text(pair: tuple[Path, Path]) -> list[int]:
    """What the target says after `PROMPT` at temperature 0, by transformers."""
    network: Any = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    with torch.inference_mode():
        output = network.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
    ids: list[int] = output[0, len(PROMPT) :].tolist()
    return ids


def rank_faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which a test asks processes that were started meanwhile for faults; see `injected/rank_faults`."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patched:
        path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
        patched.setenv("PYTHONPATH", path)
        patched.setenv("RANK_FAULTS", str(folder))
        yield folder
