"""Every parameter of a request, alone and with others: the output follows the exact law, all in one mixed batch.

The law is that of whole outputs, up to the token that ends them, on a tiny model that has a stop token of its own.
Requests of all cases run beside each other, each with a rule and a block length of its own, 0 included.
"""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from benchmarks.law import LOSSLESS, options_of, stack_options
from draftwire.client import Client, Completion
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack, slow_verifiers

ALPHA = 1e-6
"""Probability of a false alarm of each comparison."""
VOCAB_SIZE = 4
STOP = 3
"""The model's own stop token."""
SILENT = 0
"""A token without text."""
PROMPT = [1, 1, 2, 0, 0, 2, 1, 0, 0, 1, 2, 2, 0, 0, 1, 2, 0, 1]
LENGTH = 7
SAMPLES = (30, 80, 450)
"""Of each case, in `make test`, `make test-slow` and `make evidence`: few show that every parameter arrives, many what
comes of it."""
CONCURRENCY = 48
SMALLEST_CELL = 5.0
"""Outcomes expected less often are merged."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what its law depends on."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = LENGTH
    ends: frozenset[int] = frozenset({STOP})
    """Tokens that end the text."""
    stop: tuple[int, ...] = ()
    """Tokens whose text ends the text, one after the other but for silent ones."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else is asked for."""

    def reason_to_end(self, text: tuple[int, ...]) -> str | None:
        """Returns why a text is over after its last token, if it is."""
        spoken = tuple(token for token in text if token != SILENT)
        is_spoken = bool(self.stop) and text[-1] != SILENT and spoken[-len(self.stop) :] == self.stop
        if text[-1] in self.ends or is_spoken:
            return "stop"
        return "length" if len(text) == self.max_tokens else None


CASES = {
    "none": Case(),
    "temperature": Case(SamplingParams(temperature=0.4)),
    "temperature, high": Case(SamplingParams(temperature=2.5)),
    "temperature, 0": Case(SamplingParams(temperature=0.0)),
    "top_k": Case(SamplingParams(top_k=2)),
    "top_p": Case(SamplingParams(top_p=0.7)),
    "min_p": Case(SamplingParams(temperature=1.5, min_p=0.4)),
    "repetition_penalty": Case(SamplingParams(repetition_penalty=1.5)),
    "presence_penalty": Case(SamplingParams(presence_penalty=1.2)),
    "frequency_penalty": Case(SamplingParams(frequency_penalty=-0.7)),
    "logit_bias": Case(SamplingParams(logit_bias=((0, -1.5), (2, 1.0)))),
    "allowed_token_ids": Case(SamplingParams(allowed_token_ids=frozenset({0, 2, STOP}))),
    "min_tokens": Case(SamplingParams(min_tokens=4)),
    "max_tokens": Case(max_tokens=3),
    "stop_token_ids": Case(ends=frozenset({1, STOP}), options={"stop_token_ids": [1]}),
    "stop": Case(stop=(2, 1), options={"stop": ["t2 t1", "never"]}),
    "logprobs": Case(options={"logprobs": 2, "prompt_logprobs": 1, "logprobs_mode": "processed"}),
    "cache_salt": Case(options={"cache_salt": "another"}),
    "ignore_eos": Case(ends=frozenset(), options={"ignore_eos": True}),
    "ignore_eos, stop_token_ids": Case(ends=frozenset({1}), options={"ignore_eos": True, "stop_token_ids": [1]}),
    "echo": Case(options={"echo": True}),
    "many": Case(
        SamplingParams(
            temperature=1.3,
            top_k=3,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias=((1, 0.5),),
            min_tokens=2,
        ),
        stop=(1, 1),
        options={"stop": ["t1 t1"], "logprobs": 0},
    ),
}

Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_model(folder, VOCAB_SIZE, seed=6, stop_token_id=STOP)


@pytest.fixture(
    scope="module",
    params=[
        SAMPLES[0],
        pytest.param(SAMPLES[1], marks=pytest.mark.slow),
        pytest.param(SAMPLES[2], marks=pytest.mark.evidence),
    ],
)
def drawn(
    target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[Completion]]:
    """The completions of all cases, drawn in one mixed batch."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter = save_tiny_model(folder, VOCAB_SIZE, seed=9, stop_token_id=STOP)
    with (
        slow_verifiers(),  # so that the drafter takes part in most rounds
        InProcessStack(stack_options(target, drafter)) as running,
        Client(running.address) as client,
    ):

        def draw(work: tuple[int, str]) -> Completion:
            number, name = work
            case = CASES[name]
            return client.generate(
                PROMPT,
                max_tokens=case.max_tokens,
                seed=number,
                rejection_sample_method=LOSSLESS[number % len(LOSSLESS)],
                num_speculative_tokens=random.Random(number).choice([0, 1, 2, 3, 5]),
                **options_of(case.sampling),
                **case.options,
            )

        works = [(number, name) for number in range(request.param) for name in CASES]
        random.Random(0).shuffle(works)
        completions: dict[str, list[Completion]] = {name: [] for name in CASES}
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for (_, name), completion in zip(works, pool.map(draw, works), strict=True):
                completions[name].append(completion)
    return completions


@torch.inference_mode()
def exact_law(folder: Path, case: Case) -> Law:
    """Returns the probability of each output, the token that ends it included, by following all of them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    law: Law = {}
    going: Law = {(): 1.0}
    while going:
        texts = list(going)
        logits = model(input_ids=torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        spans = [Span(case.sampling, 1, [*PROMPT, *text], len(PROMPT), case.ends) for text in texts]
        rows = probabilities_of_spans(logits, spans).tolist()
        grown = {
            (*text, token): going[text] * mass
            for text, row in zip(texts, rows, strict=True)
            for token, mass in enumerate(row)
            if mass > 0.0
        }
        law.update({text: mass for text, mass in grown.items() if case.reason_to_end(text)})
        going = {text: mass for text, mass in grown.items() if not case.reason_to_end(text)}
    return law


def p_value(texts: list[tuple[int, ...]], law: Law) -> float:
    """Returns the probability of a chi-square as large as that of these outputs, if they follow the law."""
    observed = Counter(texts)
    cells = [text for text, mass in law.items() if mass * len(texts) >= SMALLEST_CELL]
    pairs = [(law[text] * len(texts), observed[text]) for text in cells]
    rest = len(texts) - sum(expected for expected, _ in pairs)
    if rest > 1e-9:
        pairs.append((rest, len(texts) - sum(count for _, count in pairs)))
    statistic = sum((count - expected) ** 2 / expected for expected, count in pairs)
    return float(chi2.sf(statistic, max(len(pairs) - 1, 1)))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_outputs_follow_the_law_of_the_target(target: Path, drawn: dict[str, list[Completion]], name: str) -> None:
    """Of each rule, and of plain decoding. False alarm: 5e-6, by chi-square."""
    law = exact_law(target, CASES[name])
    assert sum(law.values()) == pytest.approx(1.0)
    completions = drawn[name]
    texts = [tuple(completion.token_ids) for completion in completions]
    assert all(law.get(text, 0.0) > 0.0 for text in texts), "nothing impossible was emitted"
    assert p_value(texts, law) > ALPHA
    for rule in LOSSLESS:
        of_rule = [tuple(one.token_ids) for one in completions if one.rejection_sample_method == rule]
        assert p_value(of_rule, law) > ALPHA, rule
    plain = [tuple(one.token_ids) for one in completions if not one.num_draft_tokens]
    assert len(plain) > len(completions) / 8
    assert [one.finish_reason for one in completions] == [CASES[name].reason_to_end(text) for text in texts]


def test_the_drafter_took_part_in_all_cases(drawn: dict[str, list[Completion]]) -> None:
    for name, completions in drawn.items():
        drafts = sum(one.statistics.num_drafts for one in completions)
        rounds = sum(one.statistics.num_rounds for one in completions)
        assert drafts > 0.15 * rounds, name
        accepted = sum(one.statistics.num_accepted_tokens for one in completions)
        proposed = sum(one.statistics.num_draft_tokens for one in completions)
        assert 0.1 < accepted / proposed < 0.95 or name == "temperature, 0", name
        assert all(not one.drafter_error for one in completions), name
