"""Bad inputs, tried on one running stack beside completions that must not notice. See tests/bad-inputs.md."""

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from observing import wait_until
from test_services import greedy_ids

from benchmarks.law import stack_options
from draftwire.client import Client, Completion
from tests.bad_inputs import MAX_MESSAGE_BYTES, PROMPT, REQUESTS, SERVED, Case, Stage, wrong_answers
from tests.in_process import InProcessStack

MAX_TOKENS = 40
PAUSE_SECONDS = 0.02
"""Between completions, which leaves the machine some time for the inputs."""


@dataclass
class Beside:
    """Completions, one after the other, for as long as inputs are tried. A context manager."""

    address: str
    expected: list[int]
    completions: list[Completion] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Beside":
        for seed in range(2):
            self._threads.append(threading.Thread(target=self._run, args=(random.Random(seed),)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        assert not self.errors, self.errors[0]
        assert {(tuple(done.token_ids), done.drafter_error) for done in self.completions} == {
            (tuple(self.expected), "")
        }
        # In the time that a flood takes, a completion may be done before its drafter has read the prompt.
        assert sum(done.statistics.num_drafts > 0 for done in self.completions) > 0.8 * len(self.completions)

    def _run(self, generator: random.Random) -> None:
        with Client(self.address) as client:
            while not self._ended.wait(PAUSE_SECONDS):
                rule = generator.choice(["block", "token", "coupled"])
                try:
                    done = client.generate(
                        PROMPT, temperature=0.0, max_tokens=MAX_TOKENS, rejection_sample_method=rule, resume_s=0.0
                    )
                except Exception as error:
                    self.errors.append(error)
                else:
                    self.completions.append(done)


@dataclass
class Trial:
    """What the inputs are tried on."""

    stage: Stage
    stack: InProcessStack
    expected: list[int]
    """What the completions beside them have to be."""
    logs: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def trial(pair: tuple[Path, Path]) -> Iterator[Trial]:
    options = stack_options(*pair)
    for service in options.values():
        service["max_message_bytes"] = MAX_MESSAGE_BYTES
    options["drafter"]["connect_timeout_s"] = 1.0
    logs: list[tuple[str, Any]] = []
    running = InProcessStack(options, on_log=lambda service, line: logs.append((service, line)))
    with running as stack, Stage(stack) as stage, Client(stack.address) as client:
        wait_until(lambda: client.generate(PROMPT, max_tokens=30).statistics.num_drafts > 0, "a drafter takes part")
        yield Trial(stage, stack, greedy_ids(pair[0], PROMPT, MAX_TOKENS), logs)


@pytest.mark.parametrize("cases", [SERVED, pytest.param(REQUESTS, marks=pytest.mark.slow)], ids=["each kind", "others"])
def test_bad_input_is_answered_as_documented_and_nobody_else_notices(trial: Trial, cases: Sequence[Case]) -> None:
    """Completions beside all inputs, health, leftovers and logs."""
    with Beside(trial.stack.address, trial.expected) as beside:
        assert not wrong_answers(cases, trial.stage)
        before = len(beside.completions)
        wait_until(lambda: beside.errors or len(beside.completions) >= before + 5, "completions go on")
    beside.check()
    for service, running in trial.stack.services.items():
        with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for asked in ("", f"draftwire.v1.{service.capitalize()}Service"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=asked), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    wait_until(lambda: not trial.stage.leftovers(), "nothing is left of the sessions")
    faults = [line for line in trial.logs if "exception" in line[1] or line[1]["level"] not in ("info", "warning")]
    assert not faults, f"{len(faults)} lines, the first: {faults[0]}"
