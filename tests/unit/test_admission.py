"""Room: what was reserved is there, what was not is refused, and accounts add up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.errors import NoRoomError, ProtocolViolationError
from draftwire.models.kv_cache import BLOCK_SIZE, KvCache, blocks_for
from draftwire.services.admission import ClosedEarly, Room

UNHURRIED = settings(deadline=None)  # the machine may be busy


def test_sessions_are_admitted_up_to_the_limit() -> None:
    room = Room(max_sessions=2, kv_cache_tokens=1000)
    room.reserve((1, 0), 1)
    room.reserve((1, 1), 1)  # another epoch is another session
    with pytest.raises(NoRoomError, match="2 sessions"):
        room.reserve((3, 0), 1)
    room.release((1, 0))
    room.reserve((3, 0), 1)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 2), (160, 10)])
def test_room_is_reserved_in_whole_blocks_as_the_cache_gives_it_out(num_tokens: int, num_blocks: int) -> None:
    room = Room(max_sessions=2, kv_cache_tokens=160)
    room.reserve((1, 0), num_tokens)
    assert room.num_free_blocks == 10 - num_blocks
    assert room.usage == pytest.approx(num_blocks / 10)


def test_session_is_refused_where_one_token_does_not_fit() -> None:
    room = Room(max_sessions=9, kv_cache_tokens=10 * BLOCK_SIZE)
    room.reserve((1, 0), 7 * BLOCK_SIZE)
    with pytest.raises(NoRoomError):
        room.reserve((2, 0), 3 * BLOCK_SIZE + 1)
    room.reserve((2, 0), 3 * BLOCK_SIZE)
    assert (room.num_free_blocks, room.usage) == (0, 1.0)


@pytest.mark.parametrize("cause", ["sessions", "tokens"])
def test_refusal_changes_nothing_and_says_when_to_try_again(cause: str) -> None:
    room = Room(max_sessions=1 if cause == "sessions" else 9, kv_cache_tokens=64)
    room.reserve((1, 0), 33)
    with pytest.raises(NoRoomError) as refused:
        room.reserve((2, 0), 1 if cause == "sessions" else 17)
    assert refused.value.retry_after_s > 0.0
    assert room.num_free_blocks == 1
    room.release((1, 0))
    assert room.usage == 0.0


def test_reservation_is_given_back_once() -> None:
    room = Room(max_sessions=9, kv_cache_tokens=64)
    room.reserve((1, 0), 10)
    room.reserve((2, 0), 10)
    room.release((1, 0))
    with pytest.raises(KeyError):
        room.release((1, 0))
    assert room.num_free_blocks == 3


@given(
    kv_cache_tokens=st.integers(1, 200),
    wishes=st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=30),
)
@UNHURRIED
def test_cache_has_room_for_whatever_was_admitted(kv_cache_tokens: int, wishes: list[tuple[int, bool]]) -> None:
    """Sessions use all that they reserved; the cache of the same size never refuses one of them."""
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
        assert 0.0 <= room.usage <= 1.0
    cache.check_integrity()


def test_only_so_many_sessions_that_were_closed_early_are_remembered() -> None:
    closed = ClosedEarly(bound=3)
    for session_id in range(5):
        closed.add((session_id, 0))
    for session_id in (0, 1):
        closed.refuse((session_id, 0))
    for session_id in (2, 3, 4):
        with pytest.raises(ProtocolViolationError):
            closed.refuse((session_id, 0))
