"""Broken draft blocks are refused one by one, and the fuzzer that says so finds what would let them through."""

import inspect

import pytest
from fuzz import TRANSPORT, DecodingFaultError, run

from draftwire.errors import Violation
from draftwire.method import encoding

FROM_SESSION = {Violation.NO_DISTRIBUTIONS, Violation.PREFIX, Violation.PEER}
"""What only the session's state can tell."""

FAULTS = {
    "ids may repeat": (
        "_decode_sparse",
        "(in_order[:, 1:] == in_order[:, :-1]).any(axis=1)",
        "(weights < 0).any(axis=1)",
    ),
    "fillers count as ids": ("_decode_sparse", "np.where(used, token_ids, -1 - columns)", "token_ids"),
    "weights sum to anything": ("_decode_sparse", "!= TOTAL_WEIGHT", "< 0"),
    "weights sum to too much": ("_decode_sparse", "!= TOTAL_WEIGHT", "< TOTAL_WEIGHT"),
    "weights are not one more": ("_decode_sparse", "weights += used", "weights += 0"),
    "any id": ("_decode_sparse", "token_ids >= vocab_size", "token_ids < 0"),
    "ids up to the vocabulary's size": ("_decode_sparse", "token_ids >= vocab_size", "token_ids > vocab_size"),
    "any draft token": ("_outside_supports", "asarray(~(ids == tokens[:, None])", "asarray((ids < -1)"),
    "any draft token of a tree": ("_outside_supports", "~(ids[rows] == tokens[:, None])", "(ids[rows] < -1)"),
    "draft tokens of a tree by rows of their own": (
        "_outside_supports",
        "for row in claim.rows",
        "for row in range(len(claim.rows))",
    ),
    "fillers are possible draft tokens": ("_decode_sparse", "np.where(used, token_ids, -1))", "token_ids)"),
    "siblings may repeat": ("_check_sizes", "claim.has_twins and", "False and"),
    "trees of certain tokens": ("_check_sizes", "claim.tree is not None and", "False and"),
    "one bad block spoils the last": ("_decode_sparse", "results[block] =", "results[-1] ="),
    "high bytes wrap": ("_decode_sparse", ".astype(np.int64) * NARROW", ".astype(np.int8).astype(np.int64) * NARROW"),
    "high byte of an id is lost": ("_decode_sparse", "narrow[:, :width] =", "narrow[:, :min(width, 2)] ="),
    "negative numbers": ("_decode_other", "numbers >= 0.0", "numbers > -1.0"),
    "dense rows of any sum": ("_decode_other", "SUM_ERRORS[stated.encoding]", "9.0"),
    "dense rows as they come": ("_decode_other", "(numbers / sums)", "(numbers / 1.0)"),
    "impossible token of a dense row": (
        "_decode_other",
        "tokens] > 0.0",
        "tokens] >= 0.0",
    ),
    "vocabulary of one token too many": (
        "_check_sizes",
        "<= target_vocab_size:",
        "<= target_vocab_size + 1:",
    ),
    "empty blocks": ("_check_sizes", "not claim.token_ids", "False"),
    "draft token beyond the vocabulary": ("_check_sizes", "max(claim.token_ids) >=", "max(claim.token_ids) >"),
    "support sizes for other blocks": ("_check_sizes", "len(stated.support_sizes) != length", "False"),
    "supports of any size": ("_check_sizes", "<= MAX_SUPPORT:", "<= 2**40:"),
    "support sizes of dense blocks": (
        "_check_sizes",
        "stated.support_sizes or stated.wide_sizes:",
        "stated.wide_sizes:",
    ),
    "wide sizes of dense blocks": (
        "_check_sizes",
        "stated.support_sizes or stated.wide_sizes:",
        "stated.support_sizes:",
    ),
    "wide sizes for other blocks": ("_check_sizes", "len(stated.wide_sizes) != length", "False"),
    "wide sizes for longer blocks": (
        "_check_sizes",
        "len(stated.wide_sizes) != length",
        "len(stated.wide_sizes) < length",
    ),
    "wide sizes for shorter blocks": (
        "_check_sizes",
        "len(stated.wide_sizes) != length",
        "len(stated.wide_sizes) > length",
    ),
    "wide sizes above the supports": (
        "_check_sizes",
        "any(map(gt, stated.wide_sizes, stated.support_sizes))",
        "False",
    ),
    "wide sizes above the supports but not their sum": (
        "_check_sizes",
        "any(map(gt, stated.wide_sizes, stated.support_sizes))",
        "sum(stated.wide_sizes) > sum(stated.support_sizes)",
    ),
    "supports must be wide": (
        "_check_sizes",
        "gt, stated.wide_sizes, stated.support_sizes",
        "gt, stated.support_sizes, stated.wide_sizes",
    ),
    "high bytes are not data": ("_check_sizes", "+ sum(stated.wide_sizes)", ""),
    "data of any size": ("_check_sizes", "len(stated.data) != expected", "len(stated.data) < expected"),
    "data that ends early": ("_check_sizes", "len(stated.data) != expected", "len(stated.data) > expected"),
    "high bytes are low ones": ("_decode_sparse", "* NARROW", "* 1"),
    "high bytes of the last weights": (
        "_decode_sparse",
        "wide = columns < wide_sizes[:, None]",
        "wide = used & (columns >= (sizes - wide_sizes)[:, None])",
    ),
    "high bytes from behind": ("_decode_sparse", "high_bytes, dtype=np.uint8)", "high_bytes, dtype=np.uint8)[::-1]"),
    "high bytes come first": (
        "_split",
        "stated.data[border : border + entries], stated.data[border + entries :]",
        "stated.data[-entries:], stated.data[border:-entries]",
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, function: str, right: str, wrong: str) -> None:
    source = inspect.getsource(getattr(encoding, function))
    assert right in source, "the decoder no longer says this"
    planted: dict[str, object] = {}
    exec(source.replace(right, wrong), vars(encoding) | {"__name__": encoding.__name__}, planted)
    monkeypatch.setattr(encoding, function, planted[function])


def test_no_broken_block_raises_or_passes_and_each_violation_occurs() -> None:
    counts = run(50_000, seed=1)
    assert counts.messages == counts.accepted + counts.refused.total() == 50_000
    assert counts.accepted > counts.valid > 1_000
    expected = {TRANSPORT, *(violation.value for violation in set(Violation) - FROM_SESSION)}
    assert {reason for reason, number in counts.refused.items() if number > 20} == expected


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises(DecodingFaultError, match="target of"):
        run(20_000, seed=2)
