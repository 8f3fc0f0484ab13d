"""Step times of a drafter and a verifier process that share one GPU."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median

import torch

from benchmarks.gpu_sections.batch import random_ids
from benchmarks.gpu_sections.pair import DRAFT_LAYERS, Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.steps import CACHE_TOKENS, VERIFIED_TOKENS
from benchmarks.gpu_sections.timer import WARM_UPS, Timer
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Drafting, DraftRequest
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.models.decoders import decoder_of
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from tools.synth.synthesis import build_target

BLOCK_LENGTH = 4
PATIENCE_S = 45.0
"""Timeout of the other process's start and of each answer."""
RUN, PAUSE, STEP = "run", "pause", "step"


@dataclass(frozen=True, slots=True)
class _Answer:
    """Message from the drafter's process."""

    times_ms: list[float]
    """Times of its steps since the last command to run."""


class OtherProcess:
    """A process that drafts on the same device, on command."""

    def __init__(self, connection: Connection) -> None:
        """Waits until it is ready; raises as `_answer`."""
        self._connection = connection
        self._answer()

    def run(self) -> None:
        """Starts drafting, step after step."""
        self._connection.send(RUN)

    def pause(self) -> list[float]:
        """Ends drafting; returns the times of its steps since it began, milliseconds."""
        self._connection.send(PAUSE)
        return self._answer()

    def step(self) -> float:
        """Returns the time of one step, milliseconds, once it is done."""
        self._connection.send(STEP)
        (milliseconds,) = self._answer()
        return milliseconds

    def _answer(self) -> list[float]:
        """Returns its next answer.

        Raises:
            TimeoutError: there was none in time.
            EOFError: it died.
        """
        if not self._connection.poll(PATIENCE_S):
            raise TimeoutError("the drafter's process did not answer in time")
        answer = self._connection.recv()
        assert isinstance(answer, _Answer)
        return answer.times_ms


@contextmanager
def drafting_process(plan: Plan) -> Iterator[OtherProcess]:
    """Runs a process that drafts."""
    context = multiprocessing.get_context("spawn")
    own_end, other_end = context.Pipe()
    child = context.Process(target=draft_on_command, args=(other_end, plan), daemon=True)
    child.start()
    other_end.close()  # so that the child's death ends the wait
    try:
        yield OtherProcess(own_end)
    finally:
        own_end.close()
        child.join(5.0)
        if child.is_alive():
            child.terminate()


def sharing(plan: Plan, pair: Pair, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    with drafting_process(plan) as other:
        overlap(plan, pair, other, findings)


def overlap(plan: Plan, pair: Pair, other: OtherProcess, findings: Findings) -> None:
    """Measures the steps of both processes alone, and at the same time."""
    other.run()
    time.sleep(plan.seconds)
    draft_alone = other.pause()
    verify_alone = verify_steps_ms(plan, pair)
    other.run()
    verify_beside = verify_steps_ms(plan, pair)
    draft_beside = other.pause()
    medians = {
        "verify_alone_ms": median(verify_alone),
        "verify_beside_draft_ms": median(verify_beside),
        "draft_alone_ms": median(draft_alone),
        "draft_beside_verify_ms": median(draft_beside),
    }
    findings.results |= {
        **medians,
        "draft_tokens": BLOCK_LENGTH,
        "verified_tokens": VERIFIED_TOKENS,
        "steps": [len(times) for times in (verify_alone, verify_beside, draft_alone, draft_beside)],
    }
    findings.rows += [
        Row(f"verify step of {VERIFIED_TOKENS} tokens, alone", medians["verify_alone_ms"], "ms"),
        Row("verify step, beside draft steps", medians["verify_beside_draft_ms"], "ms"),
        Row(f"draft step of {BLOCK_LENGTH} tokens, alone", medians["draft_alone_ms"], "ms"),
        Row("draft step, beside verify steps", medians["draft_beside_verify_ms"], "ms"),
    ]


def verify_steps_ms(plan: Plan, pair: Pair, between: Callable[[], object] = int) -> list[float]:
    """Returns the times of verify steps that follow each other, milliseconds.

    Args:
        plan: says for how long.
        pair: whose target runs.
        between: called after each of them, when it is done.
    """
    model = torch_model(pair.target, CACHE_TOKENS, True)
    sequence = model.cache.open()
    ids = random_ids(plan.prompt_tokens + VERIFIED_TOKENS, model.vocab_size, 0)
    model.read([Reading(sequence, ids[:-VERIFIED_TOKENS], 0)])
    reading = Reading(sequence, ids[-VERIFIED_TOKENS:], VERIFIED_TOKENS)
    timer = Timer(plan.device)
    times: list[float] = []
    started = time.perf_counter()
    while len(times) <= WARM_UPS or time.perf_counter() - started < plan.seconds:
        times.append(timer.ms(lambda: model.read([reading])))
        model.cache.truncate(sequence, plan.prompt_tokens)
        between()
    return times[WARM_UPS:]


class DraftSteps:
    """Steps of a drafter of the plan's shape, each of which drafts a block after the same text."""

    def __init__(self, plan: Plan) -> None:
        """Makes the drafter, reads the text and warms up."""
        shape = replace(plan.shape, num_layers=DRAFT_LAYERS)
        decoder = decoder_of(build_target(shape, plan.dtype, str(plan.device), seed=0), "lean", consumes=True)
        self._drafter = LanguageModelDrafter(torch_model(decoder, CACHE_TOKENS, True), CACHE_TOKENS)
        prompt = random_ids(plan.prompt_tokens, shape.vocab_size, 0)
        self._length = len(prompt)
        self._sequence = self._drafter.open(prompt, ALONE)
        self._request = DraftRequest(BLOCK_LENGTH, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), shape.vocab_size)
        self._timer = Timer(plan.device)
        for _ in range(WARM_UPS):
            self.step_ms()

    def step_ms(self) -> float:
        """Returns the time of a step, milliseconds."""
        self._sequence.calibrate(self._length, [])
        return self._timer.ms(lambda: self._drafter.step([Drafting(self._sequence, self._request)]))


def draft_on_command(connection: Connection, plan: Plan) -> None:
    """Main of the drafter's process: reports ready, then drafts on command until the parent disconnects."""
    if not plan.is_cuda:
        torch.set_num_threads(1)
    steps = DraftSteps(plan)
    try:
        connection.send(_Answer([]))
        while True:
            command = connection.recv()
            times: list[float] = [steps.step_ms()] if command == STEP else []
            while command == RUN and not connection.poll():
                times.append(steps.step_ms())
            if command == RUN:
                connection.recv()
            connection.send(_Answer(times))
    except (EOFError, ConnectionError):
        return  # the parent is done
