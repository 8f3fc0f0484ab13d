"""Draft distributions keep every bit on the wire, and what is wrong with one block is told of that block alone."""

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwire.errors import BlockViolationError, Violation
from draftwire.method.distributions import rows_of
from draftwire.method.encoding import (
    DENSE_FORMATS,
    TOTAL_WEIGHT,
    Claim,
    Decoded,
    DenseProbs,
    DraftDistributions,
    Supports,
    decode,
    decode_one,
    encode_dense,
    encode_sparse,
)
from draftwire.method.quantization import MAX_SUPPORT, Encoding, id_width, position_bytes

FEW = settings(max_examples=40)
TARGET = 200_000
VOCAB_SIZES = (1, 2, 100, 256, 257, 40_000, 65_536, 65_537, TARGET)
"""Ids of 1, 2 and 3 bytes, and the largest and smallest vocabularies of each."""
EVERY_DENSE = pytest.mark.parametrize("encoding", DENSE_FORMATS)

GENERATORS = st.integers(0, 2**32 - 1).map(random.Random)  # much faster than `st.randoms`

Row = dict[int, int]
"""Tokens and their weights."""


@dataclass(frozen=True, slots=True)
class Block:
    """What is encoded."""

    vocab_size: int
    rows: list[Row]
    token_ids: list[int]


def fewest_wide(weights: Sequence[int]) -> int:
    return max((place for place, weight in enumerate(weights, 1) if weight > 256), default=0)


def weight_bytes(rows: Sequence[Sequence[int]], wide_sizes: Sequence[int]) -> bytes:
    """Returns the low bytes of all weights, and the high bytes of so many of each row."""
    low = [(weight - 1) % 256 for row in rows for weight in row]
    high = [(weight - 1) // 256 for row, size in zip(rows, wide_sizes, strict=True) for weight in row[:size]]
    return bytes(low + high)


@st.composite
def sparse_blocks(draw: st.DrawFn, vocab_size: int) -> Block:
    """Weights of any size and most of them small, in any order and falling."""
    rows: list[Row] = []
    generator = draw(GENERATORS)
    for _ in range(draw(st.integers(1, 5))):
        ids = draw(
            st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=min(12, vocab_size), unique=True)
            | st.just(list(range(vocab_size - 1, max(-1, vocab_size - 1 - MAX_SUPPORT), -1)))
        )
        bound = draw(st.sampled_from((TOTAL_WEIGHT, 2_000)))
        borders = [0, *sorted(generator.sample(range(1, bound), len(ids) - 1)), TOTAL_WEIGHT]
        weights = [end - start for start, end in pairwise(borders)]
        generator.shuffle(weights)
        if draw(st.booleans()):
            weights.sort(reverse=True)
        rows.append(dict(zip(ids, weights, strict=True)))
    return Block(vocab_size, rows, [draw(st.sampled_from(list(row))) for row in rows])


def supports_of(blocks: Sequence[Block], generator: random.Random) -> Supports:
    """Returns the rows of blocks of one vocabulary; unused places hold any id and stand anywhere."""
    rows = [row for block in blocks for row in block.rows]
    width = max(len(row) for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    weights = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        places = sorted(generator.sample(range(width), len(row)))
        token_ids[index] = generator.choices(range(blocks[0].vocab_size), k=width)
        token_ids[index, places], weights[index, places] = list(row), list(row.values())
    return Supports(token_ids, weights, blocks[0].vocab_size)


def used_rows(decoded: Decoded | BlockViolationError) -> list[list[tuple[int, int]]]:
    assert isinstance(decoded, Supports), decoded
    assert ((decoded.token_ids >= 0) & (decoded.token_ids < decoded.vocab_size)).all()
    pairs = zip(decoded.token_ids.tolist(), decoded.weights.tolist(), strict=True)
    return [[(token, weight) for token, weight in zip(*row, strict=True) if weight] for row in pairs]


@given(
    st.lists(st.sampled_from(VOCAB_SIZES).flatmap(sparse_blocks), min_size=1, max_size=8),
    GENERATORS,
)
@FEW
def test_sparse_blocks_of_all_vocabularies_come_back_exactly_in_order(
    blocks: list[Block], generator: random.Random
) -> None:
    claims: dict[int, Claim] = {}
    for vocab_size in {block.vocab_size for block in blocks}:
        members = [index for index, block in enumerate(blocks) if block.vocab_size == vocab_size]
        own = [blocks[index] for index in members]
        encoded = encode_sparse(supports_of(own, generator), [len(block.rows) for block in own])
        for index, stated in zip(members, encoded, strict=True):
            claims[index] = Claim(blocks[index].token_ids, stated)
    for block, decoded in zip(blocks, decode([claims[index] for index in range(len(blocks))], TARGET), strict=True):
        assert used_rows(decoded) == [list(row.items()) for row in block.rows]
        assert decoded.vocab_size == TARGET  # type: ignore[union-attr]


@given(st.sampled_from(VOCAB_SIZES).flatmap(sparse_blocks), GENERATORS)
@FEW
def test_a_block_takes_its_ids_its_weights_and_nothing_more(block: Block, generator: random.Random) -> None:
    (stated,) = encode_sparse(supports_of([block], generator), [len(block.rows)])
    width = 1 if block.vocab_size <= 256 else 2 if block.vocab_size <= 65_536 else 3
    ids = b"".join(token.to_bytes(width, "little") for row in block.rows for token in row)
    weights = [list(row.values()) for row in block.rows]
    wide_sizes = [fewest_wide(row) for row in weights]
    assert stated.data == ids + weight_bytes(weights, wide_sizes)
    assert stated.support_sizes == tuple(len(row) for row in block.rows)
    assert stated.wide_sizes == tuple(wide_sizes)
    assert (stated.encoding, stated.vocab_size) == (Encoding.SPARSE_UINT16, block.vocab_size)


@given(st.sampled_from(VOCAB_SIZES).flatmap(sparse_blocks), GENERATORS)
@FEW
def test_falling_weights_take_the_fewest_bytes(block: Block, generator: random.Random) -> None:
    falling = [dict(sorted(row.items(), key=itemgetter(1), reverse=True)) for row in block.rows]
    first, other = encode_sparse(supports_of([replace(block, rows=falling), block], generator), [len(block.rows)] * 2)
    assert first.wide_sizes == tuple(sum(weight > 256 for weight in row.values()) for row in falling)
    assert len(first.data) <= len(other.data)


@pytest.mark.parametrize(
    ("weights", "wide_size"),
    [
        ([65_536], 1),
        ([65_280, 256], 1),
        ([65_279, 257], 2),
        ([256, 65_280], 2),
        ([256, 65_279, 1], 2),
        ([32_768, 1, 32_767], 3),
        ([256] * 256, 0),
        ([257, 255] + [256] * 254, 1),
        ([255] + [256] * 254 + [257], 256),
    ],
    ids=lambda value: None if isinstance(value, int) else f"{len(value)} from {value[0]}",
)
def test_high_bytes_end_with_the_last_weight_above_256(weights: list[int], wide_size: int) -> None:
    row = dict(enumerate(weights))
    (stated,) = encode_sparse(supports_of([Block(256, [row], [0])], random.Random(0)), [1])
    assert stated.wide_sizes == (wide_size,)
    assert len(stated.data) == 2 * len(weights) + wide_size
    assert used_rows(decode_one(Claim([0], stated), 256)) == [list(row.items())]


def test_blocks_of_one_batch_get_their_own_rows_even_where_one_has_none() -> None:
    supports = Supports(np.array([[3, 1], [2, 0], [0, 1]]), np.array([[65_535, 1], [65_536, 0], [1, 65_535]]), 4)
    encoded = encode_sparse(supports, [1, 0, 2])
    assert [stated.support_sizes for stated in encoded] == [(2,), (), (1, 2)]
    assert [stated.wide_sizes for stated in encoded] == [(1,), (), (1, 2)]
    assert [stated.data.hex() for stated in encoded] == ["0301fe00ff", "", "020001ff00feff00ff"]


@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(1, 1), (2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (2**24, 3), (2**24 + 1, 4), (2**32 - 1, 4)],
)
def test_id_takes_the_fewest_bytes_that_hold_the_largest(vocab_size: int, width: int) -> None:
    assert id_width(vocab_size) == width


def test_most_bytes_of_a_position_are_those_of_its_largest_support() -> None:
    assert position_bytes(Encoding.SPARSE_UINT16, 151_936, 64) == 64 * 5 + 4
    assert position_bytes(Encoding.DENSE_FLOAT32, 1000, 64) == 4000
    assert position_bytes(Encoding.DENSE_FLOAT16, 1000, 64) == 2000
    assert position_bytes(Encoding.ONE_HOT, 1000, 64) == position_bytes(Encoding.NONE, 1000, 64) == 0


# Golden bytes

GOLDEN_SPARSE = (
    "400d03 050000 010000 ff0000"  # ids 200,000, 5 and 1 of the first token, 255 of the second: 3 bytes each
    "00 9b 62 ff"  # low bytes of weights less one: 32,769, 32,668 and 99; 65,536
    "80 7f ff"  # high bytes of those of them that have one: 2; 1
)


def test_sparse_block_has_its_golden_bytes() -> None:
    token_ids = np.array([[200_000, 5, 1], [255, 0, 0]])
    weights = np.array([[32_769, 32_668, 99], [65_536, 0, 0]])
    (stated,) = encode_sparse(Supports(token_ids, weights, 200_001), [2])
    assert stated.data.hex() == GOLDEN_SPARSE.replace(" ", "")
    assert (stated.support_sizes, stated.wide_sizes) == ((3, 1), (2, 1))
    decoded = decode_one(Claim([200_000, 255], stated), 200_001)
    assert used_rows(decoded) == [[(200_000, 32_769), (5, 32_668), (1, 99)], [(255, 65_536)]]


@pytest.mark.parametrize(
    ("encoding", "golden"),
    [
        (Encoding.DENSE_FLOAT32, "0000803e0000403f" + "0000803f00000000"),
        (Encoding.DENSE_FLOAT16, "0034003a" + "003c0000"),
    ],
)
def test_dense_block_has_its_golden_bytes(encoding: Encoding, golden: str) -> None:
    rows = np.array([[0.25, 0.75], [1.0, 0.0]], dtype=DENSE_FORMATS[encoding])
    stated = encode_dense(encoding, rows)
    assert (stated.encoding, stated.vocab_size, stated.data.hex()) == (encoding, 2, golden)
    assert stated.support_sizes == stated.wide_sizes == ()
    decoded = decode_one(Claim([1, 0], stated), 2)
    assert isinstance(decoded, DenseProbs)
    assert decoded.probs.tolist() == rows.tolist()


# Dense rows


def random_rows(encoding: Encoding, length: int, vocab_size: int, seed: int) -> NDArray[np.floating]:
    logits = 3.0 * np.random.default_rng(seed).standard_normal((length, vocab_size))
    rows = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return rows.astype(DENSE_FORMATS[encoding])


@EVERY_DENSE
@pytest.mark.parametrize("vocab_size", [3, 1000, 50_000])
@pytest.mark.parametrize("beyond", [0, 7])
def test_dense_rows_become_the_law_that_was_drawn_from(encoding: Encoding, vocab_size: int, beyond: int) -> None:
    """One draws from numbers of any sum; their law is what they are divided by it."""
    rows = random_rows(encoding, 4, vocab_size, seed=1)
    tokens = rows.argmax(axis=1).tolist()
    decoded = decode_one(Claim(tokens, encode_dense(encoding, rows)), vocab_size + beyond)
    assert isinstance(decoded, DenseProbs)
    assert decoded.probs.dtype == np.float32
    assert decoded.probs.shape == (4, vocab_size)
    assert abs(decoded.probs.sum(axis=1, dtype=np.float64) - 1.0).max() < 1e-6
    exact = rows.astype(np.float64)
    law = exact / exact.sum(axis=1, keepdims=True)
    assert (abs(decoded.probs - law) <= law * 2.0**-23 + 1e-45).all()
    padded = rows_of(decoded).dense().numpy()
    assert padded.shape == (4, vocab_size + beyond)
    assert np.array_equal(padded[:, :vocab_size], decoded.probs)
    assert not padded[:, vocab_size:].any()


def test_small_message_of_dense_blocks_allocates_no_target_vocabulary() -> None:
    claims = [Claim([0], DraftDistributions(Encoding.DENSE_FLOAT32, 1, np.float32(1.0).tobytes()))] * 200
    decoded = decode(claims, 10**9)
    assert all(isinstance(one, DenseProbs) and one.probs.size == 1 for one in decoded)


def test_one_large_support_does_not_widen_the_rows_of_a_whole_message() -> None:
    wide = Supports(np.arange(256)[None], np.full((1, 256), 256), 256)
    narrow = Supports(np.array([[7]]), np.array([[65536]]), 256)
    blocks = [*encode_sparse(narrow, [1]) * 1000, *encode_sparse(wide, [1])]
    decoded = decode([Claim([7], block) for block in blocks], 256)
    assert sum(one.weights.size for one in decoded if isinstance(one, Supports)) < 1001 * 20


@EVERY_DENSE
def test_encoding_does_not_depend_on_how_rows_lie_in_memory(encoding: Encoding) -> None:
    rows = random_rows(encoding, 3, 6, seed=2)
    strided = np.stack([rows, rows], axis=-1)[..., 0]
    assert not strided.flags.c_contiguous
    assert encode_dense(encoding, strided) == encode_dense(encoding, rows)
    assert np.array_equal(np.frombuffer(encode_dense(encoding, rows).data, rows.dtype).reshape(rows.shape), rows)


def test_smallest_numbers_stay_possible() -> None:
    for encoding, smallest in ((Encoding.DENSE_FLOAT32, 1e-45), (Encoding.DENSE_FLOAT16, 6e-8)):
        for large in (1.0 - 9e-4, 1.0, 1.0 + 9e-4):
            stated = encode_dense(encoding, np.array([[smallest, large]], dtype=DENSE_FORMATS[encoding]))
            decoded = decode_one(Claim([0], stated), 2)
            assert isinstance(decoded, DenseProbs)
            assert decoded.probs[0, 0] > 0.0


@EVERY_DENSE
def test_decoded_rows_are_ours_to_change(encoding: Encoding) -> None:
    stated = encode_dense(encoding, random_rows(encoding, 2, 4, seed=3))
    before = bytes(bytearray(stated.data))
    decoded = decode_one(Claim(np.argmax(random_rows(encoding, 2, 4, seed=3), axis=1).tolist(), stated), 4)
    assert isinstance(decoded, DenseProbs)
    decoded.probs.fill(0.0)
    assert stated.data == before


def test_rounding_of_a_large_row_is_no_reason_to_refuse_it() -> None:
    numbers = np.random.default_rng(0).random((2, 150_000))
    for encoding, number in DENSE_FORMATS.items():
        rows = (numbers / numbers.sum(axis=1, keepdims=True)).astype(number)
        decode_one(Claim(rows.argmax(axis=1).tolist(), encode_dense(encoding, rows)), 150_000)


# What is refused


def sparse_claim(
    rows: Sequence[Sequence[tuple[int, int]]],
    token_ids: list[int],
    vocab_size: int = 10,
    width: int = 1,
    wide_sizes: Sequence[int] | None = None,
) -> Claim:
    """Encodes rows that `encode_sparse` would not be given, by default with no more high bytes than they need."""
    weights = [[weight for _, weight in row] for row in rows]
    own_wide = tuple(map(fewest_wide, weights) if wide_sizes is None else wide_sizes)
    data = b"".join(token.to_bytes(width, "little") for row in rows for token, _ in row)
    data += weight_bytes(weights, own_wide)
    sizes = tuple(map(len, rows))
    return Claim(token_ids, DraftDistributions(Encoding.SPARSE_UINT16, vocab_size, data, sizes, own_wide))


def dense_claim(encoding: Encoding, rows: Sequence[Sequence[float]], token_ids: list[int]) -> Claim:
    numbers = np.array(rows, dtype=np.float64).astype(DENSE_FORMATS[encoding])
    return Claim(token_ids, DraftDistributions(encoding, len(rows[0]), numbers.tobytes()))


HALF = 32_768
GOOD_ROW = [(3, HALF), (7, HALF)]
SPARSE = sparse_claim([GOOD_ROW, [(9, TOTAL_WEIGHT)]], [7, 9])
FALLING = [(3, 65_000), (7, 300), (4, 200), (5, 36)]
PARTLY_WIDE = sparse_claim([FALLING, GOOD_ROW], [5, 3])
GOOD = [
    SPARSE,
    PARTLY_WIDE,
    sparse_claim([FALLING, FALLING], [3, 4], wide_sizes=[3, 4]),
    sparse_claim([[(5, 1), (299, 65_535)]], [5], 300, width=2),
    dense_claim(Encoding.DENSE_FLOAT32, [[0.5, 0.25, 0.25]], [1]),
    dense_claim(Encoding.DENSE_FLOAT16, [[0.5, 0.25, 0.25]], [2]),
    Claim([2, 2], DraftDistributions(Encoding.ONE_HOT, 10)),
    Claim([2, 2], DraftDistributions(Encoding.NONE, 10)),
]


def beside_good(row: Sequence[tuple[int, int]], token: int = 3) -> list[Claim]:
    """Returns blocks in which a row comes first, last, and alone."""
    return [
        sparse_claim([row, GOOD_ROW], [token, 3]),
        sparse_claim([GOOD_ROW, row], [3, token]),
        sparse_claim([row], [token]),
    ]


def changed(claim: Claim, **changes: object) -> Claim:
    return replace(claim, distributions=replace(claim.distributions, **changes))


def dense_beside_good(row: Sequence[float]) -> list[Claim]:
    good = [0.5, 0.25, 0.25]
    return [dense_claim(encoding, rows, [0, 0]) for encoding in DENSE_FORMATS for rows in ([good, row], [row, good])]


DATALESS = [Claim([2, 2], DraftDistributions(encoding, 10)) for encoding in (Encoding.ONE_HOT, Encoding.NONE)]
DENSE = [dense_claim(encoding, [[0.5, 0.25, 0.25]] * 2, [0, 2]) for encoding in DENSE_FORMATS]
EVERY = [SPARSE, *DATALESS, *DENSE]


def high_changed(wide_sizes: tuple[int, ...], high: str) -> Claim:
    """Returns what `PARTLY_WIDE` is with other high bytes; its own are fd01 7f7f."""
    return changed(PARTLY_WIDE, wide_sizes=wide_sizes, data=PARTLY_WIDE.distributions.data[:12] + bytes.fromhex(high))


BROKEN: dict[str, tuple[Violation, list[Claim]]] = {
    "id as large as the vocabulary": (Violation.TOKEN_ID, beside_good([(3, HALF), (10, HALF)])),
    "largest id of its bytes": (Violation.TOKEN_ID, beside_good([(255, HALF), (3, HALF)])),
    "id in the target's vocabulary only": (Violation.TOKEN_ID, beside_good([(3, 1), (11, 65_535)])),
    "id twice": (Violation.TOKEN_ID, beside_good([(3, HALF), (3, HALF)])),
    "id twice, apart": (Violation.TOKEN_ID, beside_good([(3, 20_000), (4, 20_000), (5, 5_536), (3, 20_000)])),
    "filler's id twice": (Violation.TOKEN_ID, beside_good([(0, HALF), (0, HALF)], token=0)),
    "sum too small": (Violation.WEIGHTS, beside_good([(3, HALF), (7, HALF - 1)])),
    "sum too large": (Violation.WEIGHTS, beside_good([(3, HALF), (7, HALF + 1)])),
    "sum is twice what it should be": (Violation.WEIGHTS, beside_good([(3, TOTAL_WEIGHT), (7, TOTAL_WEIGHT)])),
    "weights that are all zero bytes": (Violation.WEIGHTS, beside_good([(3, 1), (7, 1)])),
    "sums that make up for each other": (
        Violation.WEIGHTS,
        [sparse_claim([[(3, HALF), (7, HALF - 1)], [(3, HALF), (7, HALF + 1)]], [3, 3])],
    ),
    "draft token outside the support": (Violation.OUTSIDE_SUPPORT, beside_good(GOOD_ROW, token=4)),
    "draft token 0 beside fillers": (Violation.OUTSIDE_SUPPORT, beside_good([(3, TOTAL_WEIGHT)], token=0)),
    "draft token of another row": (
        Violation.OUTSIDE_SUPPORT,
        [sparse_claim([[(3, TOTAL_WEIGHT)], [(4, TOTAL_WEIGHT)]], [4, 3])],
    ),
    "dense draft token of probability 0": (Violation.OUTSIDE_SUPPORT, dense_beside_good([0.0, 0.5, 0.5])),
    "draft token as large as the vocabulary": (
        Violation.TOKEN_ID,
        [replace(claim, token_ids=[claim.token_ids[0], claim.distributions.vocab_size]) for claim in EVERY],
    ),
    "largest draft token": (
        Violation.TOKEN_ID,
        [replace(claim, token_ids=[2**32 - 1, claim.token_ids[1]]) for claim in EVERY],
    ),
    "negative draft token": (Violation.TOKEN_ID, [replace(claim, token_ids=[-1, 2]) for claim in EVERY]),
    "no draft token": (Violation.LENGTH, [replace(claim, token_ids=[]) for claim in EVERY]),
    "vocabulary of 0": (Violation.ENCODING, [changed(claim, vocab_size=0) for claim in EVERY]),
    "vocabulary above the target's": (Violation.ENCODING, [changed(claim, vocab_size=301) for claim in EVERY]),
    "largest vocabulary": (Violation.ENCODING, [changed(claim, vocab_size=2**32 - 1) for claim in EVERY]),
    "vocabulary of wider ids": (Violation.ENCODING, [changed(SPARSE, vocab_size=257)]),
    "data too long": (
        Violation.ENCODING,
        [changed(claim, data=claim.distributions.data + bytes(extra)) for claim in EVERY for extra in (1, 2, 3, 4)],
    ),
    "data too short": (
        Violation.ENCODING,
        [changed(claim, data=claim.distributions.data[:-less]) for claim in (SPARSE, *DENSE) for less in (1, 2, 3, 4)],
    ),
    "no data": (Violation.ENCODING, [changed(claim, data=b"") for claim in (SPARSE, *DENSE)]),
    "one size too few": (Violation.ENCODING, [changed(SPARSE, support_sizes=(3,))]),
    "one size too many": (Violation.ENCODING, [changed(SPARSE, support_sizes=(1, 1, 1))]),
    "no sizes": (Violation.ENCODING, [changed(SPARSE, support_sizes=())]),
    "support of 0": (
        Violation.ENCODING,
        [changed(SPARSE, support_sizes=(3, 0)), changed(SPARSE, support_sizes=(0, 3))],
    ),
    "support of 1025": (
        Violation.ENCODING,
        [sparse_claim([[(token % 300, 1 if token else 64_512) for token in range(1025)]], [0], 300, width=2)],
    ),
    "support of all numbers": (Violation.ENCODING, [changed(SPARSE, support_sizes=(2**32 - 1, 1))]),
    "support sizes without sparse data": (
        Violation.ENCODING,
        [changed(claim, support_sizes=(1, 1)) for claim in (*DATALESS, *DENSE)],
    ),
    "wide sizes without sparse data": (
        Violation.ENCODING,
        [changed(claim, wide_sizes=sizes) for claim in (*DATALESS, *DENSE) for sizes in ((0,), (0, 0), (1, 1))],
    ),
    "one wide size too few": (
        Violation.ENCODING,
        [high_changed((2,), "fd01"), high_changed((4,), "fd017f7f"), changed(PARTLY_WIDE, wide_sizes=(2,))],
    ),
    "one wide size too many": (
        Violation.ENCODING,
        [high_changed(sizes, "fd017f7f") for sizes in ((2, 2, 0), (0, 2, 2))] + [high_changed((2, 2, 1), "fd017f7f00")],
    ),
    "no wide sizes": (Violation.ENCODING, [changed(PARTLY_WIDE, wide_sizes=()), high_changed((), "")]),
    "wide size above its support's": (
        Violation.ENCODING,
        [
            high_changed((1, 3), "fd017f7f"),
            high_changed((2, 3), "fd017f7f00"),
            high_changed((5, 2), "fd010000007f7f"),
            high_changed((5, 0), "fd01000000"),
        ],
    ),
    "wide size of all numbers": (
        Violation.ENCODING,
        [changed(PARTLY_WIDE, wide_sizes=sizes) for sizes in ((2**32 - 1, 2), (2, 2**32 - 1))],
    ),
    "high byte that is not there": (
        Violation.ENCODING,
        [high_changed((2, 2), "fd017f"), high_changed((3, 2), "fd017f7f"), high_changed((2, 2), "")],
    ),
    "high byte that is none's": (
        Violation.ENCODING,
        [high_changed((2, 2), "fd017f7f00"), high_changed((1, 2), "fd017f7f"), high_changed((0, 0), "fd017f7f")],
    ),
    "high bytes left out": (
        Violation.WEIGHTS,
        [high_changed((1, 2), "fd7f7f"), high_changed((2, 1), "fd017f"), high_changed((0, 0), "")],
    ),
    "high bytes of another row": (
        Violation.WEIGHTS,
        [high_changed((3, 1), "fd017f7f"), high_changed((4, 0), "fd017f7f")],
    ),
    "high byte of a narrow weight": (
        Violation.WEIGHTS,
        [high_changed((3, 2), "fd01017f7f"), high_changed((4, 2), "fd0100ff7f7f")],
    ),
    "NaN": (Violation.WEIGHTS, dense_beside_good([0.5, 0.5, math.nan])),
    "NaN alone": (Violation.WEIGHTS, dense_beside_good([math.nan] * 3)),
    "negative": (Violation.WEIGHTS, dense_beside_good([0.5, 0.75, -0.25])),
    "negative, very small": (Violation.WEIGHTS, dense_beside_good([0.5, 0.5, -6e-8])),
    "infinite": (Violation.WEIGHTS, dense_beside_good([0.5, math.inf, 0.0])),
    "infinite on both sides": (Violation.WEIGHTS, dense_beside_good([0.5, math.inf, -math.inf])),
    "sums to less": (Violation.WEIGHTS, dense_beside_good([0.5, 0.4, 0.0])),
    "sums to more": (Violation.WEIGHTS, dense_beside_good([0.5, 0.6, 0.0])),
    "sums to 0": (Violation.WEIGHTS, dense_beside_good([0.0, 0.0, 0.0])),
    "sums to very much": (Violation.WEIGHTS, dense_beside_good([6e4, 6e4, 6e4])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_block_is_refused_for_its_fault_and_leaves_the_others_right(name: str) -> None:
    violation, claims = BROKEN[name]
    alone = [decode_one(claim, 300) for claim in GOOD]
    for broken in claims:
        with pytest.raises(BlockViolationError) as raised:
            decode_one(broken, 300)
        assert raised.value.violation is violation
        for place in range(len(GOOD) + 1):
            results = decode([*GOOD[:place], broken, *GOOD[place:]], 300)
            refused = results.pop(place)
            assert isinstance(refused, BlockViolationError)
            assert (refused.violation, str(refused)) == (violation, str(raised.value))
            assert_same(results, alone)


def test_several_broken_blocks_are_told_apart() -> None:
    broken = [(violation, claim) for violation, claims in BROKEN.values() for claim in claims]
    results = decode([claim for _, claim in broken] + GOOD, 300)
    assert [getattr(result, "violation", None) for result in results[: len(broken)]] == [item[0] for item in broken]
    assert_same(results[len(broken) :], [decode_one(claim, 300) for claim in GOOD])


def assert_same(results: Sequence[Decoded | BlockViolationError], expected: Sequence[Decoded]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert type(result) is type(other)
        if isinstance(other, DenseProbs):
            assert np.array_equal(result.probs, other.probs)  # type: ignore[union-attr]
        else:
            assert used_rows(result) == used_rows(other)


def test_support_of_1024_is_the_largest() -> None:
    claim = sparse_claim([[(token, 64) for token in range(1024)]], [1023], 1024, width=2)
    assert used_rows(decode_one(claim, 1100)) == [[(token, 64) for token in range(1024)]]


def test_no_blocks_give_no_results() -> None:
    assert decode([], 300) == []


@pytest.mark.parametrize(("encoding", "most"), [(Encoding.DENSE_FLOAT32, 1e-3), (Encoding.DENSE_FLOAT16, 2e-2)])
@pytest.mark.parametrize("side", [-1.1, -0.9, 0.9, 1.1])
def test_sum_may_be_off_by_rounding_only(encoding: Encoding, most: float, side: float) -> None:
    claim = dense_claim(encoding, [[0.5, 0.5 + side * most]], [0])
    with nullcontext() if abs(side) < 1.0 else pytest.raises(BlockViolationError, match="sum to 1"):
        decode_one(claim, 2)
