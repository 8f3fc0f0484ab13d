"""Draft distributions keep every bit on the wire, bad ones are refused, and drawing follows the weights."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwire.distributions import DraftDistributions, Encoding, draw
from draftwire.errors import InvalidRequestError

torch.set_num_threads(1)

UNHURRIED = settings(deadline=None)  # the machine may be busy
LARGEST_BELOW_ONE = math.nextafter(1.0, 0.0)
EDGE_UNIFORMS = [0.0, 5e-324, 1e-300, 0.5, 1.0 - 1e-12, LARGEST_BELOW_ONE]
WEIGHTS = {
    "plain": [0.1, 0.2, 0.3, 0.4],
    "zeros at both ends": [0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0],
    "only one": [0.0, 1.0, 0.0],
    "alone": [1.0],
    "tiny": [0.0, 1e-30, 0.0, 3e-30, 0.0],
    "smallest float32": [0.0, 1e-45, 0.0],
    "tiny beside large": [0.0, 1e-30, 1.0, 1e-30, 0.0],
    "tiny at the ends": [1e-30, 0.0, 1.0, 0.0, 1e-30],
    "unnormalised": [0.0, 30.0, 0.0, 70.0],
    "thirds": [0.0, 1 / 3, 1 / 3, 1 / 3, 0.0],
}
EVERY_WEIGHTS = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())


def random_rows(length: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4.0 * torch.randn(length, vocab_size, generator=generator)).softmax(dim=-1)


def dense(rows: list[list[float]]) -> DraftDistributions:
    """Encodes rows that `from_rows` would not be given."""
    flat = [number for row in rows for number in row]
    return DraftDistributions(Encoding.DENSE_FLOAT32, len(rows[0]), struct.pack(f"<{len(flat)}f", *flat))


@pytest.mark.parametrize("seed", range(5))
def test_rows_come_back_from_the_wire_to_the_bit(seed: int) -> None:
    rows = random_rows(5, 97, seed)
    tokens = rows.argmax(dim=-1).tolist()
    assert torch.equal(DraftDistributions.from_rows(rows).rows(tokens, 97).view(torch.int32), rows.view(torch.int32))


@given(st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=20))
@UNHURRIED
def test_every_float32_comes_back_from_the_wire_to_the_bit(numbers: list[float]) -> None:
    row = torch.tensor([numbers])
    encoded = DraftDistributions.from_rows(row)
    assert encoded.vocab_size == len(numbers)
    assert encoded.data == struct.pack(f"<{len(numbers)}f", *numbers)


def test_smallest_numbers_come_back_from_the_wire_to_the_bit() -> None:
    rows = torch.tensor([[1e-45, 1e-38, 0.0, 1.0]])
    assert torch.equal(DraftDistributions.from_rows(rows).rows([0], 4).view(torch.int32), rows.view(torch.int32))


def test_encoding_does_not_depend_on_how_rows_lie_in_memory() -> None:
    rows = random_rows(3, 6, 1)
    strided = torch.stack([rows, rows], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert DraftDistributions.from_rows(strided) == DraftDistributions.from_rows(rows)


def test_one_hot_rows_have_all_mass_at_the_drafted_tokens() -> None:
    distributions = DraftDistributions.one_hot(3)
    assert distributions.data == b""
    assert distributions.rows([2, 0], 5).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]


def test_narrower_draft_vocabulary_is_padded_with_zeros() -> None:
    rows = random_rows(4, 6, 2)
    wide = DraftDistributions.from_rows(rows).rows(rows.argmax(dim=-1).tolist(), 9)
    assert wide.shape == (4, 9)
    assert torch.equal(wide[:, :6], rows)
    assert bool((wide[:, 6:] == 0.0).all())


def test_decoded_rows_are_ours_to_change() -> None:
    distributions = DraftDistributions.from_rows(random_rows(2, 4, 3))
    before = distributions.data
    distributions.rows([0, 0], 4).zero_()
    assert distributions.data == before


@pytest.mark.parametrize("change", [b"\0\0\0\0", b"\0"])
def test_data_of_the_wrong_size_is_refused(change: bytes) -> None:
    good = dense([[0.5, 0.5], [0.5, 0.5]])
    good.rows([0, 1], 2)
    for data in (good.data + change, good.data[: -len(change)], b""):
        with pytest.raises(InvalidRequestError, match="bytes"):
            DraftDistributions(Encoding.DENSE_FLOAT32, 2, data).rows([0, 1], 2)


def test_rows_for_another_number_of_tokens_are_refused() -> None:
    for tokens in ([0], [0, 0, 0], []):
        with pytest.raises(InvalidRequestError, match="bytes"):
            dense([[0.5, 0.5], [0.5, 0.5]]).rows(tokens, 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0.5, 0.75, -0.25], "negative"),
        ([0.5, 0.5, -1e-45], "negative"),
        ([0.5, 0.5, math.nan], "NaN"),
        ([math.nan, 0.5, 0.5], "NaN"),
        ([0.5, 0.4, 0.0], "sum to 1"),
        ([0.5, 0.6, 0.0], "sum to 1"),
        ([0.5, math.inf, 0.0], "sum to 1"),
        ([0.0, 0.0, 0.0], "sum to 1"),
        ([3e38, 3e38, 3e38], "sum to 1"),
        ([0.0, 0.5, 0.5], "probability 0"),
    ],
    ids=str,
)
def test_row_that_is_no_distribution_with_its_token_is_refused_wherever_it_stands(
    row: list[float], reason: str
) -> None:
    good = [0.5, 0.25, 0.25]
    dense([good, good]).rows([0, 0], 3)
    for rows in ([good, row], [row, good]):
        with pytest.raises(InvalidRequestError, match=reason):
            dense(rows).rows([0, 0], 3)


def test_float32_rounding_of_a_large_row_is_no_reason_to_refuse_it() -> None:
    rows = torch.rand(2, 150_000, generator=torch.Generator().manual_seed(0))
    DraftDistributions.from_rows(rows / rows.sum(dim=-1, keepdim=True)).rows([5, 6], 150_000)


@pytest.mark.parametrize("token", [3, 4, 2**31, 2**32 - 1])
def test_token_beyond_the_draft_vocabulary_is_refused(token: int) -> None:
    third = [0.5, 0.25, 0.25]
    for distributions in (dense([third, third]), DraftDistributions.one_hot(3)):
        with pytest.raises(InvalidRequestError, match="beyond"):
            distributions.rows([0, token], 5)


@pytest.mark.parametrize("vocab_size", [0, 5, 2**32 - 1])
def test_vocabulary_that_is_empty_or_larger_than_the_targets_is_refused(vocab_size: int) -> None:
    for encoding in Encoding:
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            DraftDistributions(encoding, vocab_size, b"").rows([0], 4)


def test_one_hot_with_data_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no data"):
        DraftDistributions(Encoding.ONE_HOT, 2, b"\0").rows([0], 2)


@EVERY_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_index_of_weight_zero_is_never_drawn(weights: list[float], dtype: torch.dtype) -> None:
    row = torch.tensor(weights, dtype=dtype)
    random = torch.rand(2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # The borders between indices are where rounding could pick a neighbour.
    borders = row.double().cumsum(dim=0) / row.double().sum()
    near = [border + side * 1.2e-16 for border in borders.tolist() for side in (-1, 0, 1)]
    inside = [number for number in near if 0.0 <= number < 1.0]
    uniforms = torch.cat([torch.tensor(EDGE_UNIFORMS + inside, dtype=torch.float64), random])
    drawn = draw(row.expand(len(uniforms), -1), uniforms)
    assert drawn.dtype == torch.int64
    assert bool((drawn < len(weights)).all())
    assert bool((row[drawn] > 0.0).all())


@pytest.mark.parametrize("seed", range(20))
def test_index_of_weight_zero_is_never_drawn_from_random_sparse_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = random_rows(50, 200, seed).masked_fill(torch.rand(50, 200, generator=generator) < 0.9, 0.0)
    rows[:, 100] += 1e-30
    for number in EDGE_UNIFORMS:
        drawn = draw(rows, torch.full((50,), number, dtype=torch.float64))
        assert bool((rows.gather(1, drawn.unsqueeze(1)) > 0.0).all())


@EVERY_WEIGHTS
def test_each_index_gets_its_share_of_the_uniforms(weights: list[float]) -> None:
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    row = torch.tensor(weights, dtype=torch.float64)
    drawn = draw(row.expand(count, -1), uniforms)
    shares = torch.bincount(drawn, minlength=len(weights)) / count
    assert (shares - row / row.sum()).abs().max() <= 1.0 / count + 1e-12


@pytest.mark.parametrize("number", EDGE_UNIFORMS)
def test_smallest_float64_weight_is_drawn_although_every_product_with_it_is_rounded(number: float) -> None:
    row = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert draw(row, torch.tensor([number], dtype=torch.float64)).tolist() == [1]


def test_borders_between_float32_weights_of_a_large_vocabulary_lie_where_float64_puts_them() -> None:
    weights = np.random.default_rng(3).uniform(0.1, 1.0, 50_000).astype(np.float32)
    cumulated = np.cumsum(weights.astype(np.float64))
    indices = np.arange(100, 50_000, 500)
    for side, expected in ((-1e-5, indices), (1e-5, indices + 1)):  # float32 has steps of 2e-3 there
        uniforms = torch.from_numpy((cumulated[indices] + side) / cumulated[-1])
        drawn = draw(torch.from_numpy(weights).expand(len(indices), -1), uniforms)
        assert drawn.tolist() == expected.tolist()


def test_smallest_and_largest_uniform_draw_first_and_last_possible_index() -> None:
    row = torch.tensor([[0.0, 0.2, 0.5, 0.3, 0.0]]).expand(2, -1)
    assert draw(row, torch.tensor([0.0, LARGEST_BELOW_ONE], dtype=torch.float64)).tolist() == [1, 3]


def test_each_row_is_drawn_from_with_its_own_uniform() -> None:
    rows, uniforms = random_rows(64, 30, 4), torch.from_numpy(np.random.default_rng(0).random(64))
    alone = [int(draw(rows[i : i + 1], uniforms[i : i + 1])) for i in range(64)]
    assert draw(rows, uniforms).tolist() == alone
    assert len(set(alone)) > 5


def test_padding_of_a_row_with_zeros_does_not_change_what_is_drawn() -> None:
    rows, uniforms = random_rows(64, 30, 5), torch.from_numpy(np.random.default_rng(1).random(64))
    padded = torch.cat([rows, torch.zeros(64, 20)], dim=1)
    assert draw(padded, uniforms).tolist() == draw(rows, uniforms).tolist()
