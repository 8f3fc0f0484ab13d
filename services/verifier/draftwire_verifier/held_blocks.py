"""Blocks of a session's coming rounds, which a drafter has drafted before it knows the text. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from draftwire.method.rounds import Fence, ReceivedBlock

RoundPlace = tuple[int, int, int]
"""Round, length and hash of the prefix that a block continues."""


class HeldFate(Enum):
    """Outcome of a block that was drafted ahead."""

    HIT = "hit"
    """It was held when its text came true."""
    LATE = "late"
    """Its text had come true when it arrived, and nobody else's block had."""
    MISSED = "missed"
    """It was held when another text came true."""
    STALE = "stale"
    """Another text had come true when it arrived."""
    NO_ROOM = "no_room"
    """Too many were held already."""
    REPEATED = "repeated"
    """Another one for its text was held."""
    ENDED = "ended"
    """It was held when its session ended or lost its drafter."""


@dataclass(slots=True)
class HeldTally:
    """Held blocks of all sessions. Changed by `HeldBlocks` only."""

    num_bytes: int = 0
    """Size of those that are held now."""
    num_kept: int = 0
    """Blocks that were held at some time."""
    fates: Counter[HeldFate] = field(default_factory=Counter)
    """Outcomes of those that are not held any more, or never were."""


class HeldBlocks:
    """The held blocks of one session, by the place that each is for: the first one that came for a place is kept.

    What is kept and dropped does not depend on what a block contains: that would bias the text.
    """

    def __init__(self, tally: HeldTally) -> None:
        """Starts without blocks; `tally` counts them, beside those of other sessions."""
        self._tally = tally
        self._blocks: dict[RoundPlace, ReceivedBlock] = {}
        self._num_wasted_tokens = 0
        self.num_bytes = 0
        """Size of those that are held now."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: ReceivedBlock, most: int) -> None:
        """Keeps a block, unless there is one for its place, or there are so many."""
        place = _place_of(block.fence)
        if place in self._blocks:
            self.count(block, HeldFate.REPEATED)
        elif len(self._blocks) >= most:
            self.count(block, HeldFate.NO_ROOM)
        else:
            self._blocks[place] = block
            self._tally.num_kept += 1
            self._resize(block.num_bytes)

    def take(self, fence: Fence, *, is_wanted: bool = True) -> ReceivedBlock | None:
        """Returns the block for a round that begins, if there is one and one is wanted. It is not held any more, nor
        are those that were for the same round or earlier ones.
        """
        found = None
        for place in [place for place in self._blocks if place[0] <= fence.round]:
            is_found = is_wanted and place == _place_of(fence)
            block = self._drop(place, HeldFate.HIT if is_found else HeldFate.MISSED)
            found = block if is_found else found
        return found

    def clear(self) -> None:
        """Drops all blocks."""
        for place in list(self._blocks):
            self._drop(place, HeldFate.ENDED)

    def count(self, block: ReceivedBlock, fate: HeldFate) -> None:
        """Counts what became of a block."""
        self._tally.fates[fate] += 1
        if fate not in (HeldFate.HIT, HeldFate.LATE):
            self._num_wasted_tokens += len(block.token_ids)

    def take_wasted(self) -> int:
        """Returns how many draft tokens were wasted since the last call: those of blocks whose text did not come true,
        or that were not wanted.
        """
        wasted, self._num_wasted_tokens = self._num_wasted_tokens, 0
        return wasted

    def _drop(self, place: RoundPlace, fate: HeldFate) -> ReceivedBlock:
        block = self._blocks.pop(place)
        self._resize(-block.num_bytes)
        self.count(block, fate)
        return block

    def _resize(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tally.num_bytes += num_bytes


def _place_of(fence: Fence) -> RoundPlace:
    return fence.round, fence.prefix_len, fence.prefix_hash
