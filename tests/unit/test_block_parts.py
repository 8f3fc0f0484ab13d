"""What leaves together is split so that no message grows beyond its limit."""

from cases import every
from hypothesis import given
from hypothesis import strategies as st

from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import DraftBlock, Fence
from draftwire.runtime.messages import MAX_BLOCKS
from draftwire_drafter.wire import in_parts


def blocks_of(sizes: list[int]) -> list[DraftBlock]:
    return [
        DraftBlock(Fence(number, 0, 0, 1, 0), [1], DraftDistributions(Encoding.DENSE_FLOAT32, 8, bytes(size)))
        for number, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 300))
def test_parts_hold_every_block_in_order_and_stay_below_the_limit(sizes: list[int], most_bytes: int) -> None:
    blocks = blocks_of(sizes)
    parts = list(in_parts(blocks, most_bytes))
    assert [block for part in parts for block in part] == blocks
    for part in parts:
        assert len(part) == 1 or sum(len(block.distributions.data) for block in part) <= most_bytes


@every(("most_bytes", "num_parts"), [(1000, 1), (30, 1), (29, 2), (10, 3), (1, 3)])
def test_no_more_parts_than_needed(most_bytes: int, num_parts: int) -> None:
    assert len(list(in_parts(blocks_of([10, 10, 10]), most_bytes))) == num_parts


def test_part_holds_no_more_blocks_than_a_verifier_takes() -> None:
    blocks = blocks_of([0] * (2 * MAX_BLOCKS + 1))
    assert [len(part) for part in in_parts(blocks, 1000)] == [MAX_BLOCKS, MAX_BLOCKS, 1]
