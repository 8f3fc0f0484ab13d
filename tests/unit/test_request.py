"""Requests: what is refused, by which name, and what is filled in."""

import math
from dataclasses import replace
from typing import Any

import pytest

from draftwire.errors import InvalidRequestError
from draftwire.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest
from draftwire.models.description import ModelDescription
from draftwire.randomness import MAX_SEED
from draftwire.sampling import SamplingParams
from draftwire.services.gateway.request import (
    MAX_SALT_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    RequestedGeneration,
    SpeculationDefaults,
    complete_request,
)

TARGET = ModelDescription(
    name="target",
    revision="",
    dtype="float32",
    vocabulary_fingerprint=b"",
    vocab_size=50,
    context_length=10,
    stop_token_ids=(0, 7),
)
DEFAULTS = SpeculationDefaults(num_speculative_tokens=3, max_speculative_tokens=8, rule="token")
MINIMAL = RequestedGeneration(prompt_ids=[1, 2, 3], sampling=SamplingParams())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [1] * 10}, "the prompt has"),
        ({"prompt_ids": [1] * 11}, "the prompt has"),
        ({"prompt_ids": [1, 50]}, "prompt"),
        ({"prompt_ids": [-1, 1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 8}, "max_tokens"),
        ({"stop": tuple(f"s{i}" for i in range(MAX_STOP_STRINGS + 1))}, "stop"),
        ({"stop": ("fine", "")}, "stop"),
        ({"stop": ("x" * (MAX_STOP_LENGTH + 1),)}, "stop"),
        ({"stop_token_ids": (1, 50)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"generated_ids": (1, 7, 2)}, "generated_token_ids"),
        ({"seed": -1}, "seed"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"cache_salt": "x" * (MAX_SALT_LENGTH + 1)}, "cache_salt"),
        ({"rule": "tipical"}, "rejection_sample_method"),
        ({"sampling": SamplingParams(min_tokens=8)}, "min_tokens"),
        (
            {"sampling": SamplingParams(allowed_token_ids=(3,), min_tokens=1), "stop_token_ids": (3,)},
            "allowed_token_ids",
        ),
        ({"sampling": SamplingParams(logit_bias=((50, 1.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(allowed_token_ids=(50,))}, "allowed_token_ids"),
        ({"rule": ""}, "rejection_sample_method"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 21, "generated_ids": (1,)}, "prompt_logprobs"),
        ({"logprobs_mode": "raw_logits", "logprobs": 1}, "logprobs_mode"),
        ({"logprobs_mode": ""}, "logprobs_mode"),
        ({"logprobs_mode": "raw"}, "logprobs_mode says nothing without"),
        ({"generated_ids": (1, 50)}, "generated_token_ids"),
        ({"generated_ids": (-1,)}, "generated_token_ids"),
        ({"generated_ids": (1,) * 8}, "generated_token_ids"),
        ({"generated_ids": (1, 2, 3), "max_tokens": 2}, "generated_token_ids has 3 ids"),
    ],
)
def test_value_out_of_range_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"\b{named}\b"):
        complete_request(replace(MINIMAL, **changes), TARGET, DEFAULTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": [1] * 9},
        {"prompt_ids": [0, 49]},
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"stop": tuple(f"s{i}" for i in range(MAX_STOP_STRINGS))},
        {"stop": ("x" * MAX_STOP_LENGTH, "y")},
        {"stop_token_ids": (0, 49)},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 8},
        {"cache_salt": ""},
        {"cache_salt": "x" * MAX_SALT_LENGTH},
        {"rule": "block"},
        {"rule": "token"},
    ],
)
def test_value_at_the_edge_of_its_range_is_kept(changes: dict[str, Any]) -> None:
    generation = complete_request(replace(MINIMAL, **changes), TARGET, DEFAULTS)
    for name, value in changes.items():
        kept = getattr(generation, name)
        assert kept >= frozenset(value) if name == "stop_token_ids" else kept == value


def test_defaults_are_filled_in() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=4, top_p=0.9)
    generation = complete_request(replace(MINIMAL, sampling=sampling), TARGET, DEFAULTS)
    assert generation.prompt_ids == [1, 2, 3]
    assert generation.sampling == sampling
    assert generation.max_tokens == 7  # all that the prompt leaves of the context
    assert generation.stop == ()
    assert generation.stop_token_ids == {0, 7}
    assert generation.num_speculative_tokens == 3
    assert generation.rule == "token"
    assert generation.cache_salt == ""


@pytest.mark.parametrize(("max_tokens", "max_len"), [(1, 4), (5, 8), (7, 10), (None, 10)])
def test_max_len_is_prompt_and_budget_together_and_never_beyond_the_context(
    max_tokens: int | None, max_len: int
) -> None:
    assert complete_request(replace(MINIMAL, max_tokens=max_tokens), TARGET, DEFAULTS).max_len == max_len


def test_zero_speculative_tokens_is_not_taken_for_absent() -> None:
    assert complete_request(replace(MINIMAL, num_speculative_tokens=0), TARGET, DEFAULTS).num_speculative_tokens == 0


def test_seed_zero_is_not_taken_for_absent() -> None:
    assert complete_request(replace(MINIMAL, seed=0), TARGET, DEFAULTS).seed == 0


def test_requests_without_a_seed_get_different_ones() -> None:
    """Ten 64-bit seeds collide with a probability of 2e-18."""
    seeds = {complete_request(MINIMAL, TARGET, DEFAULTS).seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_stop_token_ids_of_request_and_model_are_joined() -> None:
    generation = complete_request(replace(MINIMAL, stop_token_ids=(7, 9)), TARGET, DEFAULTS)
    assert generation.stop_token_ids == {0, 7, 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("temperature", 100.5),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_p", math.inf),
    ],
)
def test_sampling_parameter_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"\b{name}\b"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=2), False),
        (SamplingParams(temperature=100.0, top_p=1e-9), False),
    ],
)
def test_only_temperature_zero_and_top_k_one_are_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy


@pytest.mark.parametrize("generated_ids", [(), (1, 2), (49, 0), (5,) * 7])
def test_generated_ids_count_in_max_tokens_and_not_in_the_prompt(generated_ids: tuple[int, ...]) -> None:
    """So a completion is resumed with everything as in the first request, and still has as much room as it had."""
    generation = complete_request(replace(MINIMAL, generated_ids=generated_ids), TARGET, DEFAULTS)
    assert generation.generated_ids == generated_ids
    assert (generation.max_tokens, generation.max_len) == (7, 10)
    assert generation.prompt_ids == [1, 2, 3]


def test_log_probabilities_are_not_reported_unless_asked_for_and_raw_unless_said_otherwise() -> None:
    assert complete_request(MINIMAL, TARGET, DEFAULTS).logprobs == NO_LOGPROBS
    wanted = complete_request(replace(MINIMAL, logprobs=0, prompt_logprobs=20), TARGET, DEFAULTS).logprobs
    assert wanted == LogprobsRequest(0, 20, LogprobsMode.RAW)
    mode = complete_request(replace(MINIMAL, logprobs=20, logprobs_mode="processed"), TARGET, DEFAULTS).logprobs
    assert mode == LogprobsRequest(20, None, LogprobsMode.PROCESSED)


def test_prompt_of_a_resumed_completion_is_not_reported_again() -> None:
    request = replace(MINIMAL, generated_ids=(1,), logprobs=1, prompt_logprobs=2)
    assert complete_request(request, TARGET, DEFAULTS).logprobs == LogprobsRequest(1)
