"""Blocks of a session's coming rounds, which a drafter has drafted before it knew the text. Pure."""

from draftwire.method.rounds import Fence, ReceivedBlock

RoundPlace = tuple[int, int, int]
"""Round, length and hash of the prefix that a block continues."""


class HeldBlocks:
    """The held blocks of one session, by the place that each is for: the first one that came for a place is kept.

    Nothing here depends on what a block contains. To drop one because of its tokens would bias the text.
    """

    def __init__(self) -> None:
        """Starts without blocks."""
        self._blocks: dict[RoundPlace, ReceivedBlock] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: ReceivedBlock, most: int) -> bool:
        """Keeps a block; returns False, and keeps nothing, if there is one for its place, or there are so many."""
        place = _place_of(block.fence)
        if place in self._blocks or len(self._blocks) >= most:
            return False
        self._blocks[place] = block
        return True

    def take(self, fence: Fence) -> tuple[ReceivedBlock | None, int]:
        """Returns the block for a round that begins, if there is one, and how many others were for that round or
        earlier ones. All these are not held any more.
        """
        found = self._blocks.pop(_place_of(fence), None)
        missed = [place for place in self._blocks if place[0] <= fence.round]
        for place in missed:
            del self._blocks[place]
        return found, len(missed)

    def clear(self) -> int:
        """Drops all blocks, and returns how many there were."""
        num_blocks = len(self._blocks)
        self._blocks.clear()
        return num_blocks


def _place_of(fence: Fence) -> RoundPlace:
    return fence.round, fence.prefix_len, fence.prefix_hash
