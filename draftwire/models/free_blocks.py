"""Free blocks of a KV cache, handed out so that the blocks of a text follow each other. Pure bookkeeping.

Keys that are in one run of memory can be read where they are. So a text's next block is the one behind its last,
as long as that is free, and a text that has none there gets the middle of the largest gap: it leaves as much room to
grow to whoever has the blocks before it.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush


class FreeBlocks:
    """The free blocks among those numbered from 1. A call takes logarithmic time, on average."""

    def __init__(self, num_blocks: int) -> None:
        """Starts with blocks 1 to `num_blocks`, all free."""
        self._ends: dict[int, int] = {}  # of each gap, by its first block; the end is not in it
        self._starts: dict[int, int] = {}  # the inverse
        self._sizes: list[tuple[int, int]] = []  # a heap of (-size, start), also of gaps that are gone
        self._count = 0
        if num_blocks:
            self._add(1, num_blocks + 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Yields the free blocks, in no order."""
        for start, end in self._ends.items():
            yield from range(start, end)

    def take(self, last: int | None, count: int) -> list[int]:
        """Returns blocks for a text, which are no longer free.

        Args:
            last: the text's last block; None if it has none.
            count: at most as many as there are.
        """
        taken: list[int] = []
        while len(taken) < count:
            start = None if last is None else last + 1
            if start is None or start not in self._ends:
                start = self._place(count - len(taken))
            end = min(self._ends[start], start + count - len(taken))
            self._cut(start, end)
            taken.extend(range(start, end))
            last = end - 1
        return taken

    def put(self, blocks: Iterable[int]) -> None:
        """Frees blocks."""
        for block in blocks:
            start = self._starts.get(block)
            end = self._ends.get(block + 1)
            if start is not None:
                self._remove(start)
            if end is not None:
                self._remove(block + 1)
            self._add(block if start is None else start, block + 1 if end is None else end)

    def _place(self, count: int) -> int:
        """Makes a gap begin where a new run of `count` blocks, or as many as fit, is best begun; returns its start."""
        while True:
            size, start = self._sizes[0]
            end = self._ends.get(start)
            if end is not None and end - start == -size:
                break
            heappop(self._sizes)
        middle = max(start, min(start + (end - start) // 2, end - count))
        if middle > start:
            self._remove(start)
            self._add(start, middle)
            self._add(middle, end)
        return middle

    def _cut(self, start: int, end: int) -> None:
        """Takes the blocks from `start`, where a gap begins, to `end` out of it."""
        old_end = self._ends[start]
        self._remove(start)
        if end < old_end:
            self._add(end, old_end)

    def _add(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        self._count += end - start
        heappush(self._sizes, (start - end, start))
        if len(self._sizes) > 2 * len(self._ends) + 64:
            self._sizes = [(first - last, first) for first, last in self._ends.items()]
            heapify(self._sizes)

    def _remove(self, start: int) -> None:
        end = self._ends.pop(start)
        del self._starts[end]
        self._count -= end - start
