"""Wire format of draft distributions, and the checks of received ones.

The default is sparse: a few token ids with integer weights that sum to 65,536. The drafter draws with these integers,
so drafter and verifier use the same numbers, to the bit. Numpy only, no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import gt

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import BlockViolationError, Violation
from draftwire.method.block_shape import BlockShape
from draftwire.method.quantization import MAX_SUPPORT, Encoding, id_width, position_bytes

TOTAL_WEIGHT = 2**16
"""Sum of the integer weights of a sparse distribution: a token is drawn with 16 random bits."""

NARROW = 2**8
"""A weight is stored as weight - 1; below this bound it has no high byte."""

DENSE_FORMATS: dict[Encoding, np.dtype[np.floating]] = {
    Encoding.DENSE_FLOAT32: np.dtype("<f4"),
    Encoding.DENSE_FLOAT16: np.dtype("<f2"),
}
"""Little-endian number types of the dense encodings."""

SUM_ERRORS = {Encoding.DENSE_FLOAT32: 1e-3, Encoding.DENSE_FLOAT16: 2e-2}
"""Allowed deviation of the sum of a dense row from 1, for rounding."""

BLOCKS_AT_ONCE = 64
"""Blocks that are decoded together. Rows are padded to the longest among them, so one long row costs this many at most.
"""

OUTSIDE_SUPPORT = "draft token has probability 0 in the distribution it claims to be drawn from"


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """The encoded distributions of a block.

    Attributes:
        encoding: the layout of `data`. NONE carries no distributions, for rules that do not read them.
        vocab_size: size of the drafter's vocabulary: entries of a dense row, and the bound of all ids.
        data: `[draft_len, vocab_size]` little-endian floats if dense. If sparse, the token ids of all positions, each
            in `id_width` bytes, then the low bytes of all weights less one, then the high bytes of those that have one.
            Empty for the other encodings.
        support_sizes: number of entries of each position if sparse; else empty.
        wide_sizes: how many entries of each position, from the first on, have a high byte; that of the others is 0.
    """

    encoding: Encoding
    vocab_size: int
    data: bytes = b""
    support_sizes: tuple[int, ...] = ()
    wide_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Supports:
    """Distributions that are 0 except for a few tokens each."""

    token_ids: NDArray[np.int64]
    """`[rows, support]`: the tokens of each row, each once; any valid id in unused places."""
    weights: NDArray[np.int64]
    """`[rows, support]`: sum to 65,536 in each row, 1 or more in used places and 0 in unused ones."""
    vocab_size: int
    """Size of the target's vocabulary."""

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.token_ids.nbytes + self.weights.nbytes


@dataclass(frozen=True, slots=True)
class DenseProbs:
    """Distributions with an entry for every token."""

    probs: NDArray[np.float32]
    """`[rows, draft vocab]`: each row sums to 1 up to rounding."""
    vocab_size: int
    """Size of the target's vocabulary; tokens that the drafter lacks are impossible."""

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.probs.nbytes


Decoded = Supports | DenseProbs
"""The distributions of a block that passed all checks: one row per draft token, or of a tree one for each token with
children, in the order of `TokenTree.inner_nodes`."""


def encode_dense(encoding: Encoding, rows: NDArray[np.floating]) -> DraftDistributions:
    """Encodes a block's `rows`, `[draft_len, vocab]` in the encoding's precision, bit for bit."""
    data = rows.astype(DENSE_FORMATS[encoding], copy=False).tobytes()
    return DraftDistributions(encoding, rows.shape[1], data)


def encode_sparse(supports: Supports, lengths: Iterable[int]) -> list[DraftDistributions]:
    """Encodes the distributions of many blocks at once.

    Args:
        supports: of all positions, block after block; `vocab_size` is the drafter's.
        lengths: number of draft tokens of each block.
    """
    used = supports.weights > 0
    places = used.cumsum(axis=1)  # from 1 on
    less = supports.weights - 1
    num_wide = np.where(less >= NARROW, places, 0).max(axis=1, initial=0)
    wide = used & (places <= num_wide[:, None])
    ids = supports.token_ids[used].astype("<u4").view(np.uint8).reshape(-1, 4)
    ids = np.ascontiguousarray(ids[:, : id_width(supports.vocab_size)])
    low = (less[used] % NARROW).astype(np.uint8)
    high = (less[wide] // NARROW).astype(np.uint8)
    support_sizes, wide_sizes = used.sum(axis=1).tolist(), num_wide.tolist()
    blocks = []
    row = entry = wide_entry = 0
    for length in lengths:
        own, own_wide = tuple(support_sizes[row : row + length]), tuple(wide_sizes[row : row + length])
        end, wide_end = entry + sum(own), wide_entry + sum(own_wide)
        data = ids[entry:end].tobytes() + low[entry:end].tobytes() + high[wide_entry:wide_end].tobytes()
        blocks.append(DraftDistributions(Encoding.SPARSE_UINT16, supports.vocab_size, data, own, own_wide))
        row, entry, wide_entry = row + length, end, wide_end
    return blocks


@dataclass(frozen=True, slots=True)
class Claim:
    """Draft tokens with the distributions that the drafter declares for them."""

    token_ids: list[int]
    distributions: DraftDistributions
    tree: BlockShape | None = None
    """The shape of the block, if it is no chain."""

    @property
    def num_rows(self) -> int:
        """How many distributions it has to declare."""
        return len(self.token_ids) if self.tree is None else self.tree.num_distributions

    @property
    def rows(self) -> list[int]:
        """Row that each token was drawn from: that of its parent."""
        if self.tree is None:
            return list(range(len(self.token_ids)))
        return self.tree.drawn_from

    @property
    def has_twins(self) -> bool:
        """Whether a token of a tree has two children that are the same token."""
        parents = None if self.tree is None else self.tree.parents
        return parents is not None and len({*zip(parents, self.token_ids, strict=True)}) < len(parents)


def decode(claims: Sequence[Claim], target_vocab_size: int) -> list[Decoded | BlockViolationError]:
    """Decodes and checks the blocks of many sessions at once.

    Each row of a block that passes is a distribution over `target_vocab_size` tokens in which its draft token has a
    positive probability, or in a tree each child of its node, all of them different; tokens that the drafter lacks get
    0. Rows of ONE_HOT and NONE are one-hot, one for each token; rows of NONE are placeholders, and a tree without
    distributions may have any tokens.

    Returns:
        One result for each claim; an error concerns that block alone.
    """
    results: dict[int, Decoded | BlockViolationError] = {}
    sparse: dict[int, list[int]] = {}  # by vocabulary
    for index, claim in enumerate(claims):
        try:
            _check_sizes(claim, target_vocab_size)
        except BlockViolationError as violation:
            results[index] = violation
            continue
        if claim.distributions.encoding is Encoding.SPARSE_UINT16:
            sparse.setdefault(claim.distributions.vocab_size, []).append(index)
        else:
            results[index] = _decode_other(claim, target_vocab_size)
    for of_one_vocabulary in sparse.values():
        for start in range(0, len(of_one_vocabulary), BLOCKS_AT_ONCE):
            members = of_one_vocabulary[start : start + BLOCKS_AT_ONCE]
            decoded = _decode_sparse([claims[index] for index in members], target_vocab_size)
            results.update(zip(members, decoded, strict=True))
    return [results[index] for index in range(len(claims))]


def decode_one(claim: Claim, target_vocab_size: int) -> Decoded:
    """Decodes and checks one block; see `decode`.

    Raises:
        BlockViolationError: the block does not pass.
    """
    (result,) = decode([claim], target_vocab_size)
    if isinstance(result, BlockViolationError):
        raise result
    return result


def _check_sizes(claim: Claim, target_vocab_size: int) -> None:
    """Checks everything but the data itself."""
    stated, length = claim.distributions, claim.num_rows
    if not 0 < stated.vocab_size <= target_vocab_size:
        message = f"draft vocabulary of {stated.vocab_size} entries, target has {target_vocab_size}"
        raise BlockViolationError(Violation.ENCODING, message)
    if not claim.token_ids:
        raise BlockViolationError(Violation.LENGTH, "block without draft tokens")
    if max(claim.token_ids) >= stated.vocab_size or min(claim.token_ids) < 0:
        raise BlockViolationError(Violation.TOKEN_ID, "draft token beyond the draft vocabulary")
    if claim.tree is not None and stated.encoding is Encoding.ONE_HOT:
        raise BlockViolationError(Violation.ENCODING, "a token tree whose tokens are all certain")
    if claim.has_twins and stated.encoding is not Encoding.NONE:
        raise BlockViolationError(Violation.TOKEN_ID, "a draft token is drawn twice in the same place of a token tree")
    if stated.encoding is Encoding.SPARSE_UINT16:
        if len(stated.support_sizes) != length:
            message = f"{len(stated.support_sizes)} support sizes for {length} distributions"
            raise BlockViolationError(Violation.ENCODING, message)
        if not 1 <= min(stated.support_sizes) <= max(stated.support_sizes) <= MAX_SUPPORT:
            raise BlockViolationError(Violation.ENCODING, f"a support has 1 to {MAX_SUPPORT} tokens")
        if len(stated.wide_sizes) != length or any(map(gt, stated.wide_sizes, stated.support_sizes)):
            raise BlockViolationError(Violation.ENCODING, "numbers of wide weights that do not fit the supports")
        expected = sum(stated.support_sizes) * (id_width(stated.vocab_size) + 1) + sum(stated.wide_sizes)
    else:
        if stated.support_sizes or stated.wide_sizes:
            raise BlockViolationError(Violation.ENCODING, "support sizes without a sparse encoding")
        expected = length * position_bytes(stated.encoding, stated.vocab_size, 0)
    if len(stated.data) != expected:
        message = f"draft distributions of {len(stated.data)} bytes, expected {expected}"
        raise BlockViolationError(Violation.ENCODING, message)


def _decode_other(claim: Claim, target_vocab_size: int) -> Decoded | BlockViolationError:
    """Decodes a block that is not sparse and whose sizes are right."""
    stated, tokens = claim.distributions, np.array(claim.token_ids, dtype=np.int64)
    if stated.encoding not in DENSE_FORMATS:
        return Supports(tokens[:, None], np.full((len(tokens), 1), TOTAL_WEIGHT), target_vocab_size)
    numbers = np.frombuffer(stated.data, DENSE_FORMATS[stated.encoding]).reshape(claim.num_rows, stated.vocab_size)
    if not (numbers >= 0.0).all():  # NaN fails the comparison
        return BlockViolationError(Violation.WEIGHTS, "draft distribution has a negative entry or a NaN")
    sums = numbers.sum(axis=1, dtype=np.float64, keepdims=True)
    if not (abs(sums - 1.0) < SUM_ERRORS[stated.encoding]).all():
        return BlockViolationError(Violation.WEIGHTS, "draft distribution does not sum to 1")
    if not (numbers[claim.rows, tokens] > 0.0).all():
        return BlockViolationError(Violation.OUTSIDE_SUPPORT, OUTSIDE_SUPPORT)
    return DenseProbs((numbers / sums).astype(np.float32), target_vocab_size)


def _split(stated: DraftDistributions) -> tuple[bytes, bytes, bytes]:
    """Returns the ids, low bytes and high bytes of a sparse block whose sizes are right."""
    entries = sum(stated.support_sizes)
    border = entries * id_width(stated.vocab_size)
    return stated.data[:border], stated.data[border : border + entries], stated.data[border + entries :]


def _decode_sparse(claims: Sequence[Claim], target_vocab_size: int) -> list[Decoded | BlockViolationError]:
    """Decodes sparse blocks of one draft vocabulary whose sizes are right."""
    vocab_size = claims[0].distributions.vocab_size
    width = id_width(vocab_size)
    all_stated = [claim.distributions for claim in claims]
    id_bytes, low_bytes, high_bytes = (b"".join(parts) for parts in zip(*map(_split, all_stated), strict=True))
    sizes = np.array([size for stated in all_stated for size in stated.support_sizes])
    wide_sizes = np.array([size for stated in all_stated for size in stated.wide_sizes])
    columns = np.arange(sizes.max())
    used = columns < sizes[:, None]
    wide = columns < wide_sizes[:, None]
    narrow = np.zeros((len(id_bytes) // width, 4), dtype=np.uint8)
    narrow[:, :width] = np.frombuffer(id_bytes, dtype=np.uint8).reshape(-1, width)
    token_ids = np.zeros(used.shape, dtype=np.int64)
    token_ids[used] = narrow.view("<u4")[:, 0]
    weights = np.zeros(used.shape, dtype=np.int64)
    weights[used] = np.frombuffer(low_bytes, dtype=np.uint8)
    weights[wide] += np.frombuffer(high_bytes, dtype=np.uint8).astype(np.int64) * NARROW
    weights += used
    is_outside = _outside_supports(claims, np.where(used, token_ids, -1))

    in_order = np.sort(np.where(used, token_ids, -1 - columns), axis=1)  # fillers are distinct and no ids
    faults = (
        ((token_ids >= vocab_size).any(axis=1), Violation.TOKEN_ID, "draft distribution has an id that does not exist"),
        ((in_order[:, 1:] == in_order[:, :-1]).any(axis=1), Violation.TOKEN_ID, "draft distribution has an id twice"),
        (weights.sum(axis=1) != TOTAL_WEIGHT, Violation.WEIGHTS, f"draft weights do not sum to {TOTAL_WEIGHT}"),
        (is_outside, Violation.OUTSIDE_SUPPORT, OUTSIDE_SUPPORT),
    )
    lengths = [claim.num_rows for claim in claims]
    ends = np.cumsum(lengths).tolist()
    results: list[Decoded | BlockViolationError] = [
        Supports(token_ids[end - length : end], weights[end - length : end], target_vocab_size)
        for length, end in zip(lengths, ends, strict=True)
    ]
    for is_wrong, violation, message in reversed(faults):  # the first of several faults is reported
        if is_wrong.any():
            block_of_row = np.repeat(np.arange(len(claims)), lengths)
            for block in set(block_of_row[is_wrong].tolist()):
                results[block] = BlockViolationError(violation, message)
    return results


def _outside_supports(claims: Sequence[Claim], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns whether a token of each row is not among its ids, `[rows]`.

    Args:
        claims: the blocks, whose rows follow each other.
        ids: `[rows, support]`, -1 in unused places.
    """
    tokens = np.array([token for claim in claims for token in claim.token_ids])
    if all(claim.tree is None for claim in claims):
        return np.asarray(~(ids == tokens[:, None]).any(axis=1))
    starts = np.cumsum([0, *(claim.num_rows for claim in claims)]).tolist()
    rows = np.array([start + row for claim, start in zip(claims, starts, strict=False) for row in claim.rows])
    is_outside = np.zeros(len(ids), dtype=np.bool_)
    is_outside[rows[~(ids[rows] == tokens[:, None]).any(axis=1)]] = True
    return is_outside
