"""Every line of docs/bad-inputs.md, tried on one running stack beside completions that must not notice."""

import random
import threading
import time
from collections.abc import Iterator
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
from tests.bad_inputs import CASES, MAX_MESSAGE_BYTES, PROMPT, Case, Stage, page
from tests.in_process import InProcessStack

PAGE = Path(__file__).parents[2] / "docs" / "bad-inputs.md"
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
        self.end()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

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
    beside: Beside
    logs: list[tuple[str, Any]]

    def check_beside(self) -> None:
        assert not self.beside.errors, self.beside.errors[0]
        for done in list(self.beside.completions):
            assert done.token_ids == self.beside.expected
            assert done.drafter_error == ""
        # In the time that a flood takes, a completion may be done before its drafter has read the prompt.
        with_drafts = sum(done.statistics.num_drafts > 0 for done in self.beside.completions)
        assert with_drafts > 0.8 * len(self.beside.completions)


@pytest.fixture(scope="module")
def trial(pair: tuple[Path, Path]) -> Iterator[Trial]:
    options = stack_options(*pair)
    for service in options.values():
        service["max_message_bytes"] = MAX_MESSAGE_BYTES
    options["drafter"]["connect_timeout_s"] = 1.0
    logs: list[tuple[str, Any]] = []
    running = InProcessStack(options, on_log=lambda service, line: logs.append((service, line)))
    with running as stack, Stage(stack) as stage, Client(stack.address) as client:
        wait_until(lambda: client.generate(PROMPT, max_tokens=30).statistics.num_drafts > 0)
        with Beside(stack.address, greedy_ids(pair[0], PROMPT, MAX_TOKENS)) as beside:
            yield Trial(stage, stack, beside, logs)


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
def test_bad_input_is_answered_as_documented(trial: Trial, case: Case) -> None:
    answer = case.attempt(trial.stage)
    assert answer.kind == case.answer, answer
    assert case.says in answer.message


def test_nobody_else_noticed_and_nothing_is_left(trial: Trial) -> None:
    """Comes last: completions beside all inputs, health, leftovers and logs."""
    time.sleep(0.5)
    trial.beside.end()
    assert len(trial.beside.completions) >= 5
    trial.check_beside()
    for service, running in trial.stack.services.items():
        with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for asked in ("", f"draftwire.v1.{service.capitalize()}Service"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=asked), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    wait_until(lambda: not trial.stage.leftovers())
    faults = [line for line in trial.logs if "exception" in line[1] or line[1]["level"] not in ("info", "warning")]
    assert not faults, f"{len(faults)} lines, the first: {faults[0]}"


def test_page_lists_the_inputs_as_they_are_tried() -> None:
    message = "python -m tests.bad_inputs --write docs/bad-inputs.md"
    assert PAGE.read_text() == page(), message
    assert len({case.title for case in CASES}) == len(CASES) >= 80
