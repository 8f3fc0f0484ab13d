"""Moves the weights of a model to huge pages: a step of few rows reads all of them once, and looks fewer addresses up.

On Linux alone. Where the kernel refuses, pages stay as they were.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page."""
LEAST_BYTES = 4 * HUGE_PAGE
"""Smaller mappings are left alone: stacks of threads, for instance."""
LEAST_TOTAL_BYTES = 2**28
"""Smaller models are left alone: their weights stay in the caches of the processor, and they are loaded in no time."""
LEAST_FILLED = 0.9
"""Share of a mapping that has to be in memory: huge pages fill the rest of it, too."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Numbers of Linux; the second, since 6.1, does at once what the kernel otherwise does by and by."""
SMAPS = Path("/proc/self/smaps")
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Mapping:
    """Consecutive addresses of this process."""

    start: int
    stop: int
    resident_bytes: int

    @property
    def is_weights(self) -> bool:
        """Whether it is as large, and as full, as weights that were just loaded."""
        size = self.stop - self.start
        return size >= LEAST_BYTES and self.resident_bytes >= LEAST_FILLED * size


def resident_bytes() -> int:
    """Returns the memory of this process; 0 where it cannot be read."""
    try:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def use_huge_pages() -> int:
    """Moves to huge pages what is in memory in large pieces, and returns how many bytes the kernel was asked for.

    To be called once the weights are loaded, and before memory is reserved that is filled later. Takes about a second
    for 400 MB.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        mappings = list(own_mappings(SMAPS.read_text()))
    except OSError:  # a sandbox without it
        return 0
    num_bytes = 0
    for mapping in mappings:
        start = -(-mapping.start // HUGE_PAGE) * HUGE_PAGE
        size = mapping.stop // HUGE_PAGE * HUGE_PAGE - start
        if mapping.is_weights and madvise(start, size, MADV_HUGEPAGE) == 0:
            madvise(start, size, MADV_COLLAPSE)
            num_bytes += size
    return num_bytes


def own_mappings(smaps: str) -> Iterator[Mapping]:
    """Yields the private, writable mappings of a /proc/PID/smaps that belong to no file."""
    wanted: tuple[int, int] | None = None
    for line in smaps.splitlines():
        name, _, rest = line.partition(" ")
        if name.endswith(":"):
            if wanted is not None and name == "Rss:":
                yield Mapping(*wanted, int(rest.split()[0]) * 1024)
        else:
            fields = line.split()
            is_own = fields[1].startswith("rw-p") and (len(fields) == 5 or fields[5].startswith(("[heap]", "[anon")))
            start, _, stop = name.partition("-")
            wanted = (int(start, 16), int(stop, 16)) if is_own else None
