"""Completions that are drawn over HTTP follow the target's law: the edge adds, leaves out and rounds nothing.

All cases run beside each other in one mixed batch, whole and streamed, each request with a rule and a block length of
its own, 0 included.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from test_parameters import ALPHA, CASES, PROMPT, STOP, VOCAB_SIZE, exact_law, p_value
from tiny_models import save_tiny_model

from benchmarks.law import LOSSLESS, options_of, stack_options
from tests.in_process import InProcessStack, slow_verifiers

pytestmark = pytest.mark.slow

NAMES = ("none", "temperature", "top_p", "logit_bias", "min_tokens", "stop", "many")
OWN = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "logprobs"}
"""What the package itself has a parameter for."""
SAMPLES = 250
CONCURRENCY = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("law") / "target", VOCAB_SIZE, seed=6, stop_token_id=STOP)


@pytest.fixture(scope="module")
def drawn(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The choices of all cases."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter = save_tiny_model(folder, VOCAB_SIZE, seed=9, stop_token_id=STOP)
    works = [(number, name) for number in range(SAMPLES) for name in NAMES]
    random.Random(0).shuffle(works)
    with (
        slow_verifiers(),  # so that the drafter takes part in most rounds
        InProcessStack(stack_options(target, drafter)) as stack,
        openai.OpenAI(base_url=f"{stack.http_address}/v1", api_key="x", timeout=120.0) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        choices = list(pool.map(lambda work: draw(client, *work), works))
    of_case: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for (_, name), choice in zip(works, choices, strict=True):
        of_case[name].append(choice)
    return of_case


def draw(client: openai.OpenAI, number: int, name: str) -> dict[str, Any]:
    """Draws one completion; returns its tokens, why it ended and how many tokens were drafted."""
    case = CASES[name]
    options = {**options_of(case.sampling), **case.options}
    biases = {str(token): bias for token, bias in options.pop("logit_bias").items()}
    own = {key: value for key, value in options.items() if key in OWN}
    extra = {key: value for key, value in options.items() if key not in OWN} | {
        "rejection_sample_method": LOSSLESS[number % len(LOSSLESS)],
        "num_speculative_tokens": random.Random(number).choice([0, 1, 2, 3, 5]),
        "token_details": True,
    }
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": case.max_tokens, "seed": number}
    if biases:
        asked["logit_bias"] = biases
    if number % 2:
        (choice,) = client.completions.create(**asked, **own, extra_body=extra).choices
        tokens, reason = choice.draftwire["tokens"], choice.finish_reason
    else:
        chunks = list(client.completions.create(**asked, **own, extra_body=extra, stream=True))
        tokens = [token for chunk in chunks for token in chunk.choices[0].draftwire["tokens"]]
        reason = chunks[-1].choices[0].finish_reason
    drafted = sum(token["source"] in ("accepted", "recovered", "bonus") for token in tokens)
    return {"ids": tuple(token["id"] for token in tokens), "reason": reason, "drafted": drafted}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_completions_over_http_follow_the_law_of_the_target(
    target: Path, drawn: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """False alarm: 1e-6, by chi-square."""
    law = exact_law(target, CASES[name])
    texts = [choice["ids"] for choice in drawn[name]]
    assert all(law.get(text, 0.0) > 0.0 for text in texts), "nothing impossible was emitted"
    assert p_value(texts, law) > ALPHA
    assert [choice["reason"] for choice in drawn[name]] == [CASES[name].reason_to_end(text) for text in texts]
    assert sum(choice["drafted"] for choice in drawn[name]) > SAMPLES / 4, "the drafter took part"
