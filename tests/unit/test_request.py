"""Requests: what is refused, by which name, and what is filled in."""

import math
from dataclasses import replace
from typing import Any

import pytest
from session_specs import FACTS

from draftwire.errors import InvalidRequestError
from draftwire.method.keys import MAX_SEED
from draftwire.models.description import ModelDescription
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import MAX_SALT_LENGTH
from draftwire.requests.structured_output import Form, StructuredOutput
from draftwire_gateway.requested_generation import (
    MAX_CHOICES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    GeneratedChoice,
    RequestedGeneration,
    SpeculationDefaults,
    complete_request,
)
from draftwire_gateway.session.generation import Generation

TARGET = ModelDescription(
    name="target",
    revision="",
    dtype="float32",
    vocabulary_fingerprint=b"",
    vocab_size=50,
    context_length=10,
    stop_token_ids=(0, 7),
    rules=tuple(FACTS.values()),
)
DEFAULTS = SpeculationDefaults(num_speculative_tokens=3, max_speculative_tokens=8, rule="token")
MINIMAL = RequestedGeneration(prompts=[[1, 2, 3]], sampling=SamplingParams(), caller="")
FORM = StructuredOutput(Form.REGEX, ("a*",))
CALLERS = ("", "alice", "bob", "a", "lice")
SALTS = ("", "x", "alice", "al", "x" * MAX_SALT_LENGTH, "\N{GRINNING FACE}")


def complete(**changes: Any) -> list[Generation]:
    return complete_request(replace(MINIMAL, **changes), TARGET, DEFAULTS)


def only(**changes: Any) -> Generation:
    (generation,) = complete(**changes)
    return generation


def came(*token_ids: int, choice: int = 0, is_finished: bool = False) -> GeneratedChoice:
    return GeneratedChoice(choice, token_ids, is_finished)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [[1] * 10]}, "the prompt has"),
        ({"prompts": [[1] * 11]}, "the prompt has"),
        ({"prompts": [[1, 50]]}, "prompt"),
        ({"prompts": [[-1, 1]]}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 8}, "max_tokens"),
        ({"stop": tuple(f"s{i}" for i in range(MAX_STOP_STRINGS + 1))}, "stop"),
        ({"stop": ("fine", "")}, "stop"),
        ({"stop": ("x" * (MAX_STOP_LENGTH + 1),)}, "stop"),
        ({"stop_token_ids": (1, 50)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"generated_choices": (came(1, 7, 2),)}, "generated_choices"),
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
        ({"prompt_logprobs": 21, "generated_choices": (came(1),)}, "prompt_logprobs"),
        ({"logprobs_mode": "raw_logits", "logprobs": 1}, "logprobs_mode"),
        ({"logprobs_mode": ""}, "logprobs_mode"),
        ({"logprobs_mode": "raw"}, "logprobs_mode says nothing without"),
        ({"generated_choices": (came(1, 50),)}, "generated_choices"),
        ({"generated_choices": (came(-1),)}, "generated_choices"),
        ({"generated_choices": (came(*[1] * 8),)}, "generated_choices"),
        ({"generated_choices": (came(1, 2, 3),), "max_tokens": 2}, "generated_choices has 3 ids"),
        ({"generated_choices": (came(1), came(1))}, "generated_choices names a choice twice"),
        ({"generated_choices": (came(1, choice=2),), "num_choices": 2}, "generated_choices: a choice must be in 0..1"),
        ({"generated_choices": (came(50, is_finished=True),)}, "generated_choices"),
        ({"generated_choices": (came(1, 7, 2, is_finished=True),)}, "generated_choices"),
        ({"generated_choices": (came(1, 50, choice=3),), "num_choices": 4}, "generated_choices"),
        ({"num_choices": 0}, "num_choices"),
        ({"num_choices": MAX_CHOICES + 1}, "num_choices"),
        ({"num_choices": 2**32 - 1}, "num_choices"),
        ({"prompts": [[1]] * 2, "num_choices": MAX_CHOICES // 2 + 1}, "num_choices"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1]] * (MAX_CHOICES + 1)}, "prompts takes at most"),
        ({"prompts": [[1], [2], []]}, "prompt 2 is empty"),
        ({"prompts": [[1], [50]]}, "prompt 1"),
        ({"prompts": [[1], [1] * 8], "max_tokens": 3}, "tokens of prompt 1 leave"),
        ({"prompts": [[1], [1] * 8], "sampling": SamplingParams(min_tokens=3)}, "min_tokens"),
        ({"max_tokens": 0, "sampling": SamplingParams(min_tokens=1)}, "min_tokens"),
        ({"max_tokens": 0, "num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"ignore_eos": True, "sampling": SamplingParams(structured_output=FORM)}, "ignore_eos"),
    ],
)
def test_value_out_of_range_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"\b{named}\b"):
        complete(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"stop": tuple(f"s{i}" for i in range(MAX_STOP_STRINGS))},
        {"stop": ("x" * MAX_STOP_LENGTH, "y")},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 8},
        {"cache_salt": ""},
    ],
)
def test_value_at_the_edge_of_its_range_is_kept(changes: dict[str, Any]) -> None:
    generation = only(**changes)
    assert {name: getattr(generation, name) for name in changes} == changes


def test_callers_share_no_salt_whatever_they_ask_for() -> None:
    """A caller's own requests do, and so do all callers where nobody has a token."""
    salts = {(caller, salt): only(caller=caller, cache_salt=salt).cache_salt for caller in CALLERS for salt in SALTS}
    assert len(set(salts.values())) == len(CALLERS) * len(SALTS)
    assert salts["", ""] == ""
    assert all(only(caller=caller, cache_salt=salt).cache_salt == own for (caller, salt), own in salts.items())
    assert max(map(len, salts.values())) <= MAX_SALT_LENGTH
    assert not set(salts.values()) & {only(cache_salt=salt).cache_salt for salt in salts.values() if salt}


def test_rule_is_one_that_the_target_offers() -> None:
    assert [only(rule=name).rule for name in FACTS] == list(FACTS.values())


def test_ids_at_the_edge_of_their_range_are_kept() -> None:
    for prompt in ([1] * 9, [0, 49]):
        assert only(prompts=[prompt]).prompt_ids == prompt
    assert only(stop_token_ids=(0, 49)).stop_token_ids == {0, 7, 49}


def test_defaults_are_filled_in() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=4, top_p=0.9)
    expected = Generation(
        prompt_ids=[1, 2, 3],
        sampling=sampling,
        max_tokens=7,  # all that the prompt leaves of the context
        stop=(),
        stop_token_ids=frozenset({0, 7}),
        seed=11,
        num_speculative_tokens=3,
        rule=FACTS["token"],
        has_own_seed=True,
    )
    assert only(sampling=sampling, seed=11) == expected


@pytest.mark.parametrize(("max_tokens", "max_len"), [(1, 4), (5, 8), (7, 10), (None, 10)])
def test_max_len_is_prompt_plus_budget_and_never_beyond_the_context(max_tokens: int | None, max_len: int) -> None:
    assert only(max_tokens=max_tokens).max_len == max_len


def test_requests_without_a_seed_get_different_ones() -> None:
    """Ten 64-bit seeds collide with a probability of 2e-18."""
    seeds = {only().seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("temperature", 100.5),
        ("top_k", -1),
        ("top_k", 2**32),
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
        (SamplingParams(top_k=2**32 - 1), False),
        (SamplingParams(temperature=100.0, top_p=1e-9), False),
    ],
)
def test_only_temperature_zero_and_top_k_one_are_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy


@pytest.mark.parametrize("token_ids", [(), (1, 2), (49, 0), (5,) * 7])
def test_generated_ids_count_in_max_tokens_and_not_in_the_prompt(token_ids: tuple[int, ...]) -> None:
    """So a completion is resumed with everything as in the first request, and still has as much room as it had."""
    generation = only(generated_choices=(came(*token_ids),))
    assert generation.generated_ids == token_ids
    assert (generation.max_tokens, generation.max_len) == (7, 10)
    assert generation.prompt_ids == [1, 2, 3]


def test_log_probabilities_are_opt_in_and_raw_by_default() -> None:
    assert only().logprobs == NO_LOGPROBS
    wanted = only(logprobs=0, prompt_logprobs=20).logprobs
    assert wanted == LogprobsRequest(0, 20, LogprobsMode.RAW)
    mode = only(logprobs=20, logprobs_mode="processed").logprobs
    assert mode == LogprobsRequest(20, None, LogprobsMode.PROCESSED)


def test_choices_are_numbered_over_all_prompts_and_share_all_else() -> None:
    generations = complete(prompts=[[1], [2, 3]], num_choices=3)
    assert [generation.choice for generation in generations] == list(range(6))
    assert [generation.prompt_ids for generation in generations] == [[1]] * 3 + [[2, 3]] * 3
    assert [generation.prompt_index for generation in generations] == [0] * 3 + [1] * 3
    assert len({generation.seed for generation in generations}) == 1
    assert [generation.max_tokens for generation in generations] == [9] * 3 + [8] * 3
    assert len(complete(prompts=[[1]] * 2, num_choices=MAX_CHOICES // 2)) == MAX_CHOICES
    assert len(complete(prompts=[[1]] * MAX_CHOICES)) == MAX_CHOICES


def test_prompt_is_told_under_its_first_choice_alone() -> None:
    generations = complete(prompts=[[1], [2]], num_choices=2, prompt_logprobs=3, logprobs=1, echo=True)
    assert [generation.echo for generation in generations] == [True, False] * 2
    assert [generation.logprobs.prompt_logprobs for generation in generations] == [3, None] * 2
    assert {generation.logprobs.logprobs for generation in generations} == {1}


def test_prompt_of_which_the_first_choice_has_begun_is_not_told_again() -> None:
    before = (came(1, choice=0), came(choice=2, is_finished=True), came(4, choice=5), came(choice=6))
    generations = complete(
        prompts=[[1], [2], [3], [4]], num_choices=2, prompt_logprobs=3, echo=True, generated_choices=before
    )
    assert [generation.choice for generation in generations] == [0, 1, 3, 4, 5, 6, 7]
    assert [generation.choice for generation in generations if generation.echo] == [4, 6]
    assert [generation.choice for generation in generations if generation.logprobs.prompt_logprobs == 3] == [4, 6]
    assert {generation.choice: generation.generated_ids for generation in generations if generation.generated_ids} == {
        0: (1,),
        5: (4,),
    }


def test_stop_tokens_of_model_and_request_are_joined_or_ignored_if_wished() -> None:
    assert only(stop_token_ids=(7, 9)).stop_token_ids == {0, 7, 9}
    assert only(ignore_eos=True).stop_token_ids == frozenset()
    assert only(ignore_eos=True, stop_token_ids=(7, 9)).stop_token_ids == {7, 9}
    assert only(ignore_eos=True, generated_choices=(came(7, 0, 1),)).generated_ids == (7, 0, 1)
    least = SamplingParams(allowed_token_ids=(0, 7), min_tokens=1)
    assert only(ignore_eos=True, sampling=least).sampling == least, "no possible token is a stop token"


def test_request_of_no_tokens_drafts_nothing_and_a_finished_asks_nothing() -> None:
    generation = only(max_tokens=0)
    assert (generation.max_tokens, generation.num_speculative_tokens) == (0, 0)
    assert generation.max_len == 4, "what a verifier emits along with what it tells of the prompt"
    assert complete(num_choices=2, generated_choices=tuple(came(choice=one, is_finished=True) for one in (1, 0))) == []
