"""Prefix hashes name a prefix, and fences place a message."""

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.rounds import CommittedTokens, Fence, FenceVerdict, judge_fence

UNHURRIED = settings(deadline=None)  # the machine may be busy
UINT32 = st.integers(0, 2**32 - 1)
IDS = st.lists(UINT32, max_size=20)
EXPECTED = Fence(session_id=7, epoch=2, round=5, prefix_len=30, prefix_hash=99)
GOLDEN_HASH = 0x59E41E219973C401
"""Of the ids 1, 2, 2**32 - 1."""


def hash_of(ids: list[int]) -> int:
    return CommittedTokens(ids).hash


@given(st.lists(IDS, min_size=1, max_size=6))
@UNHURRIED
def test_hash_does_not_depend_on_how_ids_were_appended(chunks: list[list[int]]) -> None:
    everything = [token for chunk in chunks for token in chunk]
    committed = CommittedTokens(chunks[0])
    for chunk in chunks[1:]:
        committed.append(chunk)
        _ = committed.hash  # reading it changes nothing
    assert committed.hash == hash_of(everything)
    assert committed.ids == everything
    assert len(committed) == len(everything)


@given(IDS, IDS)
@UNHURRIED
def test_hash_differs_exactly_where_ids_differ(some: list[int], others: list[int]) -> None:
    """Odds of a false alarm: 2**-64 per example."""
    assert (hash_of(some) == hash_of(others)) == (some == others)


@given(IDS, UINT32)
@UNHURRIED
def test_every_further_token_changes_the_hash(ids: list[int], token: int) -> None:
    committed = CommittedTokens(ids)
    before = committed.hash
    committed.append([token])
    assert committed.hash != before


def test_hash_depends_on_order_and_on_borders_between_ids() -> None:
    hashes = [hash_of(ids) for ids in ([1, 2], [2, 1], [1], [1, 0], [0, 1], [0], [], [1 + 2 * 2**16], [2**16, 2])]
    assert len(set(hashes)) == len(hashes)


@given(IDS)
@UNHURRIED
def test_hash_is_blake2b_over_little_endian_32_bit_ids(ids: list[int]) -> None:
    digest = hashlib.blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=8).digest()
    assert hash_of(ids) == int.from_bytes(digest, "little")


def test_hash_has_its_golden_value() -> None:
    assert hash_of([1, 2, 2**32 - 1]) == GOLDEN_HASH


def test_committed_ids_are_copied() -> None:
    ids = [1, 2]
    committed = CommittedTokens(ids)
    ids.append(3)
    committed.append([4])
    assert committed.ids == [1, 2, 4]
    assert ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, FenceVerdict.CURRENT),
        # Older: dropped, whatever else it says.
        ({"round": 4}, FenceVerdict.STALE),
        ({"round": 4, "prefix_len": 29, "prefix_hash": 1}, FenceVerdict.STALE),
        ({"round": 0}, FenceVerdict.STALE),
        ({"epoch": 1}, FenceVerdict.STALE),
        ({"epoch": 1, "round": 6}, FenceVerdict.STALE),
        ({"epoch": 0, "round": 1000, "prefix_len": 500, "prefix_hash": 1}, FenceVerdict.STALE),
        # From the future.
        ({"round": 6}, FenceVerdict.VIOLATION),
        ({"round": 6, "prefix_len": 31, "prefix_hash": 1}, FenceVerdict.VIOLATION),
        ({"epoch": 3}, FenceVerdict.VIOLATION),
        ({"epoch": 3, "round": 0}, FenceVerdict.VIOLATION),
        # The same numbers about something else.
        ({"prefix_hash": 98}, FenceVerdict.VIOLATION),
        ({"prefix_len": 29}, FenceVerdict.VIOLATION),
        ({"prefix_len": 31}, FenceVerdict.VIOLATION),
        ({"session_id": 8}, FenceVerdict.VIOLATION),
    ],
    ids=str,
)
def test_fence_is_judged_by_time_first_and_then_by_prefix(changes: dict[str, int], verdict: FenceVerdict) -> None:
    assert judge_fence(replace(EXPECTED, **changes), EXPECTED) is verdict
