"""Logits to probabilities: the same as transformers, for every parameter, without surprises at the edges."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwire.errors import InvalidRequestError
from draftwire.parameters import MAX_BIASED_TOKENS, PARAMETERS, SamplingParams
from draftwire.sampling import TOP_P_CANDIDATES, Span, is_distribution, probabilities, probabilities_of_spans

torch.set_num_threads(1)

UNHURRIED = settings(deadline=None)  # the machine may be busy
COMBINATIONS = [
    SamplingParams(*values)
    for values in product((0.3, 0.7, 1.0, 1.6, 100.0), (0, 2, 5, 49, 50, 1000), (0.01, 0.3, 0.9, 0.999, 1.0))
]
COMBINATIONS += [SamplingParams(*values) for values in product((0.3, 1.6), (0, 5), (0.9, 1.0), (1e-9, 0.02, 0.3, 1.0))]
TINY_TEMPERATURES = [1e-3, 1e-6, 1e-20, 1e-37, 1e-44, 1e-46, 1e-300, 5e-324]
LARGEST_BELOW_ONE = math.nextafter(1.0, 0.0)
NO_DISTRIBUTION = [
    [1.0, math.nan, 0.0],
    [math.nan] * 3,
    [-math.inf] * 3,
    [1.0, math.inf, 0.0],
    [-math.inf, math.nan, 1],
]
BIAS = ((3, 1.5), (0, -2.25), (17, 0.5), (41, -100.0))
STOPS = frozenset({7, 11, 30})
TEXT = [4, 17, 4, 49, 0, 22, 22, 22, 9]
"""Of a vocabulary of 50; tests say how much of it is the prompt."""


def label(value: object) -> str | None:
    """Names parameters by those that are not as usual."""
    if not isinstance(value, SamplingParams):
        return None
    named = [(name, getattr(value, name)) for name in PARAMETERS]
    usual = SamplingParams()
    return ",".join(f"{name}={held}" for name, held in named if held != getattr(usual, name))[:80] or "usual"


def random_logits(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(*shape, generator=generator, dtype=dtype)


def of_spans(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """`probabilities_of_spans` of a copy."""
    return probabilities_of_spans(logits.clone(), spans)


def of_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities of texts of one place each."""
    return of_spans(logits, [Span(one, 1) for one in params])


def transformers_probabilities(
    logits: Tensor,
    params: SamplingParams,
    text: Sequence[int] = (),
    prompt_len: int = 0,
    stops: frozenset[int] = frozenset(),
) -> Tensor:
    """What transformers makes of `[batch, vocab]` logits after one text; presence and frequency it does not have."""
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, sorted(stops)))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.tensor([list(text)] * len(logits), dtype=torch.int64).reshape(len(logits), len(text))
    for processor in processors:
        logits = processor(ids, logits)
    return logits.softmax(dim=-1)


def slow_probabilities(
    logits: list[float],
    params: SamplingParams,
    text: Sequence[int] = (),
    prompt_len: int = 0,
    stops: frozenset[int] = frozenset(),
) -> list[float]:
    """The definition for one row, word for word; NaN where no token is possible."""
    values, vocab, generated = list(logits), range(len(logits)), list(text[prompt_len:])
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in vocab:
        is_early_stop = token in stops and len(generated) < params.min_tokens
        if is_early_stop or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            values[token] = -math.inf
    for token in vocab:
        if token in text:
            penalty = params.repetition_penalty
            values[token] = values[token] * penalty if values[token] < 0.0 else values[token] / penalty
        if token in generated:
            values[token] -= params.presence_penalty
        values[token] -= params.frequency_penalty * generated.count(token)
    largest = max(values)
    if largest == -math.inf:
        return [math.nan for _ in vocab]
    if params.temperature == 0.0 or params.top_k == 1:
        return [1.0 if token == values.index(largest) else 0.0 for token in vocab]
    values = [value / params.temperature for value in values]
    if 0 < params.top_k < len(values):
        values = kept(values, sorted(values, reverse=True)[params.top_k - 1])
    if params.top_p < 1.0:
        probs = softmax(values)
        ranked = sorted(vocab, key=lambda token: -probs[token])
        size = next(size for size in range(1, len(ranked) + 1) if enough(probs, ranked[:size], params.top_p))
        values = [value if probs[token] >= probs[ranked[size - 1]] else -math.inf for token, value in enumerate(values)]
    probs = softmax(values)
    least = params.min_p * max(probs)
    return softmax([value if prob >= least else -math.inf for value, prob in zip(values, probs, strict=True)])


def kept(values: list[float], least: float) -> list[float]:
    return [value if value >= least else -math.inf for value in values]


def enough(probs: list[float], tokens: list[int], top_p: float) -> bool:
    return math.fsum(probs[token] for token in tokens) >= top_p or len(tokens) == len(probs)


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def assert_same_law(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    least = torch.finfo(ours.dtype).tiny  # exponentials that round to less may or may not become 0
    assert torch.equal(ours >= least, expected >= least)
    assert (ours - expected).abs().max() <= tolerance


# The same as transformers


@pytest.mark.parametrize("params", COMBINATIONS, ids=label)
def test_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    for seed in range(3):
        logits = random_logits(8, 50, seed=seed, dtype=torch.float64)
        assert_same_law(probabilities(logits, params), transformers_probabilities(logits, params), 1e-12)


@pytest.mark.parametrize("params", [p for p in COMBINATIONS if p.temperature >= 0.7], ids=label)
def test_float32_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(8, 50, seed=9)
    ours = probabilities(logits, params)
    assert ours.dtype == torch.float32
    assert_same_law(ours, transformers_probabilities(logits, params), 1e-6)


EDITS = [
    {"logit_bias": BIAS},
    {"allowed_token_ids": (4, 7, 9, 17, 22, 41)},
    {"min_tokens": 3},
    {"min_tokens": 4},
    {"min_tokens": 5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"repetition_penalty": 7.0},
    {"logit_bias": BIAS, "allowed_token_ids": tuple(range(3, 48))},
    {"logit_bias": BIAS, "repetition_penalty": 1.3},
    {"logit_bias": BIAS, "allowed_token_ids": tuple(range(3, 48)), "min_tokens": 5, "repetition_penalty": 1.2},
]
FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.7, "min_p": 0.05},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("edits", EDITS, ids=str)
def test_text_dependent_probabilities_equal_those_of_transformers(
    edits: dict[str, object], filters: dict[str, float], dtype: torch.dtype
) -> None:
    params, prompt_len = SamplingParams(**edits, **filters), 5  # so 4 tokens were generated
    for seed in range(3):
        logits = random_logits(1, 50, seed=seed, dtype=dtype)
        ours = of_spans(logits, [Span(params, 1, TEXT, prompt_len, STOPS)])
        expected = transformers_probabilities(logits, params, TEXT, prompt_len, STOPS)
        assert_same_law(ours, expected, 1e-12 if dtype == torch.float64 else 1e-6)


def test_every_parameter_has_an_effect_of_its_own() -> None:
    # Otherwise the comparisons above could hold for a parameter that neither side reads.
    values = [0.7, 3, 0.5, 0.4, 3.0, 0.5, 0.5, BIAS, (1, 2, 3), 9]
    logits = 0.3 * random_logits(1, 50, seed=1, dtype=torch.float64)
    plain = of_spans(logits, [Span(SamplingParams(), 1, TEXT, 5, STOPS)])
    names = [name for name in PARAMETERS if name != "structured_output"]  # which acts through a span's masks
    for name, value in zip(names, values, strict=True):
        changed = of_spans(logits, [Span(SamplingParams(**{name: value}), 1, TEXT, 5, STOPS)])
        assert (changed - plain).abs().max() > 1e-3, name


# Order


def test_top_p_is_applied_after_top_k_and_temperature() -> None:
    # Masses 0.4, 0.3, 0.2, 0.1. Top 2 leaves 4/7 and 3/7, so that 0.5 is reached by the first alone.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    both = probabilities(logits, SamplingParams(top_k=2, top_p=0.5))
    assert both.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (probabilities(logits, SamplingParams(top_p=0.5)) > 0.0).tolist() == [True, True, False, False]
    # At temperature 1/2 the masses are 16/30, 9/30, 4/30, 1/30.
    cold = probabilities(logits, SamplingParams(temperature=0.5, top_p=0.5))
    assert cold.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_min_p_is_applied_after_temperature() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert (probabilities(logits, SamplingParams(min_p=0.6)) > 0.0).tolist() == [True, True, False, False]
    cold = SamplingParams(temperature=0.5, min_p=0.6)  # 9/16 is less than 0.6
    assert (probabilities(logits, cold) > 0.0).tolist() == [True, False, False, False]


def test_bias_comes_before_repetition_penalty_and_that_before_presence_and_frequency_penalty() -> None:
    params = SamplingParams(logit_bias=((0, 3.0),), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=1.5)
    probs = of_spans(torch.tensor([[-1.0, 0.0]], dtype=torch.float64), [Span(params, 1, [0, 0])])[0]
    assert (probs[0] / probs[1]).log().item() == pytest.approx((-1.0 + 3.0) / 2.0 - 0.5 - 2 * 1.5)


def test_penalties_come_before_temperature() -> None:
    params = SamplingParams(temperature=0.5, frequency_penalty=1.0)
    probs = of_spans(torch.zeros(1, 2, dtype=torch.float64), [Span(params, 1, [1])])[0]
    assert (probs[0] / probs[1]).log().item() == pytest.approx(1.0 / 0.5)


# Greedy decoding, ties and borders


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)], ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_row_is_one_hot_at_the_first_maximum(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, -9.0, -8.0, -8.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.equal(probabilities(logits, params).float(), expected)


def test_temperature_zero_ignores_what_leaves_out_unlikely_tokens() -> None:
    logits = random_logits(16, 50, seed=3)
    greedy = probabilities(logits, SamplingParams(temperature=0.0))
    assert torch.equal(greedy, probabilities(logits, SamplingParams(temperature=0.0, top_k=7, top_p=0.3, min_p=0.9)))
    assert torch.equal(greedy.argmax(dim=-1), logits.argmax(dim=-1))


def test_greedy_decoding_takes_the_maximum_after_bias_masks_and_penalties() -> None:
    logits, greedy = torch.tensor([[5.0, 4.0, 3.0, 2.0]]), SamplingParams(temperature=0.0)
    for changes, text, expected in [
        ({}, [], 0),
        ({"logit_bias": ((2, 2.5),)}, [], 2),
        ({"allowed_token_ids": (3, 1)}, [], 1),
        ({"min_tokens": 1}, [], 1),
        ({"repetition_penalty": 2.0}, [0], 1),
        ({"presence_penalty": 2.0}, [0], 1),
        ({"frequency_penalty": 1.1}, [0, 0, 1, 1], 2),
    ]:
        span = Span(replace(greedy, **changes), 1, text, 0, frozenset({0}))
        assert of_spans(logits, [span])[0].argmax() == expected, changes
        assert of_spans(logits, [span])[0].max() == 1.0


@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_temperature_gives_the_maximum_all_mass_and_does_not_overflow(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, -math.inf], [-1e4, 1.0, 3.0, 2.0]], dtype=dtype)
    for params in (SamplingParams(temperature), SamplingParams(temperature, top_k=2, top_p=0.9, min_p=0.1)):
        expected = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=dtype)
        assert torch.equal(probabilities(logits, params), expected)


@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
def test_tiny_temperature_shares_the_mass_among_equal_maxima(temperature: float) -> None:
    logits = torch.tensor([2.0, 5.0, 5.0, -math.inf])
    assert probabilities(logits, SamplingParams(temperature)).tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
def test_tiny_temperature_of_one_row_does_not_change_the_others(temperature: float) -> None:
    logits = random_logits(3, 50, seed=13)
    order = [SamplingParams(1.6), SamplingParams(temperature), SamplingParams(0.0)]
    together = of_rows(logits, order)
    for row, given_, params in zip(together, logits, order, strict=True):
        assert torch.equal(row, probabilities(given_, params))


@pytest.mark.parametrize("top_p", [1e-6, 1e-37, 1e-46, 1e-300, 5e-324])
def test_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    assert probabilities(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(top_p=top_p)).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("penalty", [1e-3, 1e-37, 1e-46, 5e-324, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-20, 1e-3, 1.0])
def test_extreme_repetition_penalty_gives_a_distribution(
    penalty: float, dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.tensor([[40.0, 3.0, -5.0, 0.0, -math.inf]], dtype=dtype)
    params = SamplingParams(temperature, repetition_penalty=penalty)
    probs = of_spans(logits, [Span(params, 1, [0, 2, 3, 4])])
    assert bool(is_distribution(probs).all())
    assert probs.sum().item() == pytest.approx(1.0)
    assert probs[0].argmax() == (0 if penalty < 1.0 else 1)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=2), [3, 3, 3, 0, 0, 0]),
        (SamplingParams(top_k=3), [3, 3, 3, 0, 0, 0]),
        (SamplingParams(top_k=4), [3, 3, 3, 0, 1, 1]),
        (SamplingParams(top_k=5), [3, 3, 3, 0, 1, 1]),
        (SamplingParams(top_p=0.2), [3, 3, 3, 0, 0, 0]),
        (SamplingParams(top_p=0.9), [3, 3, 3, 0, 1, 1]),
        (SamplingParams(min_p=1.0), [3, 3, 3, 0, 0, 0]),
        (SamplingParams(min_p=0.34), [3, 3, 3, 0, 0, 0]),
        (SamplingParams(min_p=0.33), [3, 3, 3, 0, 1, 1]),
    ],
    ids=label,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_as_likely_as_the_last_that_is_kept_are_kept(
    params: SamplingParams, expected: list[int], dtype: torch.dtype
) -> None:
    # Masses 3/11 (three times) and 1/11 (twice); the fourth token is impossible.
    logits = torch.tensor([3.0, 3.0, 3.0, 0.0, 1.0, 1.0], dtype=dtype).log()
    share = torch.tensor(expected, dtype=dtype)
    assert (probabilities(logits, params) - share / share.sum()).abs().max() <= 1e-6


def test_min_p_keeps_a_token_at_the_border() -> None:
    logits = torch.tensor([2.0, 2.0 + math.log(0.25), -9.0], dtype=torch.float64)
    for min_p, num_kept in ((0.25, 2), (0.25 + 1e-14, 1), (0.25 - 1e-14, 2), (1.0, 1), (1e-4, 2), (1e-9, 3)):
        assert (probabilities(logits, SamplingParams(min_p=min_p)) > 0.0).sum() == num_kept, min_p


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 1026, 2999, 3000])
@pytest.mark.parametrize("vocab_size", [3000])
def test_top_p_keeps_just_as_many_tokens_as_reach_it_however_many_that_are(size: int, vocab_size: int) -> None:
    assert 1023 < TOP_P_CANDIDATES < 1026
    weights = torch.arange(vocab_size, 0, -1, dtype=torch.float64) + vocab_size
    mass = (weights / weights.sum()).cumsum(0)
    top_p = (mass[size - 1] - 0.3 * weights[size - 1] / weights.sum()).item()  # in the middle of the last one's share
    shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(size))
    for rows in (1, 3):
        logits = torch.full((rows, vocab_size), 0.0, dtype=torch.float64)
        logits[:, 0] = 50.0  # a row with few candidates beside the one with many
        logits[rows // 2] = weights[shuffled].log()
        probs = probabilities(logits, SamplingParams(top_p=top_p))
        assert torch.equal(probs[rows // 2] > 0.0, shuffled < size)
        assert (probs > 0.0).sum(dim=1).tolist() == [size if row == rows // 2 else 1 for row in range(rows)]


@pytest.mark.parametrize("vocab_size", [1023, 1024, 1025, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97, 0.9999])
def test_top_p_of_a_large_vocabulary_equals_that_of_transformers(vocab_size: int, top_p: float) -> None:
    logits = random_logits(4, vocab_size, seed=21, dtype=torch.float64)
    logits *= torch.tensor([0.01, 0.1, 1.0, 3.0], dtype=torch.float64).unsqueeze(1)
    params = SamplingParams(temperature=1.1, top_p=top_p)
    assert_same_law(probabilities(logits, params), transformers_probabilities(logits, params), 1e-12)


def test_rows_of_a_large_vocabulary_keep_their_own_top_p() -> None:
    logits = 0.1 * random_logits(6, 5000, seed=24)
    logits[2, 9] = 30.0
    order = [SamplingParams(top_p=top_p) for top_p in (0.9, 0.5, 0.7, 1.0, 0.3, 0.99)]
    together = of_rows(logits, order)
    for row, given_, params in zip(together, logits, order, strict=True):
        assert torch.equal(row, probabilities(given_, params))
    assert (together > 0.0).sum(dim=1).unique().numel() == 6


def test_top_p_keeps_all_of_a_large_vocabulary_whose_tokens_are_equally_likely() -> None:
    logits = torch.zeros(2, 4096)
    logits[1, 77] = 20.0
    probs = probabilities(logits, SamplingParams(top_p=0.3))
    assert (probs > 0.0).sum(dim=1).tolist() == [4096, 1]


@pytest.mark.parametrize("params", COMBINATIONS, ids=label)
def test_impossible_tokens_stay_impossible(params: SamplingParams) -> None:
    logits = random_logits(8, 50, seed=5)
    impossible = torch.rand(8, 50, generator=torch.Generator().manual_seed(6)) < 0.9
    impossible[:, 17] = False
    rows = probabilities(logits.masked_fill(impossible, -math.inf), params)
    assert bool((rows[impossible] == 0.0).all())
    assert (rows.sum(dim=-1) - 1.0).abs().max() <= 1e-5


def test_impossible_tokens_stay_impossible_whatever_is_added_to_their_logits() -> None:
    params = SamplingParams(logit_bias=((1, 100.0),), repetition_penalty=0.01, presence_penalty=-2.0)
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    assert of_spans(logits, [Span(params, 1, [1, 1])]).tolist() == [[0.5, 0.0, 0.5]]


# Bias, masks and penalties


def test_only_allowed_tokens_are_possible_and_keep_their_ratios() -> None:
    logits = random_logits(3, 50, seed=14, dtype=torch.float64)
    allowed = (49, 0, 7)
    plain, masked = (
        probabilities(logits, SamplingParams()),
        probabilities(logits, SamplingParams(allowed_token_ids=allowed)),
    )
    expected = torch.zeros_like(plain)
    expected[:, list(allowed)] = plain[:, list(allowed)] / plain[:, list(allowed)].sum(dim=1, keepdim=True)
    assert_same_law(masked, expected, 1e-15)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(2,)),
        SamplingParams(0.0, allowed_token_ids=(2,)),
        SamplingParams(0.7, 5, 0.9, 0.1, allowed_token_ids=(2,)),
        SamplingParams(1e-20, allowed_token_ids=(2,)),
        SamplingParams(allowed_token_ids=(1, 2), min_tokens=1),
    ],
    ids=label,
)
def test_row_in_which_masks_leave_nothing_is_nan_throughout_and_alone(params: SamplingParams) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    logits[1, 2] = -math.inf
    good, bad = Span(SamplingParams(0.8, 2), 1), Span(params, 1, (), 0, frozenset({1}))
    probs = of_spans(logits, [good, bad, good])
    assert is_distribution(probs).tolist() == [True, False, True]
    assert bool(probs[1].isnan().all())
    assert torch.equal(probs[::2], of_spans(logits[::2], [good, good]))


@pytest.mark.parametrize("generated", range(5))
@pytest.mark.parametrize("min_tokens", range(5))
def test_no_stop_token_is_possible_before_min_tokens_are_generated(generated: int, min_tokens: int) -> None:
    text = [1, 2, 3] + [4] * generated
    span = Span(SamplingParams(min_tokens=min_tokens), 1, text, 3, frozenset({5, 0, 60}))
    probs = of_spans(torch.zeros(1, 6), [span])[0]
    masked = [0.0, 0.25, 0.25, 0.25, 0.25, 0.0]
    assert probs.tolist() == (masked if generated < min_tokens else pytest.approx([1 / 6] * 6))


def test_presence_and_frequency_penalty_count_generated_tokens_alone() -> None:
    # As OpenAI states it: logit - count * frequency_penalty - (count > 0) * presence_penalty.
    prompt, output = [0, 1, 1, 9], [1, 2, 2, 2, 9, 5, 5]
    logits = random_logits(1, 10, seed=15, dtype=torch.float64)
    for presence, frequency in product((-2.0, 0.0, 0.7, 2.0), (-2.0, 0.0, 0.3, 2.0)):
        values = logits[0].tolist()
        for token in range(10):
            count = output.count(token)
            values[token] = values[token] - count * frequency - float(count > 0) * presence
        params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
        ours = of_spans(logits, [Span(params, 1, prompt + output, len(prompt))])[0]
        assert (ours - torch.tensor(values, dtype=torch.float64).softmax(0)).abs().max() <= 1e-12


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    logits = torch.tensor([[1.0, -1.0, 3.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64).softmax(0)
    for text, prompt_len in (([0, 1], 2), ([0, 1], 0), ([0, 1, 1, 0, 0], 1), ([3, 0, 1, 3], 2)):
        ours = of_spans(logits, [Span(params, 1, text, prompt_len)])[0]
        assert (ours - expected).abs().max() <= 1e-15


def test_distribution_that_does_not_read_the_text_needs_none() -> None:
    logits = random_logits(3, 50, seed=16)
    for changes in ({"logit_bias": BIAS}, {"allowed_token_ids": (1, 2)}, {"top_p": 0.9, "min_p": 0.1, "top_k": 9}, {}):
        params = SamplingParams(0.7, **changes)
        assert not params.penalizes
        assert torch.equal(of_spans(logits, [Span(params, 3)]), of_spans(logits, [Span(params, 3, TEXT, 5, STOPS)]))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 2}).penalizes


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("min_tokens", [1, 2, 3, 9])
def test_min_tokens_needs_the_length_of_the_text_alone(num_rows: int, min_tokens: int) -> None:
    logits = random_logits(num_rows, 50, seed=17)
    params = SamplingParams(min_tokens=min_tokens)
    with_text = Span(params, num_rows, TEXT, len(TEXT) - 3, STOPS)
    without = Span(params, num_rows, (), len(TEXT) - 3, STOPS, text_len=len(TEXT))
    assert torch.equal(of_spans(logits, [with_text]), of_spans(logits, [without]))


# Spans


READING = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.4),
    SamplingParams(presence_penalty=1.1),
    SamplingParams(frequency_penalty=0.9),
    SamplingParams(frequency_penalty=-0.9, presence_penalty=0.3),
    *[SamplingParams(min_tokens=number) for number in (1, 3, 6, 100)],
    SamplingParams(0.0, repetition_penalty=1.7, frequency_penalty=2.0, min_tokens=3),
    SamplingParams(0.7, 20, 0.95, 0.01, 1.3, 0.6, 0.8, ((3, 2.0),), tuple(range(40)), 4),
]
DRAFTS = {
    "none": [],
    "one": [4],
    "different": [3, 8, 12, 30],
    "repeated": [8, 8, 8, 8, 8],
    "from the context": [4, 17, 0, 4, 22],
    "beyond the vocabulary": [50, 8, 77, 8, 50, 50],
}
CONTEXTS = {"none": [], "plain": TEXT, "beyond the vocabulary": [99, 4, 50, 4, 51], "nothing else": [50, 99]}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
@pytest.mark.parametrize("params", READING, ids=label)
def test_span_along_a_draft_equals_spans_of_one_place_after_a_text_that_grows(
    params: SamplingParams, draft: list[int], context: list[int]
) -> None:
    logits = random_logits(len(draft) + 1, 50, seed=17, dtype=torch.float64)
    text = context + draft
    # The prompt ends at the start, inside the context, before the draft, inside it, at its end, and after it.
    for prompt_len in sorted({0, len(context) // 2, len(context), len(context) + 2, len(text), len(text) + 2}):
        rows = of_spans(logits, [Span(params, len(draft) + 1, text, prompt_len, STOPS)])
        for count, row in enumerate(rows):
            grown = text[: len(context) + count]
            alone = of_spans(logits[count : count + 1], [Span(params, 1, grown, prompt_len, STOPS)])[0]
            assert torch.equal(row, alone)
            slow = slow_probabilities(logits[count].tolist(), params, grown, prompt_len, STOPS)
            assert_same_law(row, torch.tensor(slow, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("params", READING, ids=label)
def test_span_in_the_middle_of_a_batch_equals_the_span_alone(params: SamplingParams) -> None:
    logits = random_logits(9, 50, seed=18)
    text = [*TEXT, 8, 8, 3]
    spans = [
        Span(SamplingParams(1.3, 5, repetition_penalty=1.5), 2, [5, 6, 7], 1, STOPS),
        Span(params, 4, text, 6, STOPS),
        Span(SamplingParams(frequency_penalty=2.0, min_tokens=9), 3, [6, 6, 6], 0, frozenset({1})),
    ]
    together = of_spans(logits, spans)
    for span, start in zip(spans, (0, 2, 6), strict=True):
        assert torch.equal(
            together[start : start + span.num_rows], of_spans(logits[start : start + span.num_rows], [span])
        )


def test_spans_without_places_have_no_effect() -> None:
    logits = random_logits(2, 50, seed=19)
    params = SamplingParams(0.7, 20, 0.95, 0.01, 1.3, 0.6, 0.8, min_tokens=4)
    empty, full = Span(params, 0, TEXT, 5, STOPS), Span(params, 2, TEXT, 5, STOPS)
    assert torch.equal(of_spans(logits, [empty, full, empty]), of_spans(logits, [full]))
    assert of_spans(logits[:0], [empty]).shape == (0, 50)
    assert of_spans(logits[:0], []).shape == (0, 50)


def tokens(below: int) -> st.SearchStrategy[int]:
    return st.integers(0, below - 1)


VOCAB_SIZE = 8


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    def usually(value: object, others: st.SearchStrategy[object]) -> object:
        return draw(st.one_of(st.just(value), others))

    biases = st.dictionaries(tokens(VOCAB_SIZE), st.sampled_from([-100.0, -1.5, 0.5, 3.0]), max_size=3)
    # No border of top-p or min-p may lie so close to a sum or a ratio that rounding decides.
    return SamplingParams(
        temperature=usually(1.0, st.sampled_from([0.0, 0.31, 0.77, 2.3])),
        top_k=usually(0, st.integers(0, VOCAB_SIZE + 1)),
        top_p=usually(1.0, st.sampled_from([0.01317, 0.29171, 0.53719, 0.73123, 0.90173, 0.99913])),
        min_p=usually(0.0, st.sampled_from([1e-7, 0.0137, 0.2713, 0.7719, 1.0])),
        repetition_penalty=usually(1.0, st.sampled_from([0.37, 1.3, 41.0])),
        # Multiples of powers of 2: sums are exact, so equal logits are equal in whatever order they are made.
        presence_penalty=usually(0.0, st.sampled_from([-1.6875, 0.375, 2.0])),
        frequency_penalty=usually(0.0, st.sampled_from([-1.0625, 0.625, 2.0])),
        logit_bias=tuple(usually({}, biases).items()),
        allowed_token_ids=usually(None, st.sets(tokens(VOCAB_SIZE), min_size=1).map(tuple)),
        min_tokens=usually(0, st.integers(0, 6)),
    )


@st.composite
def spans(draw: st.DrawFn) -> Span:
    num_rows = draw(st.integers(1, 4))
    text = draw(st.lists(tokens(VOCAB_SIZE + 2), min_size=num_rows - 1, max_size=8))
    stops = draw(st.frozensets(tokens(VOCAB_SIZE + 2), max_size=3))
    return Span(draw(sampling_params()), num_rows, text, draw(st.integers(0, len(text) + 1)), stops)


@given(st.lists(spans(), min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
@settings(UNHURRIED, max_examples=200)
def test_random_batches_of_spans_follow_the_definition_row_by_row(batch: list[Span], seed: int, step: float) -> None:
    num_rows = sum(span.num_rows for span in batch)
    logits = random_logits(num_rows, VOCAB_SIZE, seed=seed, dtype=torch.float64)
    if step:
        logits = (logits / step).round() * step  # many ties
    impossible = torch.rand(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + 1)) < 0.1
    logits.masked_fill_(impossible, -math.inf)
    probs, index = of_spans(logits, batch), 0
    for span in batch:
        for later in range(span.num_rows - 1, -1, -1):
            text = span.text[: len(span.text) - later]
            slow = slow_probabilities(logits[index].tolist(), span.params, text, span.prompt_len, span.stop_token_ids)
            expected = torch.tensor(slow, dtype=torch.float64)
            if expected.isnan().any():
                assert bool(probs[index].isnan().all())
            else:
                assert_same_law(probs[index], expected, 1e-12)
            index += 1


# Rows and batches


@pytest.mark.parametrize("params", COMBINATIONS[::5], ids=label)
def test_rows_are_independent_of_each_other(params: SamplingParams) -> None:
    logits = random_logits(2, 3, 50, seed=7)
    together = probabilities(logits, params)
    assert together.shape == logits.shape
    for first, second in product(range(2), range(3)):
        assert torch.equal(probabilities(logits[first, second], params), together[first, second])


def test_logits_are_not_changed() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = random_logits(4, 50, seed=8, dtype=dtype)
        before = logits.clone()
        probabilities(logits, SamplingParams(0.5, 5, 0.5, logit_bias=BIAS))
        assert torch.equal(logits, before)


MIXED = [
    SamplingParams(),
    SamplingParams(0.0),
    SamplingParams(0.7, 5, 0.9),
    SamplingParams(),
    SamplingParams(top_k=1),
    SamplingParams(1.6, 0, 0.3),
    SamplingParams(0.7, 5, 0.9),
    SamplingParams(0.7, 5),
    SamplingParams(1.6, min_p=0.2),
    SamplingParams(0.9, 1000, logit_bias=BIAS),
    SamplingParams(1e-6, allowed_token_ids=(1, 2, 7, 30)),
    SamplingParams(1.1, 20, 0.8, 0.01, logit_bias=BIAS),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_with_parameters_of_their_own_are_as_if_alone(dtype: torch.dtype) -> None:
    # To the bit: what the drafter draws from in one batch is what it sends, and what the verifier judges by.
    logits = random_logits(len(MIXED), 50, seed=10).to(dtype)
    for order in (MIXED, MIXED[::-1], MIXED[3:] + MIXED[:3], [MIXED[2]] * len(MIXED)):
        rows = of_rows(logits, order)
        assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert rows.shape == logits.shape
        for row, given_, params in zip(rows, logits, order, strict=True):
            assert torch.equal(row, probabilities(given_, params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_few_bits_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(2, 50, seed=20).to(dtype)
    for params in (*MIXED, READING[-1]):
        batch = [Span(params, 2, TEXT, 5, STOPS)]
        assert torch.equal(of_spans(logits, batch), of_spans(logits.float(), batch))


def test_rows_of_equal_parameters_are_exactly_those_computed_together() -> None:
    # The drafter computes rows in batches of any make-up, and what it draws from is what is sent.
    logits = random_logits(8, 50, seed=12)
    assert torch.equal(of_rows(logits, [MIXED[2]] * 8), probabilities(logits, MIXED[2]))
    parts = [Span(MIXED[2], 3), Span(MIXED[2], 1), Span(MIXED[2], 4)]
    assert torch.equal(of_spans(logits, parts), probabilities(logits, MIXED[2]))


# Failed rows


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.0), SamplingParams(0.5, 2, 0.9), SamplingParams(top_k=1)], ids=label
)
@pytest.mark.parametrize("bad", NO_DISTRIBUTION, ids=str)
def test_row_with_a_nan_or_without_a_possible_token_is_an_error(params: SamplingParams, bad: list[float]) -> None:
    good = [1.0, 2.0, 3.0]
    probabilities(torch.tensor([good, good]), params)
    with pytest.raises(ValueError, match="logits"):
        probabilities(torch.tensor([good, bad]), params)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad", range(len(MIXED)))
def test_failed_row_is_nan_throughout_and_does_not_touch_rows_with_other_parameters(bad: int, value: float) -> None:
    logits = random_logits(len(MIXED), 50, seed=11)
    good = of_rows(logits, MIXED)
    assert bool(is_distribution(good).all())
    logits[bad, slice(None) if value == -math.inf else 7] = value
    rows = of_rows(logits, MIXED)
    others = [index for index in range(len(MIXED)) if index != bad]
    assert is_distribution(rows).tolist() == [index != bad for index in range(len(MIXED))]
    assert bool(rows[bad].isnan().all())
    assert torch.equal(rows[others], good[others])


@pytest.mark.parametrize("bad", NO_DISTRIBUTION, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        *[SamplingParams(temperature) for temperature in (0.0, 1.0, 0.7, 1e-30)],
        *[SamplingParams(top_k=k) for k in (1, 2, 3)],
        *[SamplingParams(top_p=p) for p in (1e-9, 0.5, 0.999)],
        *[SamplingParams(min_p=p) for p in (1e-9, 0.5, 1.0)],
        SamplingParams(0.7, 2, 0.9, 0.1),
        SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0),
        SamplingParams(0.0, repetition_penalty=0.5),
        SamplingParams(logit_bias=((0, -100.0), (1, 100.0))),
    ],
    ids=label,
)
def test_failed_row_is_nan_throughout_whatever_the_parameters(params: SamplingParams, bad: list[float]) -> None:
    good = [1.0, 2.0, 3.0]
    span = Span(params, 3, [0, 1, 2])
    rows = of_spans(torch.tensor([good, bad, good]), [span])
    assert is_distribution(rows).tolist() == [True, False, True]
    assert bool(rows[1].isnan().all())
    expected = of_spans(torch.tensor([good, good, good]), [span])
    assert torch.equal(rows[::2], expected[::2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_do_not_hide_that_logits_are_not_finite(value: float, temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, value, 3.0]])
    for changes in ({"allowed_token_ids": (0, 1)}, {"min_tokens": 1}, {"logit_bias": ((2, -100.0),)}):
        span = Span(SamplingParams(temperature, **changes), 1, (), 0, frozenset({2}))
        assert bool(of_spans(logits, [span]).isnan().all()), changes


def test_failed_row_of_a_large_vocabulary_does_not_touch_rows_with_mass_spread_wide() -> None:
    logits = random_logits(3, 4000, seed=22) * 0.01
    params = SamplingParams(top_p=0.9)
    good = probabilities(logits, params)
    logits[1, 3999] = math.nan
    rows = of_rows(logits, [params] * 3)
    assert is_distribution(rows).tolist() == [True, False, True]
    assert bool(rows[1].isnan().all())
    assert torch.equal(rows[::2], good[::2])


# Values that are refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1e-9),
        ("temperature", 100.001),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("min_p", -1e-9),
        ("min_p", 1.0001),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 100.001),
        ("repetition_penalty", math.nan),
        *product(("presence_penalty", "frequency_penalty"), (-2.001, 2.001, math.nan, math.inf, -math.inf)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.001),)),
        ("logit_bias", ((1, 1.0), (2, -100.001))),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 1.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(MAX_BIASED_TOKENS + 1))),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (3, -1)),
        ("min_tokens", -1),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "values",
    [
        (0.0, 0, 1.0),
        (100.0, 2**31, 5e-324),
        (5e-324, 1, LARGEST_BELOW_ONE),
        (1.0, 0, 1.0, 0.0, 5e-324, -2.0, -2.0, ((0, -100.0), (2**31, 100.0)), (0,), 0),
        (1.0, 0, 1.0, 1.0, 100.0, 2.0, 2.0, tuple((token, 1.0) for token in range(MAX_BIASED_TOKENS)), (2**31,), 2**31),
    ],
    ids=["lowest", "highest", "next to lowest", "lowest of the others", "highest of the others"],
)
def test_parameters_at_the_border_are_taken_and_give_distributions(values: tuple[object, ...]) -> None:
    params = SamplingParams(*values)
    if params.allowed_token_ids != {2**31}:  # which leaves nothing
        logits = random_logits(2, 2000, seed=23)
        assert bool(is_distribution(of_spans(logits, [Span(params, 2, [5, 6, 7], 1, STOPS)])).all())


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_token_beyond_the_vocabulary_is_refused_by_name(name: str) -> None:
    good = SamplingParams(logit_bias=((9, 1.0),), allowed_token_ids=(9, 0))
    good.check_vocabulary(10)
    SamplingParams().check_vocabulary(1)
    bad = replace(good, **{name: ((10, 1.0),) if name == "logit_bias" else (0, 10)})
    with pytest.raises(InvalidRequestError, match=f"^{name} .*0..9.* 10$"):
        bad.check_vocabulary(10)


def test_params_say_which_of_them_are_greedy_truncate_and_penalize() -> None:
    def traits(**values: object) -> tuple[bool, ...]:
        params = SamplingParams(**values)
        return params.greedy, params.truncates, params.penalizes

    none, greedy, truncates = (False,) * 3, (True, False, False), (False, True, False)
    for values in ({}, {"temperature": 5e-324}, {"logit_bias": BIAS}, {"allowed_token_ids": (1,)}):
        assert traits(**values) == none
    for values in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}):
        assert traits(**values) == greedy
    for values in ({"top_k": 2}, {"top_p": LARGEST_BELOW_ONE}, {"min_p": 5e-324}):
        assert traits(**values) == truncates
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert traits(**{name: value}) == (False, False, True)
    assert traits(min_tokens=1) == none


def test_a_forms_masks_take_tokens_away_row_by_row_before_penalties_and_hide_no_nan() -> None:
    """For vocabularies smaller and larger than the masks, whose tokens beyond are not possible."""
    masks = np.packbits(
        np.array([[1, 0, 1, 1, 0, 0, 0, 1], [0, 1, 0, 1, 0, 0, 0, 0]], dtype=bool), axis=1, bitorder="little"
    )
    for vocab_size in (5, 8, 11):
        logits = torch.linspace(-1.0, 2.0, 3 * vocab_size, dtype=torch.float64).reshape(3, vocab_size)
        params = SamplingParams(0.7, repetition_penalty=1.5, logit_bias=((1, 3.0),))
        spans = [Span(params, 2, [0, 3, 3], 1, masks=masks), Span(params, 1, [0, 3, 3], 1)]
        probs = probabilities_of_spans(logits.clone(), spans)
        free = probabilities_of_spans(logits.clone(), [Span(params, 2, [0, 3, 3], 1), Span(params, 1, [0, 3, 3], 1)])
        for row, possible in enumerate(([0, 2, 3, 7], [1, 3])):
            kept = [token for token in possible if token < vocab_size]
            expected = torch.zeros(vocab_size, dtype=torch.float64)
            expected[kept] = free[row, kept] / free[row, kept].sum()
            assert (probs[row] - expected).abs().max() < 1e-12
        assert torch.equal(probs[2], free[2])
        logits[0, 1] = math.nan
        assert is_distribution(probabilities_of_spans(logits, spans)).tolist() == [False, True, True]
