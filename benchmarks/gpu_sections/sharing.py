"""Step times of a drafter and a verifier process that share one GPU."""

import multiprocessing
import time
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
RUN, PAUSE = "run", "pause"


@dataclass(frozen=True, slots=True)
class _Answer:
    """Message from the drafter's process."""

    times_ms: list[float]
    """Times of its steps since the last command to run."""


def sharing(plan: Plan, pair: Pair, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    context = multiprocessing.get_context("spawn")
    own_end, other_end = context.Pipe()
    child = context.Process(target=draft_in_a_loop, args=(other_end, plan), daemon=True)
    child.start()
    other_end.close()  # so that the child's death ends the wait
    try:
        _receive(own_end)
        own_end.send(RUN)
        time.sleep(plan.seconds)
        draft_alone = _paused(own_end)
        verify_alone = verify_steps_ms(plan, pair)
        own_end.send(RUN)
        verify_beside = verify_steps_ms(plan, pair)
        draft_beside = _paused(own_end)
    finally:
        own_end.close()
        child.join(5.0)
        if child.is_alive():
            child.terminate()
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


def _receive(connection: Connection) -> list[float]:
    """Returns the other process's next answer.

    Raises:
        TimeoutError: there was none in time.
        EOFError: the other process died.
    """
    if not connection.poll(PATIENCE_S):
        raise TimeoutError("the drafter's process did not answer in time")
    answer = connection.recv()
    assert isinstance(answer, _Answer)
    return answer.times_ms


def _paused(connection: Connection) -> list[float]:
    connection.send(PAUSE)
    return _receive(connection)


def verify_steps_ms(plan: Plan, pair: Pair) -> list[float]:
    """Returns the times of verify steps that follow each other, milliseconds."""
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
    return times[WARM_UPS:]


def draft_in_a_loop(connection: Connection, plan: Plan) -> None:
    """Main of the drafter's process: reports ready, then runs and pauses on command until the parent disconnects."""
    if not plan.is_cuda:
        torch.set_num_threads(1)
    shape = replace(plan.shape, num_layers=DRAFT_LAYERS)
    decoder = decoder_of(build_target(shape, plan.dtype, str(plan.device), seed=0), "lean", consumes=True)
    drafter = LanguageModelDrafter(torch_model(decoder, CACHE_TOKENS, True), CACHE_TOKENS)
    prompt = random_ids(plan.prompt_tokens, shape.vocab_size, 0)
    sequence = drafter.open(prompt, ALONE)
    request = DraftRequest(BLOCK_LENGTH, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), shape.vocab_size)
    timer = Timer(plan.device)

    def step_ms() -> float:
        sequence.calibrate(len(prompt), [])
        return timer.ms(lambda: drafter.step([Drafting(sequence, request)]))

    for _ in range(WARM_UPS):
        step_ms()
    try:
        connection.send(_Answer([]))
        while connection.recv() == RUN:
            times: list[float] = []
            while not connection.poll():
                times.append(step_ms())
            connection.recv()
            connection.send(_Answer(times))
    except (EOFError, ConnectionError):
        return  # the parent is done
