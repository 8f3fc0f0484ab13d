"""Logits to probabilities: the same as transformers, for every parameter, without surprises at the edges."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwire.errors import InvalidRequestError
from draftwire.sampling import SamplingParams, probabilities, probabilities_by_row

torch.set_num_threads(1)

COMBINATIONS = [
    SamplingParams(*values)
    for values in product((0.3, 0.7, 1.0, 1.6, 100.0), (0, 2, 5, 49, 50, 1000), (0.01, 0.3, 0.9, 0.999, 1.0))
]
TINY_TEMPERATURES = [1e-3, 1e-6, 1e-20, 1e-37, 1e-44, 1e-46, 1e-300, 5e-324]
LARGEST_BELOW_ONE = math.nextafter(1.0, 0.0)


def random_logits(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(*shape, generator=generator, dtype=dtype)


def reference(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers makes of `[batch, vocab]` logits."""
    warped, no_ids = logits, torch.zeros(len(logits), 0, dtype=torch.int64)
    if params.temperature != 1.0:
        warped = TemperatureLogitsWarper(params.temperature)(no_ids, warped)
    if params.top_k:
        warped = TopKLogitsWarper(params.top_k)(no_ids, warped)
    if params.top_p < 1.0:
        warped = TopPLogitsWarper(params.top_p)(no_ids, warped)
    return warped.softmax(dim=-1)


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    for seed in range(4):
        logits = random_logits(8, 50, seed=seed, dtype=torch.float64)
        ours, theirs = probabilities(logits, params), reference(logits, params)
        assert torch.equal(ours > 0.0, theirs > 0.0)
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("params", [p for p in COMBINATIONS if p.temperature >= 0.7], ids=str)
def test_float32_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(8, 50, seed=9)
    ours, theirs = probabilities(logits, params), reference(logits, params)
    assert ours.dtype == torch.float32
    assert torch.equal(ours > 0.0, theirs > 0.0)
    assert (ours - theirs).abs().max() <= 1e-6


def test_top_p_is_applied_after_top_k_and_temperature() -> None:
    # Masses 0.4, 0.3, 0.2, 0.1. Top 2 leaves 4/7 and 3/7, so that 0.5 is reached by the first alone.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    both = probabilities(logits, SamplingParams(top_k=2, top_p=0.5))
    assert both.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (probabilities(logits, SamplingParams(top_p=0.5)) > 0.0).tolist() == [True, True, False, False]
    # At temperature 1/2 the masses are 16/30, 9/30, 4/30, 1/30.
    cold = probabilities(logits, SamplingParams(temperature=0.5, top_p=0.5))
    assert cold.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_row_is_one_hot_at_the_first_maximum(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, -9.0, -8.0, -8.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.equal(probabilities(logits, params).float(), expected)


def test_temperature_zero_ignores_top_k_and_top_p() -> None:
    logits = random_logits(16, 50, seed=3)
    greedy = probabilities(logits, SamplingParams(temperature=0.0))
    assert torch.equal(greedy, probabilities(logits, SamplingParams(temperature=0.0, top_k=7, top_p=0.3)))
    assert torch.equal(greedy.argmax(dim=-1), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_temperature_gives_the_maximum_all_mass_and_does_not_overflow(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, -math.inf], [-1e4, 1.0, 3.0, 2.0]], dtype=dtype)
    for params in (SamplingParams(temperature), SamplingParams(temperature, top_k=2, top_p=0.9)):
        expected = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=dtype)
        assert torch.equal(probabilities(logits, params), expected)


@pytest.mark.parametrize("temperature", TINY_TEMPERATURES)
def test_tiny_temperature_shares_the_mass_among_equal_maxima(temperature: float) -> None:
    logits = torch.tensor([2.0, 5.0, 5.0, -math.inf])
    assert probabilities(logits, SamplingParams(temperature)).tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("top_p", [1e-6, 1e-37, 1e-46, 1e-300, 5e-324])
def test_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    assert probabilities(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(top_p=top_p)).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_impossible_tokens_stay_impossible(params: SamplingParams) -> None:
    logits = random_logits(8, 50, seed=5)
    impossible = torch.rand(8, 50, generator=torch.Generator().manual_seed(6)) < 0.9
    impossible[:, 17] = False
    rows = probabilities(logits.masked_fill(impossible, -math.inf), params)
    assert bool((rows[impossible] == 0.0).all())
    assert (rows.sum(dim=-1) - 1.0).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.0), SamplingParams(0.5, 2, 0.9), SamplingParams(top_k=1)], ids=str
)
@pytest.mark.parametrize(
    "bad",
    [[1.0, math.nan, 0.0], [math.nan] * 3, [-math.inf] * 3, [1.0, math.inf, 0.0], [-math.inf, math.nan, 1.0]],
    ids=str,
)
def test_row_with_a_nan_or_without_a_possible_token_is_an_error(params: SamplingParams, bad: list[float]) -> None:
    good = [1.0, 2.0, 3.0]
    probabilities(torch.tensor([good, good]), params)
    with pytest.raises(ValueError, match="logits"):
        probabilities(torch.tensor([good, bad]), params)


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_rows_are_independent_of_each_other(params: SamplingParams) -> None:
    logits = random_logits(2, 3, 50, seed=7)
    together = probabilities(logits, params)
    for first, second in product(range(2), range(3)):
        alone = probabilities(logits[first, second], params)
        assert torch.equal(alone > 0.0, together[first, second] > 0.0)
        assert (alone - together[first, second]).abs().max() <= 1e-7


def test_logits_are_not_changed() -> None:
    logits = random_logits(4, 50, seed=8)
    before = logits.clone()
    probabilities(logits, SamplingParams(0.5, 5, 0.5))
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
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_with_parameters_of_their_own_are_as_if_alone(dtype: torch.dtype) -> None:
    logits = random_logits(len(MIXED), 50, seed=10).to(dtype)
    for order in (MIXED, MIXED[::-1], MIXED[3:] + MIXED[:3], [MIXED[2]] * len(MIXED)):
        rows = probabilities_by_row(logits, order)
        assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert rows.shape == logits.shape
        for row, given, params in zip(rows, logits, order, strict=True):
            alone = probabilities(given, params)
            assert torch.equal(alone > 0.0, row > 0.0)
            assert (alone - row).abs().max() <= 1e-7


def test_rows_of_equal_parameters_are_exactly_those_computed_together() -> None:
    # The drafter computes rows in batches of any make-up, and what it draws from is what is sent.
    logits = random_logits(8, 50, seed=12)
    assert torch.equal(probabilities_by_row(logits, [MIXED[2]] * 8), probabilities(logits, MIXED[2]))


@pytest.mark.parametrize("bad", range(len(MIXED)))
def test_bad_row_among_good_ones_with_other_parameters_is_an_error(bad: int) -> None:
    logits = random_logits(len(MIXED), 50, seed=11)
    probabilities_by_row(logits, MIXED)
    logits[bad, 7] = math.nan
    with pytest.raises(ValueError, match="logits"):
        probabilities_by_row(logits, MIXED)


def test_logits_with_parameters_by_row_are_not_changed() -> None:
    logits = random_logits(len(MIXED), 50, seed=8)
    before = logits.clone()
    probabilities_by_row(logits, MIXED)
    assert torch.equal(logits, before)


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
    ],
)
def test_parameter_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("values", [(0.0, 0, 1.0), (100.0, 2**31, 5e-324), (5e-324, 1, LARGEST_BELOW_ONE)], ids=str)
def test_parameters_at_the_border_are_taken(values: tuple[float, int, float]) -> None:
    SamplingParams(*values)
