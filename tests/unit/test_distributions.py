"""Distributions are rounded as promised, dense and sparse rows agree, and draws and races follow the weights."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import (
    CHUNK,
    WHOLE_ROW,
    DenseRows,
    DraftRows,
    QuantizedRows,
    SparseRows,
    draw,
    joined,
    no_rows,
    quantize,
    race,
    rows_of,
)
from draftwire.method.encoding import TOTAL_WEIGHT, Claim, DraftDistributions, Supports, decode_one
from draftwire.method.quantization import Encoding, Quantization

torch.set_num_threads(1)

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
LONG = WHOLE_ROW + 3 * CHUNK + 5
LAYOUTS: dict[str, Callable[[int], list[int]]] = {
    "alone": lambda count: list(range(count)),
    "at the start of a long row": lambda count: list(range(count)),
    "at its end": lambda count: list(range(LONG - count, LONG)),
    "across chunks": lambda count: list(range(CHUNK - count // 2, CHUNK - count // 2 + count)),
    "across the last chunk and the rest": lambda count: list(
        range(LONG - 5 - count // 2, LONG - 5 - count // 2 + count)
    ),
    "far apart": lambda count: [index * (LONG - 1) // max(1, count - 1) for index in range(count)],
}
"""Where the weights stand: rows above a length are drawn from in another way, a chunk first."""
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def random_rows(length: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4.0 * torch.randn(length, vocab_size, generator=generator)).softmax(dim=-1)


def laid_out(row: Tensor, layout: str) -> Tensor:
    """Returns weights that stand in a row of zeros."""
    result = row.new_zeros(len(row) if layout == "alone" else LONG)
    result[LAYOUTS[layout](len(row))] = row
    return result


def one_hot_rows(token_ids: list[int]) -> DraftRows:
    claim = Claim(token_ids, DraftDistributions(Encoding.ONE_HOT, VOCAB_SIZE))
    return rows_of(decode_one(claim, VOCAB_SIZE))


# Dense and sparse rows


VOCAB_SIZE = 12
TINY_MASS = 1e-12


def sparse_rows(supports: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> SparseRows:
    """Rows with so many tokens each, in any order; unused places hold any id, also of used places."""
    generator, width = random.Random(seed), max(supports)
    ids, probs = [], []
    for support in supports:
        weights = [generator.uniform(0.1, 1.0) for _ in range(support)]
        row = [weight / math.fsum(weights) for weight in weights] + [0.0] * (width - support)
        tokens = generator.sample(range(VOCAB_SIZE), support)
        places = [*tokens, *(generator.choice([*tokens, 0, VOCAB_SIZE - 1]) for _ in range(width - support))]
        order = generator.sample(range(width), width)
        ids.append([places[place] for place in order])
        probs.append([row[place] for place in order])
    return SparseRows(torch.tensor(ids), torch.tensor(probs, dtype=dtype), VOCAB_SIZE)


def slow_dense(rows: SparseRows) -> list[list[float]]:
    result = [[0.0] * rows.vocab_size for _ in rows.probs]
    for row, (ids, probs) in enumerate(zip(rows.token_ids.tolist(), rows.probs.tolist(), strict=True)):
        for token, prob in zip(ids, probs, strict=True):
            result[row][token] += prob
    return result


def residual_mass(draft: DraftRows, target: Tensor, target_rows: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
    if isinstance(draft, DenseRows):
        return draft.residual_mass(target, target_rows, rows, scales)
    return draft.beside(target, target_rows, rows).residual_mass(scales)


def slow_residual_mass(target: Sequence[float], draft: Sequence[float], scale: float) -> float:
    return math.fsum(max(scale * p - q, 0.0) for p, q in zip(target, draft, strict=True))


SUPPORTS = {"one": [1, 1, 1, 1], "three": [3, 3, 3, 3], "different": [1, 4, 2, 7], "all": [12, 1, 12, 5]}
EVERY_SUPPORT = pytest.mark.parametrize("supports", SUPPORTS.values(), ids=SUPPORTS.keys())


@EVERY_SUPPORT
@pytest.mark.parametrize("seed", range(3))
def test_sparse_and_dense_rows_have_the_same_entries_and_no_others(supports: list[int], seed: int) -> None:
    sparse = sparse_rows(supports, seed)
    expected = torch.tensor(slow_dense(sparse), dtype=torch.float64)
    assert (expected > 0.0).sum(dim=1).tolist() == supports
    # Any shape, rows in any order and more than once, every token.
    index = torch.tensor([[2], [0], [3], [1], [0]]).expand(5, VOCAB_SIZE)
    token = torch.arange(VOCAB_SIZE).expand(5, VOCAB_SIZE)
    for rows in (sparse, DenseRows(expected)):
        assert torch.equal(rows.dense(), expected)
        assert torch.equal(rows.probs_of(index, token), expected[[2, 0, 3, 1, 0]])
        assert torch.equal(rows.probs_of(index[:, 0], token[:, 3]), expected[[2, 0, 3, 1, 0], 3])
    beside = sparse.beside(torch.rand(2, VOCAB_SIZE), index % 2, index)
    assert torch.equal(beside.draft_probs_of(token), expected[[2, 0, 3, 1, 0]])


@EVERY_SUPPORT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_sparse_and_dense_rows_leave_the_same_residual_mass(supports: list[int], dtype: torch.dtype, seed: int) -> None:
    sparse = sparse_rows(supports, seed, dtype)
    target = random_rows(6, VOCAB_SIZE, seed).to(torch.float64).softmax(dim=-1).to(dtype)
    target[1] = sparse.dense()[1]  # the same on both sides
    target[2] = torch.eye(VOCAB_SIZE, dtype=dtype)[sparse.token_ids[2][sparse.probs[2] > 0.0][0]]  # inside the support
    outside = (sparse.dense()[1] == 0.0).to(dtype)
    target[3] = outside / outside.sum() if outside.sum() else torch.eye(VOCAB_SIZE, dtype=dtype)[0]
    shape = (4, 6, 7)
    rows = torch.arange(4).reshape(4, 1, 1).expand(shape)
    target_rows = torch.arange(6).reshape(1, 6, 1).expand(shape)
    scales = torch.tensor([0.0, 1e-30, 0.2, 0.5, 0.99, 1.0, 1.7], dtype=torch.float64).expand(shape)
    expected = [
        [[slow_residual_mass(p, q, scale) for scale in scales[0, 0].tolist()] for p in target.tolist()]
        for q in slow_dense(sparse)
    ]
    for draft in (sparse, DenseRows(sparse.dense())):
        mass = residual_mass(draft, target, target_rows, rows, scales)
        assert mass.dtype == torch.float64
        assert bool((mass >= 0.0).all())
        error = (mass - torch.tensor(expected, dtype=torch.float64)).abs().max()
        assert error <= (1e-15 if dtype == torch.float64 else 5e-7)
        assert not mass[..., 0].any(), "at scale 0"
    before = target.clone()
    DenseRows(sparse.dense()).residual_mass(target, target_rows, rows, scales)
    assert torch.equal(target, before)


@pytest.mark.parametrize("outside", [0.0, 5e-17, TINY_MASS, 0.25, 1.0])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_target_mass_outside_the_support_is_all_residual_however_small(outside: float, scale: float) -> None:
    draft = SparseRows(torch.tensor([[3, 5, 3]]), torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64), VOCAB_SIZE)
    target = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
    target[0, [3, 5]] = (1.0 - outside) / 2.0
    target[0, [0, 7]] = outside / 2.0
    zero = torch.zeros(1, dtype=torch.int64)
    mass = residual_mass(draft, target, zero, zero, torch.tensor([scale], dtype=torch.float64)).item()
    assert mass == pytest.approx(scale * outside, rel=1e-3, abs=1.2e-16)  # as exactly as 1 - outside is known


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_target_whose_sum_rounds_above_1_leaves_no_negative_mass(scale: float) -> None:
    probs = torch.tensor([[0.4, 0.6]], dtype=torch.float64)
    for excess in (1e-16, 1e-7, 1e-3):
        target = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
        target[0, [2, 9]] = probs[0] + excess
        zero = torch.zeros(1, dtype=torch.int64)
        # No token's share is more than the drafter's times 1 + excess.
        draft = SparseRows(torch.tensor([[2, 9]]), probs, VOCAB_SIZE)
        mass = residual_mass(draft, target, zero, zero, torch.tensor([scale], dtype=torch.float64)).item()
        assert 0.0 <= mass <= 2.1 * excess + 1e-16
        if scale < 1.0:
            assert mass == 0.0


@EVERY_SUPPORT
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_and_dense_rows_subtract_alike_and_leave_nothing_negative(
    supports: list[int], weights_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    sparse, index = sparse_rows(supports, 5, dtype), torch.tensor([3, 0, 0, 2, 1, 3, 1])
    scales = torch.tensor([0.0, 0.3, 1.0, 1.0, 0.05, 1e30, 1.7], dtype=torch.float64)
    weights = random_rows(7, VOCAB_SIZE, 6).to(weights_dtype)
    weights[:, 2] = 0.0
    taken = scales.unsqueeze(1) * torch.tensor(slow_dense(sparse), dtype=torch.float64)[index]
    expected = (weights.double() - taken).clamp(min=0.0)
    for rows in (sparse, DenseRows(sparse.dense())):
        before, remaining = rows.dense().clone(), weights.clone()
        rows.subtract_(remaining, index, scales)
        assert bool((remaining >= 0.0).all())
        assert (remaining - expected).abs().max() <= (1e-15 if weights_dtype == dtype == torch.float64 else 1e-6)
        assert torch.equal(remaining[taken == 0.0], weights[taken == 0.0])
        assert torch.equal(rows.dense(), before)


def test_weights_equal_to_the_scaled_draft_leave_nothing() -> None:
    for dtype in (torch.float32, torch.float64):
        sparse = sparse_rows([1, 4, 2, 12], 9, dtype)
        for rows in (sparse, DenseRows(sparse.dense())):
            before = rows.dense().clone()
            weights = 0.5 * before
            rows.subtract_(weights, torch.arange(4), torch.full((4,), 0.5, dtype=torch.float64))
            assert bool((weights == 0.0).all())
            assert torch.equal(rows.dense(), before)


def test_parts_that_are_joined_follow_each_other_whatever_their_supports() -> None:
    sparse = [sparse_rows(supports, seed) for seed, supports in enumerate(([2, 2], [7], [1, 1, 1], [4, 1]))]
    no_part = SparseRows(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.float64), VOCAB_SIZE)
    parts = [*sparse[:2], no_part, *sparse[2:]]
    together = joined(parts)
    assert isinstance(together, SparseRows)
    assert together.vocab_size == VOCAB_SIZE
    assert together.token_ids.shape == together.probs.shape == (8, 7)
    assert torch.equal(together.dense(), torch.cat([part.dense() for part in parts]))
    assert bool(((together.token_ids >= 0) & (together.token_ids < VOCAB_SIZE)).all())
    dense_together = joined([DenseRows(part.dense()) for part in parts])
    assert isinstance(dense_together, DenseRows)
    assert torch.equal(dense_together.probs, together.dense())
    assert dense_together.vocab_size == VOCAB_SIZE


def test_dense_and_sparse_parts_are_not_joined_and_a_lone_part_is_as_is() -> None:
    sparse = sparse_rows([2, 3], 0)
    for part in (sparse, DenseRows(sparse.dense()), no_rows(5)):
        assert joined([part]) is part
    for parts in ([sparse, DenseRows(sparse.dense())], [DenseRows(sparse.dense()), sparse]):
        with pytest.raises(AssertionError, match="apart"):
            joined(parts)


def test_no_rows_join_with_one_hot_rows_and_add_none() -> None:
    assert no_rows(VOCAB_SIZE).vocab_size == VOCAB_SIZE
    assert no_rows(VOCAB_SIZE).dense().shape == (0, VOCAB_SIZE)
    one_hot = one_hot_rows([3, 1])
    together = joined([no_rows(VOCAB_SIZE), one_hot, no_rows(VOCAB_SIZE)])
    assert torch.equal(together.dense(), one_hot.dense())
    assert joined([no_rows(5), no_rows(5)]).dense().shape == (0, 5)


@pytest.mark.parametrize("rows", [sparse_rows([2, 5], 1), DenseRows(random_rows(2, 4, 1))], ids=["sparse", "dense"])
def test_rows_on_another_device_are_the_same(rows: DraftRows) -> None:
    moved = rows.to(torch.device("cpu"))
    assert type(moved) is type(rows)
    assert moved.vocab_size == rows.vocab_size
    assert torch.equal(moved.dense(), rows.dense())
    meta = rows.to(torch.device("meta"))
    assert meta.vocab_size == rows.vocab_size
    assert meta.dense().device.type == "meta"


# Rows that were decoded


def test_decoded_weights_are_probabilities_to_the_bit() -> None:
    weights = np.array([[1, 65_535, 0], [65_536, 0, 0], [21_845, 21_846, 21_845]])
    rows = rows_of(Supports(np.array([[4, 2, 0], [11, 3, 3], [9, 8, 7]]), weights, VOCAB_SIZE))
    assert isinstance(rows, SparseRows)
    assert rows.vocab_size == VOCAB_SIZE
    assert (rows.token_ids.dtype, rows.probs.dtype) == (torch.int64, torch.float32)
    assert (rows.probs.double() * TOTAL_WEIGHT).tolist() == weights.tolist()
    assert rows.probs.double().sum(dim=1).tolist() == [1.0, 1.0, 1.0]
    every = np.arange(1, TOTAL_WEIGHT + 1)[:, None]
    probs = rows_of(Supports(np.zeros_like(every), every, VOCAB_SIZE)).probs
    assert torch.equal(probs.double() * TOTAL_WEIGHT, torch.from_numpy(every).double())


# Rounding to integer weights


TOTALS = (2**8, 2**12, 2**16)
SHAPES: dict[str, tuple[int, float]] = {
    "flat": (300, 0.1),
    "usual": (300, 3.0),
    "peaked": (300, 12.0),
    "short": (5, 1.0),
    "long": (20_000, 4.0),
    "one token": (1, 1.0),
}
"""Tokens, and the spread of their logits."""
QUANTIZATIONS = [
    Quantization(mass=mass, max_support=support) for mass in (0.3, 0.9, 0.98, 1.0) for support in (1, 8, 64, 256)
]


def rows_of_shape(shape: str, count: int) -> Tensor:
    vocab_size, spread = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    return (spread * torch.randn(count, vocab_size, generator=generator)).softmax(dim=-1)


def slow_support(row: Sequence[float], mass: float, max_support: int) -> list[float]:
    """The fewest of the likeliest probabilities that hold the mass, the largest first."""
    kept: list[float] = []
    for prob in sorted(row, reverse=True)[:max_support]:
        if sum(kept) >= mass or prob == 0.0:
            break
        kept.append(prob)
    return kept


@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_rows_keep_the_fewest_tokens_that_hold_the_mass(shape: str) -> None:
    probs = rows_of_shape(shape, 12)
    for quantization, total in itertools.product(QUANTIZATIONS, TOTALS):
        quantized = quantize(probs, quantization, total)
        assert quantized.weights.dtype == quantized.token_ids.dtype == torch.int64
        assert quantized.weights.sum(dim=1).tolist() == [total] * 12
        found = zip(quantized.token_ids.tolist(), quantized.weights.tolist(), strict=True)
        for row, (ids, weights) in zip(probs.tolist(), found, strict=True):
            kept = slow_support(row, quantization.mass, quantization.max_support)
            support = len(kept)
            assert support <= quantization.max_support
            assert [row[token] for token in ids[:support]] == kept, (quantization, total)  # the likeliest first
            assert len(set(ids[:support])) == support
            assert min(weights[:support]) >= 1
            assert not any(weights[support:])
            shares = [prob / math.fsum(kept) for prob in kept]
            errors = [abs(weight / total - share) for share, weight in zip(shares, weights[:support], strict=True)]
            assert max(errors) <= (support + 1) / total, (quantization, total)


def test_row_keeps_neither_more_than_holds_the_mass_nor_what_is_impossible() -> None:
    """The first token may hold the mass; a row that sums to less than the mass is kept whole."""
    for row, mass, num_kept in (
        *(([0.0, first, 1.0 - first, 0.0], 0.98, 1) for first in (0.98, 0.99, 1.0)),
        *(([0.0, 0.5, 0.0, 0.25, 0.25], 1.0, 3), ([1.0, 0.0, 0.0, 0.0, 0.0], 1.0, 1), ([0.5, 0.49999], 1.0, 2)),
    ):
        for total in TOTALS:
            rows = torch.tensor([row], dtype=torch.float64)
            quantized = quantize(rows, Quantization(mass=mass, max_support=256), total)
            kept = sorted(range(len(row)), key=lambda token: -row[token])[:num_kept]
            assert int((quantized.weights > 0).sum()) == num_kept, row
            assert sorted(quantized.token_ids[0, :num_kept].tolist()) == sorted(kept)
            assert num_kept > 1 or int(quantized.weights[0, 0]) == total


def test_rows_are_rounded_alike_beside_any_others() -> None:
    probs = torch.cat([rows_of_shape("usual", 20), rows_of_shape("peaked", 20)])
    together = quantize(probs, Quantization())
    for index in range(len(probs)):
        alone = quantize(probs[index : index + 1], Quantization())
        assert torch.equal(together.weights[index], alone.weights[0])
        used = alone.weights[0] > 0
        assert torch.equal(together.token_ids[index][used], alone.token_ids[0][used])


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_token_is_drawn_by_exactly_as_many_leading_bits_as_its_weight(bits: int, shape: str) -> None:
    """The whole law: every value of the leading bits, with the least and the most that may follow them."""
    total = 2**bits
    rows = quantize(rows_of_shape(shape, 3), Quantization(max_support=64), total)
    first = torch.arange(total, dtype=torch.float64) / total
    last = (torch.arange(total, dtype=torch.float64) + 1.0) / total - 2.0**-53
    assert bool((last < 1.0).all())
    for row in range(3):
        ids, weights = rows.token_ids[row : row + 1], rows.weights[row : row + 1]
        every = QuantizedRows(ids.expand(total, -1), weights.expand(total, -1))
        drawn = every.draw(first)
        assert torch.equal(drawn, every.draw(last))
        expected = torch.zeros(SHAPES[shape][0], dtype=torch.int64).scatter_add_(0, ids[0], weights[0])
        assert torch.equal(torch.bincount(drawn, minlength=len(expected)), expected)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"encoding": Encoding.ONE_HOT}, "one_hot"),
        ({"encoding": Encoding.NONE}, "none"),
        ({"mass": 0.0}, "draft_mass"),
        ({"mass": 1.1}, "draft_mass"),
        ({"mass": math.nan}, "draft_mass"),
        ({"max_support": 0}, "draft_max_support"),
        ({"max_support": 1025}, "draft_max_support"),
    ],
    ids=str,
)
def test_rounding_that_cannot_be_is_refused_by_name(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        Quantization(**values)


# Draws


@EVERY_WEIGHTS
@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_shared_by_weight_and_weight_zero_is_never_drawn(
    weights: list[float], layout: str, dtype: torch.dtype
) -> None:
    row = laid_out(torch.tensor(weights, dtype=dtype), layout)
    count = 20_000 if layout == "alone" else 400
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    # The borders between indices are where rounding could pick a neighbour.
    borders = row.double().cumsum(dim=0) / row.double().sum()
    near = [border + side * 1.2e-16 for border in borders.unique().tolist() for side in (-1, 0, 1)]
    inside = [number for number in near if 0.0 <= number < 1.0]
    uniforms = torch.cat([even, torch.tensor(EDGE_UNIFORMS + inside, dtype=torch.float64)])
    drawn = draw(row.expand(len(uniforms), -1), uniforms)
    assert drawn.dtype == torch.int64
    assert bool((drawn < len(row)).all())
    assert bool((row[drawn] > 0.0).all())
    shares = torch.bincount(drawn[:count], minlength=len(row)) / count
    assert (shares - row.double() / row.double().sum()).abs().max() <= 1.0 / count + 1e-12


@pytest.mark.parametrize("vocab_size", [200, WHOLE_ROW + CHUNK, WHOLE_ROW + 77])
@pytest.mark.parametrize("seed", range(5))
def test_index_of_weight_zero_is_never_drawn_from_random_sparse_rows(seed: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_zero = torch.rand(50, vocab_size, generator=generator) < 0.9
    rows = random_rows(50, vocab_size, seed).masked_fill(is_zero, 0.0)
    rows[:, 100] += 1e-30
    for number in EDGE_UNIFORMS:
        drawn = draw(rows, torch.full((50,), number, dtype=torch.float64))
        assert bool((drawn < vocab_size).all())
        assert bool((rows.gather(1, drawn.unsqueeze(1)) > 0.0).all())


@pytest.mark.parametrize("number", EDGE_UNIFORMS)
def test_smallest_float64_weight_is_drawn_though_its_products_are_rounded(number: float) -> None:
    row = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert draw(row, torch.tensor([number], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize(("vocab_size", "precision"), [(WHOLE_ROW, 1e-8), (50_000, 2e-4)])
def test_borders_between_float32_weights_lie_where_float64_puts_them(vocab_size: int, precision: float) -> None:
    # In a long row sums of 128 numbers are rounded to 2e-6 or so, 400 times; sums of all would be known to 2e-3.
    weights = np.random.default_rng(3).uniform(0.1, 1.0, vocab_size).astype(np.float32)
    cumulated = np.cumsum(weights.astype(np.float64))
    indices = np.arange(100, vocab_size, vocab_size // 100)
    for side, expected in ((-precision, indices), (precision, indices + 1)):
        uniforms = torch.from_numpy((cumulated[indices] + side) / cumulated[-1])
        drawn = draw(torch.from_numpy(weights).expand(len(indices), -1), uniforms)
        assert drawn.tolist() == expected.tolist()


LENGTHS = [30, *(WHOLE_ROW + more for more in (-1, 0, 1, CHUNK - 1, CHUNK, 5 * CHUNK)), 12_345]


@pytest.mark.parametrize("num_zeros", [0, 20])
@pytest.mark.parametrize("vocab_size", LENGTHS)
def test_drawn_index_is_the_first_whose_running_sum_is_above_the_threshold(vocab_size: int, num_zeros: int) -> None:
    """Each row with its own uniform, also where zeros stand at its end."""
    rows, uniforms = random_rows(200, vocab_size, 6).double(), torch.from_numpy(np.random.default_rng(2).random(200))
    uniforms[0] = 0.0
    rows[:, vocab_size - num_zeros :] = 0.0
    cumulated = np.cumsum(rows.numpy(), axis=1)
    expected = [
        int(np.flatnonzero(row > number * row[-1])[0]) for row, number in zip(cumulated, uniforms.tolist(), strict=True)
    ]
    assert draw(rows, uniforms).tolist() == expected


# Races


def slow_race(weights: Sequence[float], times: Sequence[float]) -> tuple[int, float]:
    """The winner and its lead, by exact arithmetic."""
    speeds = [Fraction(weight) / Fraction(time) for weight, time in zip(weights, times, strict=True)]
    winner = max(range(len(speeds)), key=lambda index: speeds[index])
    others = [speed for index, speed in enumerate(speeds) if index != winner and speed > 0]
    return winner, math.log(speeds[winner] / max(others)) if others else math.inf


def random_times(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).exponential(size=shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 50])
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_race_winner_ends_first_and_its_lead_is_the_log_weight_it_can_lose(
    dtype: torch.dtype, vocab_size: int, zeros: float, scale: float
) -> None:
    weights, times = scale * random_rows(60, vocab_size, 7).to(dtype), random_times(60, vocab_size, seed=8)
    is_zero = torch.from_numpy(np.random.default_rng(9).random((60, vocab_size)) < zeros)
    is_zero[:, vocab_size // 2] = False
    weights = weights.masked_fill(is_zero, 0.0)
    outcome = race(weights, times)
    assert outcome.winners.dtype == torch.int64
    assert outcome.leads.dtype == torch.float64
    for index in range(60):
        winner, lead = slow_race(weights[index].tolist(), times[index].tolist())
        assert outcome.winners[index] == winner
        assert outcome.leads[index].item() == pytest.approx(lead, rel=1e-9, abs=1e-13)


def test_lead_of_a_tie_is_0_and_of_the_only_possible_index_infinite() -> None:
    times = torch.tensor([[1.0, 1.0, 2.0]], dtype=torch.float64)
    assert race(torch.tensor([[0.5, 0.5, 0.0]]), times).leads.tolist() == [0.0]
    assert race(torch.tensor([[0.25, 0.25, 0.5]]), times).leads.tolist() == [0.0]
    assert race(torch.tensor([[0.0, 1.0, 0.0]]), times).leads.tolist() == [math.inf]
    assert race(torch.tensor([[1.0]]), times[:, :1]).leads.tolist() == [math.inf]


@EVERY_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_index_of_weight_zero_never_wins(weights: list[float], dtype: torch.dtype) -> None:
    row = torch.tensor(weights, dtype=dtype)
    times = random_times(500, len(weights), seed=12)
    times[:100, row == 0.0] = 2.0**-53  # as fast as exponentials can be
    times[:100, row > 0.0] = 37.0  # as slow
    winners = race(row.expand(500, -1), times).winners
    assert bool((row[winners] > 0.0).all())
