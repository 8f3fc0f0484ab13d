"""Room: what was reserved is there, what was not is refused, and accounts add up."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwire.engine.admission import ClosedEarly, Room
from draftwire.errors import NoRoomError, ProtocolViolationError
from draftwire.models.kv_cache import BLOCK_SIZE, KvCache, blocks_for
from tests.cache_integrity import check_integrity


def test_sessions_are_admitted_up_to_the_limit_and_released_once() -> None:
    room = Room(max_sessions=2, kv_cache_tokens=1000)
    room.reserve((1, 0), 1)
    room.reserve((1, 1), 1)  # another epoch is another session
    with pytest.raises(NoRoomError, match="2 sessions"):
        room.reserve((3, 0), 1)
    room.release((1, 0))
    with pytest.raises(KeyError):
        room.release((1, 0))
    room.reserve((3, 0), 1)


@pytest.mark.parametrize(("max_sessions", "num_tokens"), [(1, 1), (9, BLOCK_SIZE + 1)])
def test_refusal_changes_nothing_and_says_when_to_try_again(max_sessions: int, num_tokens: int) -> None:
    room = Room(max_sessions, kv_cache_tokens=4 * BLOCK_SIZE)
    room.reserve((1, 0), 2 * BLOCK_SIZE + 1)
    with pytest.raises(NoRoomError) as refused:
        room.reserve((2, 0), num_tokens)
    assert refused.value.retry_after_s > 0.0
    assert room.num_free_blocks == 1
    room.release((1, 0))
    assert room.usage == 0.0


@given(
    kv_cache_tokens=st.integers(1, 12 * BLOCK_SIZE),
    wishes=st.lists(st.tuples(st.integers(1, 5 * BLOCK_SIZE), st.booleans()), max_size=30),
)
@example(
    kv_cache_tokens=10 * BLOCK_SIZE,
    wishes=[(7 * BLOCK_SIZE, False), (3 * BLOCK_SIZE + 1, False), (3 * BLOCK_SIZE, False)],
)
def test_cache_has_room_for_whatever_was_admitted(kv_cache_tokens: int, wishes: list[tuple[int, bool]]) -> None:
    """Sessions use all that they reserved, in whole blocks; the cache of the same size never refuses one of them."""
    room, cache = Room(max_sessions=5, kv_cache_tokens=kv_cache_tokens), KvCache(kv_cache_tokens)
    admitted = {}
    for number, (num_tokens, leaves_another) in enumerate(wishes):
        if leaves_another and admitted:
            key = next(iter(admitted))
            room.release(key)
            cache.close(admitted.pop(key))
        fits = len(admitted) < 5 and blocks_for(num_tokens) <= cache.num_free_blocks
        if fits:
            room.reserve((number, 0), num_tokens)
            admitted[number, 0] = cache.open()
            cache.append(admitted[number, 0], num_tokens)
        else:
            with pytest.raises(NoRoomError):
                room.reserve((number, 0), num_tokens)
        assert room.num_free_blocks == cache.num_free_blocks
        assert room.usage == pytest.approx(1.0 - cache.num_free_blocks / cache.num_blocks)
    check_integrity(cache)


def test_only_so_many_sessions_that_were_closed_early_are_remembered() -> None:
    closed = ClosedEarly(bound=3)
    for session_id in range(5):
        closed.add((session_id, 0))
    for session_id in (0, 1):
        closed.refuse((session_id, 0))
    for session_id in (2, 3, 4):
        with pytest.raises(ProtocolViolationError):
            closed.refuse((session_id, 0))


def test_room_of_another_engine_counts_blocks_and_what_exceeds_the_text() -> None:
    room = Room(max_sessions=9, kv_cache_tokens=512, block_size=128, spare_tokens=9)
    assert (room.num_free_blocks, room.size) == (4, 512)
    room.reserve((1, 0), 119)
    assert room.num_free_blocks == 3
    room.reserve((2, 0), 120)
    assert room.num_free_blocks == 1
    with pytest.raises(NoRoomError, match="128 of the KV cache's 512 tokens"):
        room.reserve((3, 0), 120)
    room.release((2, 0))
    assert (room.num_free_blocks, room.num_reserved, room.usage) == (3, 128, 0.25)
