"""Sizes are counted in what they are limits of."""

import pytest

from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding, id_width
from draftwire.method.rounds import DraftBlock, Fence
from draftwire.requests.structured_output import MAX_FORM_BYTES, StructuredOutput
from draftwire_drafter.wire import in_parts
from draftwire_gateway.http.body_reading import header


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, 1), (2, 1), (256, 1), (257, 2), (2**16, 2), (2**16 + 1, 3), (2**24, 3), (2**32, 4)]
)
def test_token_id_takes_as_few_bytes_as_hold_the_largest(vocab_size: int, width: int) -> None:
    assert id_width(vocab_size) == width


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([5, 5, 5, 5], [2, 2]), ([9, 1, 1, 9, 1], [2, 2, 1]), ([3] * 7, [3, 3, 1])]
)
def test_each_part_is_filled_anew(sizes: list[int], lengths: list[int]) -> None:
    blocks = [
        DraftBlock(Fence(number, 0, 0, 1, 0), [1], DraftDistributions(Encoding.DENSE_FLOAT32, 8, bytes(size)))
        for number, size in enumerate(sizes)
    ]
    assert [len(part) for part in in_parts(blocks, 10)] == lengths


def test_form_is_limited_in_bytes_and_not_in_characters() -> None:
    StructuredOutput.regex("é" * (MAX_FORM_BYTES // 2))
    with pytest.raises(InvalidRequestError, match="bytes"):
        StructuredOutput.regex("é" * (MAX_FORM_BYTES // 2 + 1))


def test_header_that_comes_twice_is_none() -> None:
    def scope(*values: bytes) -> dict[str, object]:
        return {"headers": [(b"authorization", value) for value in values]}

    assert header(scope(b"Bearer a"), "authorization") == "Bearer a"
    assert header(scope(), "authorization") is None
    assert header(scope(b"Bearer a", b"Bearer b"), "authorization") is None
