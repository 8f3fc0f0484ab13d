"""Logits to probabilities: the same as transformers, for every parameter, without surprises at the edges."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import every
from definitions import defined_law
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
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
from draftwire.method.sampling import (
    TOP_P_CANDIDATES,
    Span,
    TokenEdits,
    is_distribution,
    probabilities,
    probabilities_of_spans,
)
from draftwire.requests.parameters import MAX_BIASED_TOKENS, SamplingParams

torch.set_num_threads(1)

COMBINATIONS = [
    SamplingParams(*values)
    for values in product((0.3, 0.7, 1.0, 1.6, 100.0), (0, 2, 5, 49, 50, 1000), (0.01, 0.3, 0.9, 0.999, 1.0))
]
COMBINATIONS += [SamplingParams(*values) for values in product((0.3, 1.6), (0, 5), (0.9, 1.0), (1e-9, 0.02, 0.3, 1.0))]

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


def random_logits(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(*shape, generator=generator, dtype=dtype)


def of_spans(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """`probabilities_of_spans` of a copy."""
    return probabilities_of_spans(logits.clone(), spans)


def of_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities of texts of one place each."""
    return of_spans(logits, [Span(one, 1) for one in params])


def transformers_probabilities(logits: Tensor, params: SamplingParams, text: Sequence[int] = ()) -> Tensor:
    """What transformers makes of `[batch, vocab]` logits after one text; presence and frequency it does not have."""
    allowed = list(params.allowed_token_ids or ())
    processors: list[tuple[bool, Callable[[], LogitsProcessor]]] = [
        (
            bool(params.logit_bias),
            lambda: SequenceBiasLogitsProcessor({(one,): bias for one, bias in params.logit_bias}),
        ),
        (bool(allowed), lambda: PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1)),
        (params.min_tokens > 0, lambda: MinNewTokensLengthLogitsProcessor(5, params.min_tokens, sorted(STOPS))),
        (params.repetition_penalty != 1.0, lambda: RepetitionPenaltyLogitsProcessor(params.repetition_penalty)),
        (params.temperature != 1.0, lambda: TemperatureLogitsWarper(params.temperature)),
        (params.top_k > 0, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1.0, lambda: TopPLogitsWarper(params.top_p)),
        (params.min_p > 0.0, lambda: MinPLogitsWarper(params.min_p)),
    ]
    ids = torch.tensor([list(text)] * len(logits), dtype=torch.int64).reshape(len(logits), len(text))
    for is_used, processor in processors:
        logits = processor()(ids, logits) if is_used else logits
    return logits.softmax(dim=-1)


def defined(logits: Tensor, params: SamplingParams, *given: object) -> Tensor:
    """The definition, of one row."""
    return torch.tensor(defined_law(logits.tolist(), params, *given), dtype=torch.float64)  # type: ignore[arg-type]


def assert_same_law(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    least = torch.finfo(ours.dtype).tiny  # exponentials that round to less may or may not become 0
    assert torch.equal(ours >= least, expected >= least)
    assert (ours - expected).abs().max() <= tolerance


# The same as transformers


EDITS = [
    {},
    {"logit_bias": BIAS},
    {"allowed_token_ids": (4, 7, 9, 17, 22, 41)},
    *[{"min_tokens": number} for number in (3, 4, 5)],
    *[{"repetition_penalty": penalty} for penalty in (1.3, 0.6, 7.0)],
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


@every("params", [SamplingParams(**edits, **filters) for edits in EDITS for filters in FILTERS] + COMBINATIONS)
def test_probabilities_equal_those_of_transformers_in_both_precisions(params: SamplingParams) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        if dtype is torch.float64 or params.temperature >= 0.7:
            logits = random_logits(4, 50, seed=9, dtype=dtype)
            expected = transformers_probabilities(logits, params, TEXT)
            for row, one in enumerate(expected):
                ours = of_spans(logits[[row]], [Span(params, 1, TEXT, 5, STOPS)])  # so 4 tokens were generated
                assert ours.dtype == dtype
                assert_same_law(ours[0], one, tolerance)


# Greedy decoding, ties and borders


@every("params", [SamplingParams(0.0), SamplingParams(top_k=1), SamplingParams(0.0, top_k=7, top_p=0.3, min_p=0.9)])
@every("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_row_is_one_hot_at_the_first_maximum(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, -9.0, -8.0, -8.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.equal(probabilities(logits, params).float(), expected)


@every("temperature", [1e-3, 1e-6, 1e-20, 1e-37, 1e-44, 1e-46, 1e-300, 5e-324])
@every("dtype", [torch.float32, torch.float64])
def test_tiny_temperature_gives_maxima_all_mass_and_touches_no_other_row(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, -math.inf], [-1e4, 1.0, 3.0, 2.0], [2.0, 5.0, 5.0, -math.inf]], dtype=dtype)
    expected = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0]], dtype=dtype)
    for params in (SamplingParams(temperature), SamplingParams(temperature, top_k=2, top_p=0.9, min_p=0.1)):
        assert torch.equal(probabilities(logits, params), expected)
    others = [SamplingParams(1.6), SamplingParams(temperature), SamplingParams(0.0)]
    for row, given_, params in zip(of_rows(logits, others), logits, others, strict=True):
        assert torch.equal(row, probabilities(given_, params))
    for top_p in (1e-6, temperature):
        one = probabilities(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(top_p=top_p))
        assert one.tolist() == [0.0, 1.0, 0.0] or top_p == 1e-3


@every("penalty", [1e-3, 1e-37, 1e-46, 5e-324, 100.0])
@every("dtype", [torch.float32, torch.float64])
@every("temperature", [5e-324, 1e-20, 1e-3, 1.0])
def test_extreme_repetition_penalty_gives_a_distribution(
    penalty: float, dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.tensor([[40.0, 3.0, -5.0, 0.0, -math.inf]], dtype=dtype)
    params = SamplingParams(temperature, repetition_penalty=penalty)
    probs = of_spans(logits, [Span(params, 1, [0, 2, 3, 4])])
    assert bool(is_distribution(probs).all())
    assert probs.sum().item() == pytest.approx(1.0)
    assert probs[0].argmax() == (0 if penalty < 1.0 else 1)


@every(
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
)
@every("dtype", [torch.float32, torch.float64])
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


@every("size", [1, 1023, 1024, 1025, 1026, 2999, 3000])
def test_top_p_keeps_just_as_many_tokens_as_reach_it_however_many_that_are(size: int) -> None:
    assert 1023 < TOP_P_CANDIDATES < 1026
    weights = torch.arange(3000, 0, -1, dtype=torch.float64) + 3000
    mass = (weights / weights.sum()).cumsum(0)
    top_p = (mass[size - 1] - 0.3 * weights[size - 1] / weights.sum()).item()  # in the middle of the last one's share
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(size))
    for rows in (1, 3):
        logits = torch.full((rows, 3000), 0.0, dtype=torch.float64)
        logits[:, 0] = 50.0  # a row with few candidates beside the one with many
        logits[rows // 2] = weights[shuffled].log()
        probs = probabilities(logits, SamplingParams(top_p=top_p))
        assert torch.equal(probs[rows // 2] > 0.0, shuffled < size)
        assert (probs > 0.0).sum(dim=1).tolist() == [size if row == rows // 2 else 1 for row in range(rows)]


@every("vocab_size", [1023, 1024, 1025, 5000])
def test_rows_of_a_large_vocabulary_keep_their_own_top_p_as_defined(vocab_size: int) -> None:
    logits = random_logits(8, vocab_size, seed=24, dtype=torch.float64)
    logits *= torch.tensor([0.01, 0.1, 1.0, 3.0], dtype=torch.float64).repeat(2).unsqueeze(1)
    order = [SamplingParams(1.1, top_p=top_p) for top_p in (0.05, 0.5, 0.97, 0.9999, 1.0, 0.9, 0.3, 0.7)]
    for row, given_, params in zip(of_rows(logits, order), logits, order, strict=True):
        assert torch.equal(row, probabilities(given_, params))
        assert_same_law(row, defined(given_, params), 1e-12)


def test_top_p_keeps_all_of_a_large_vocabulary_of_equal_tokens() -> None:
    logits = torch.zeros(2, 4096)
    logits[1, 77] = 20.0
    probs = probabilities(logits, SamplingParams(top_p=0.3))
    assert (probs > 0.0).sum(dim=1).tolist() == [4096, 1]


def test_impossible_tokens_stay_impossible_whatever_bias_is_added() -> None:
    impossible = torch.rand(8, 50, generator=torch.Generator().manual_seed(6)) < 0.9
    impossible[:, 17] = False
    logits = random_logits(8, 50, seed=5).masked_fill(impossible, -math.inf)
    for params in COMBINATIONS:
        rows = probabilities(logits, params)
        assert bool((rows[impossible] == 0.0).all()), params
        assert (rows.sum(dim=-1) - 1.0).abs().max() <= 1e-5, params
    raised = SamplingParams(logit_bias=((1, 100.0),), repetition_penalty=0.01, presence_penalty=-2.0)
    assert of_spans(torch.tensor([[0.0, -math.inf, 0.0]]), [Span(raised, 1, [1, 1])]).tolist() == [[0.5, 0.0, 0.5]]


# Bias, masks and penalties


def test_distribution_that_does_not_read_the_text_needs_none() -> None:
    logits = random_logits(3, 50, seed=16)
    for changes in ({"logit_bias": BIAS}, {"allowed_token_ids": (1, 2)}, {"top_p": 0.9, "min_p": 0.1, "top_k": 9}, {}):
        params = SamplingParams(0.7, **changes)
        assert torch.equal(of_spans(logits, [Span(params, 3)]), of_spans(logits, [Span(params, 3, TEXT, 5, STOPS)]))
    for num_rows, min_tokens in product((1, 3), (1, 2, 3, 9)):
        params, start = SamplingParams(min_tokens=min_tokens), len(TEXT) - 3
        with_text = of_spans(logits[:num_rows], [Span(params, num_rows, TEXT, start, STOPS)])
        without = of_spans(logits[:num_rows], [Span(params, num_rows, (), start, STOPS, text_len=len(TEXT))])
        assert torch.equal(with_text, without), "min_tokens needs the length of the text alone"


# Spans


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
    num_rows = draw(st.integers(0, 5))
    text = draw(st.lists(tokens(VOCAB_SIZE + 2), min_size=max(0, num_rows - 1), max_size=10))
    stops = draw(st.frozensets(tokens(VOCAB_SIZE + 2), max_size=3))
    return Span(draw(sampling_params()), num_rows, text, draw(st.integers(0, len(text) + 1)), stops)


@given(st.lists(spans(), max_size=4), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=100)
def test_random_batches_of_spans_follow_the_definition_row_by_row(batch: list[Span], seed: int, step: float) -> None:
    """And to the bit what one place is after a text that grows. Also where no token is possible, of equal logits, and
    of ids beyond the vocabulary."""
    num_rows = sum(span.num_rows for span in batch)
    logits = random_logits(num_rows, VOCAB_SIZE, seed=seed, dtype=torch.float64)
    if step:
        logits = (logits / step).round() * step  # many ties
    impossible = torch.rand(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed + 1)) < 0.1
    logits.masked_fill_(impossible, -math.inf)
    places = [(span, later) for span in batch for later in range(span.num_rows - 1, -1, -1)]
    for row, given_, (span, later) in zip(of_spans(logits, batch), logits, places, strict=True):
        text = span.text[: len(span.text) - later]
        alone = Span(span.params, 1, text, span.prompt_len, span.stop_token_ids)
        assert_close(row, of_spans(given_.unsqueeze(0), [alone])[0], rtol=0.0, atol=0.0, equal_nan=True)
        expected = defined(given_, span.params, text, span.prompt_len, span.stop_token_ids)
        if expected.isnan().any():
            assert bool(row.isnan().all())
        else:
            assert_same_law(row, expected, 1e-12)


# Rows and batches


def test_logits_are_not_changed_and_may_have_any_shape() -> None:
    for dtype, params in product((torch.float32, torch.float64), (*MIXED, *COMBINATIONS[::9])):
        logits = random_logits(2, 3, 50, seed=7, dtype=dtype)
        before, together = logits.clone(), probabilities(logits, params)
        assert torch.equal(logits, before)
        for index in product(range(2), range(3)):
            assert torch.equal(probabilities(logits[index], params), together[index])


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


@every("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_with_parameters_of_their_own_are_as_if_alone(dtype: torch.dtype) -> None:
    """To the bit: what the drafter draws from in one batch is what it sends, and what the verifier judges by."""
    logits = random_logits(len(MIXED), 50, seed=10).to(dtype)
    for order in (MIXED, MIXED[::-1], MIXED[3:] + MIXED[:3], [MIXED[2]] * len(MIXED)):
        rows = of_rows(logits, order)
        assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert rows.shape == logits.shape
        for row, given_, params in zip(rows, logits, order, strict=True):
            assert torch.equal(row, probabilities(given_, params))
    assert torch.equal(
        of_spans(logits, [Span(MIXED[2], count) for count in (3, 1, 8)]), probabilities(logits, MIXED[2])
    )
    if dtype != torch.float64:
        for params in (*MIXED, SamplingParams(0.7, 20, 0.95, 0.01, 1.3, 0.6, 0.8, ((3, 2.0),), tuple(range(40)), 4)):
            batch = [Span(params, 12, [*TEXT, 1, 2, 3], 5, STOPS)]
            assert torch.equal(of_spans(logits, batch), of_spans(logits.float(), batch)), "processed in float32"


# Failed rows


@every("bad", NO_DISTRIBUTION)
def test_row_with_nan_or_no_possible_token_is_an_error_and_nan_throughout(bad: list[float]) -> None:
    good = [1.0, 2.0, 3.0]
    for params in FAILING:
        if not params.penalizes:
            probabilities(torch.tensor([good, good]), params)
            with pytest.raises(ValueError, match="logits"):
                probabilities(torch.tensor([good, bad]), params)
        span = Span(params, 3, [0, 1, 2])
        rows = of_spans(torch.tensor([good, bad, good]), [span])
        assert is_distribution(rows).tolist() == [True, False, True]
        assert bool(rows[1].isnan().all())
        assert torch.equal(rows[::2], of_spans(torch.tensor([good, good, good]), [span])[::2])


FAILING = [
    *[SamplingParams(temperature) for temperature in (0.0, 1.0, 0.7, 1e-30)],
    *[SamplingParams(top_k=k) for k in (1, 2, 3)],
    *[SamplingParams(top_p=p) for p in (1e-9, 0.5, 0.999)],
    *[SamplingParams(min_p=p) for p in (1e-9, 0.5, 1.0)],
    SamplingParams(0.7, 2, 0.9, 0.1),
    SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0),
    SamplingParams(0.0, repetition_penalty=0.5),
    SamplingParams(logit_bias=((0, -100.0), (1, 100.0))),
]


@every(("vocab_size", "sharpness"), [(50, 1.0), (4000, 0.01)])  # mass spread wide needs more candidates
@every("value", [math.nan, math.inf, -math.inf])
@every("bad", range(0, len(MIXED), 2))
def test_failed_row_is_nan_throughout_and_leaves_other_rows_alone(
    bad: int, value: float, vocab_size: int, sharpness: float
) -> None:
    logits = random_logits(len(MIXED), vocab_size, seed=11) * sharpness
    good = of_rows(logits, MIXED)
    assert bool(is_distribution(good).all())
    logits[bad, slice(None) if value == -math.inf else 7] = value
    rows = of_rows(logits, MIXED)
    others = [index for index in range(len(MIXED)) if index != bad]
    assert is_distribution(rows).tolist() == [index != bad for index in range(len(MIXED))]
    assert bool(rows[bad].isnan().all())
    assert torch.equal(rows[others], good[others])


def test_masks_hide_no_logits_that_are_not_finite_and_may_leave_nothing() -> None:
    cases = [{"allowed_token_ids": (0, 1)}, {"min_tokens": 1}, {"logit_bias": ((2, -100.0),)}]
    for value, temperature, changes in product((math.nan, math.inf), (0.0, 1.0), cases):
        span = Span(SamplingParams(temperature, **changes), 1, (), 0, frozenset({2}))
        assert bool(of_spans(torch.tensor([[1.0, 2.0, value, 3.0]]), [span]).isnan().all()), changes
    logits, good = (
        torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -math.inf], [1.0, 2.0, 3.0]]),
        Span(SamplingParams(0.8, 2), 1),
    )
    for values in ((1.0,), (0.0,), (0.7, 5, 0.9, 0.1), (1e-20,)):
        nothing = Span(SamplingParams(*values, allowed_token_ids=(1, 2), min_tokens=1), 1, (), 0, frozenset({1}))
        probs = of_spans(logits, [good, nothing, good])
        assert is_distribution(probs).tolist() == [True, False, True]
        assert bool(probs[1].isnan().all())
        assert torch.equal(probs[::2], of_spans(logits[::2], [good, good]))


# Values that are refused


@every(
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


@every(
    "values",
    [
        (0.0, 0, 1.0),
        (100.0, 2**31, 5e-324),
        (5e-324, 1, LARGEST_BELOW_ONE),
        (1.0, 0, 1.0, 0.0, 5e-324, -2.0, -2.0, ((0, -100.0), (2**31, 100.0)), (0,), 0),
        (1.0, 0, 1.0, 1.0, 100.0, 2.0, 2.0, tuple((token, 1.0) for token in range(MAX_BIASED_TOKENS)), (2**31,), 2**31),
    ],
)
def test_parameters_at_the_border_are_taken_and_give_distributions(values: tuple[object, ...]) -> None:
    params = SamplingParams(*values)
    if params.allowed_token_ids != {2**31}:  # which leaves nothing
        logits = random_logits(2, 2000, seed=23)
        assert bool(is_distribution(of_spans(logits, [Span(params, 2, [5, 6, 7], 1, STOPS)])).all())


@every("name", ["logit_bias", "allowed_token_ids"])
def test_token_beyond_the_vocabulary_is_refused_by_name(name: str) -> None:
    good = SamplingParams(logit_bias=((9, 1.0),), allowed_token_ids=(9, 0))
    good.check_vocabulary(10)
    SamplingParams().check_vocabulary(1)
    bad = replace(good, **{name: ((10, 1.0),) if name == "logit_bias" else (0, 10)})
    with pytest.raises(InvalidRequestError, match=f"^{name} .*0..9.* 10$"):
        bad.check_vocabulary(10)


@every(
    ("values", "expected"),
    [
        *((values, None) for values in ({}, {"temperature": 5e-324}, {"logit_bias": BIAS}, {"min_tokens": 1})),
        ({"allowed_token_ids": (1,)}, None),
        *((values, "greedy") for values in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.5})),
        *((values, "truncates") for values in ({"top_k": 2}, {"top_p": LARGEST_BELOW_ONE}, {"min_p": 5e-324})),
        *(({name: 1.1}, "penalizes") for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    ],
)
def test_params_say_which_of_them_are_greedy_truncate_and_penalize(
    values: dict[str, Any], expected: str | None
) -> None:
    params = SamplingParams(**values)
    traits = {name: getattr(params, name) for name in ("greedy", "truncates", "penalizes")}
    assert traits == {name: name == expected for name in traits}


def test_masks_remove_tokens_by_row_before_penalties_and_hide_no_nan() -> None:
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


def test_kept_edits_act_as_new_ones_in_every_vocabulary_and_precision() -> None:
    """They are made for the first logits, and made anew for others: a drafter's vocabulary may be smaller."""
    params = SamplingParams(0.8, logit_bias=((3, 1.5), (9, -2.0)), allowed_token_ids=tuple(range(2, 20)), min_tokens=2)
    kept = TokenEdits(params, STOPS)
    for vocab_size, dtype, num_rows in product((8, 25), (torch.float32, torch.float64), (3, 1)):
        logits = random_logits(num_rows, vocab_size, seed=17, dtype=dtype)
        for text_len in (2, 3, 9):
            span = Span(params, num_rows, (), 0, STOPS, text_len)
            assert torch.equal(of_spans(logits, [span]), of_spans(logits, [replace(span, edits=kept)]))
    bfloat = random_logits(2, 25, seed=18).bfloat16()
    span = Span(params, 2, (), 0, STOPS, 2)
    assert torch.equal(of_spans(bfloat, [span]), of_spans(bfloat, [replace(span, edits=kept)]))
