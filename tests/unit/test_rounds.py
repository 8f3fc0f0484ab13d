"""Prefix hashes name a prefix, and fences place a message."""

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwire.method.rounds import CommittedTokens, Fence, FenceVerdict, judge_fence

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
EXPECTED = Fence(session_id=7, epoch=2, round=5, prefix_len=30, prefix_hash=99)


@given(st.lists(IDS, min_size=1, max_size=6))
@example([[1, 2, 2**32 - 1]])
def test_hash_is_blake2b_over_little_endian_ids_however_appended(chunks: list[list[int]]) -> None:
    """So it differs, with odds of 1 - 2**-64, exactly where ids, their order or the borders between them do."""
    committed, everything = CommittedTokens(chunks[0]), [token for chunk in chunks for token in chunk]
    for chunk in chunks[1:]:
        committed.append(chunk)
        _ = committed.hash  # reading it changes nothing
    digest = hashlib.blake2b(struct.pack(f"<{len(everything)}I", *everything), digest_size=8).digest()
    assert committed.hash == int.from_bytes(digest, "little")
    chunks[0].append(0)  # its own ids are a copy
    assert (committed.ids, len(committed)) == (everything, len(everything))


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
