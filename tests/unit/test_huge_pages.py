"""Weights are moved to huge pages, and nothing else is."""

import sys
from pathlib import Path

import pytest
import torch

from draftwire.models import huge_pages
from draftwire.models.huge_pages import HUGE_PAGE, LEAST_BYTES, Mapping, own_mappings, use_huge_pages

SMAPS = """\
55d0c0000000-55d0c0400000 r-xp 00000000 08:01 77 /usr/bin/python3
Size:               4096 kB
Rss:                4096 kB
7f0000000000-7f0004000000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:               65000 kB
7f1000000000-7f1004000000 rw-p 00000000 08:01 78 /models/model.safetensors
Rss:               65536 kB
7f2000000000-7f2004000000 rw-s 00000000 00:01 79 /dev/shm/shared
Rss:               65536 kB
55d0d0000000-55d0d4000000 rw-p 00000000 00:00 0 [heap]
Rss:               30000 kB
7ffd00000000-7ffd00800000 rw-p 00000000 00:00 0 [stack]
Rss:                8192 kB
"""


def test_private_writable_memory_without_a_file_is_found() -> None:
    assert list(own_mappings(SMAPS)) == [
        Mapping(0x7F0000000000, 0x7F0004000000, 65000 * 1024),
        Mapping(0x55D0D0000000, 0x55D0D4000000, 30000 * 1024),
    ]


@pytest.mark.parametrize(
    ("size", "resident", "is_weights"),
    [(LEAST_BYTES, LEAST_BYTES, True), (LEAST_BYTES - 1, LEAST_BYTES, False), (2**30, 2**29, False)],
)
def test_what_is_large_and_full_counts_as_weights(size: int, resident: int, is_weights: bool) -> None:
    """Stacks are small, and a cache that is reserved is empty."""
    assert Mapping(0, size, resident).is_weights == is_weights


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_moved_weights_are_as_they_were() -> None:
    weights = torch.arange(16 * HUGE_PAGE // 4, dtype=torch.int32)
    expected = int(weights.sum())
    assert use_huge_pages() >= 14 * HUGE_PAGE
    assert int(weights.sum()) == expected


def test_where_the_kernel_says_nothing_of_memory_nothing_is_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "SMAPS", tmp_path / "none")
    assert use_huge_pages() == 0
