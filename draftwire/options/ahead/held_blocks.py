"""Blocks of a session's coming rounds, which a drafter has drafted before it knows the text. Pure."""

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from typing_extensions import override

from draftwire.engine.target_session import MAX_UINT32, PushedBlocks, TargetSession
from draftwire.errors import BlockViolationError, Violation
from draftwire.method.ahead_limits import MAX_ROUNDS_AHEAD
from draftwire.method.round_parts import AheadPart
from draftwire.method.rounds import Fence, ReceivedBlock, Verdict

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
    fates: Counter[HeldFate] = field(default_factory=Counter)
    """Outcomes of those that are not held any more, or never were."""


class HeldBlocks(PushedBlocks):
    """The held blocks of one session, by the place that each is for: the first one that came for a place is kept.

    What is kept and dropped does not depend on what a block contains: that would bias the text.
    """

    def __init__(self, tally: HeldTally, most: int) -> None:
        self._tally = tally
        self._most = most
        self._blocks: dict[RoundPlace, ReceivedBlock] = {}
        self._next: ReceivedBlock | None = None
        self._num_wasted_tokens = 0
        self.num_bytes = 0
        """Size of those that are held now."""

    def __len__(self) -> int:
        return len(self._blocks)

    @override
    def keeps(self, session: TargetSession, block: ReceivedBlock) -> bool:
        """Whether a block is for a coming round, or for another text than the current round's. Counts others that were
        drafted ahead.
        """
        if block.fence.round >= session.round and block.fence != session.fence:
            return True
        if block.is_ahead and (block.fence.round < session.round or session.queued):
            self._count(block, HeldFate.STALE)
        elif block.is_ahead and block.drafter_id == session.drafter_id:
            self._count(block, HeldFate.LATE)
        return False

    @override
    def keep(self, session: TargetSession, block: ReceivedBlock) -> bool:
        rounds_ahead = block.fence.round - session.round
        if rounds_ahead > MAX_ROUNDS_AHEAD:
            raise BlockViolationError(Violation.PREFIX, f"block for a round that is {rounds_ahead} rounds ahead")
        if rounds_ahead == 0:
            self._count(block, HeldFate.STALE)
            return False
        return self.add(block)

    def add(self, block: ReceivedBlock) -> bool:
        """Keeps a block, unless there is one for its place, or there are too many; returns whether it did."""
        place = _place_of(block.fence)
        if place in self._blocks:
            self._count(block, HeldFate.REPEATED)
        elif len(self._blocks) >= self._most:
            self._count(block, HeldFate.NO_ROOM)
        else:
            self._blocks[place] = block
            self._resize(block.num_bytes)
            return True
        return False

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

    @override
    def block(self, session: TargetSession) -> ReceivedBlock | None:
        return self._next

    @override
    def report(
        self, session: TargetSession, verdict: Verdict, block: ReceivedBlock | None, *, has_failed: bool
    ) -> Verdict:
        """Finds the block of the next round, and adds what was found of those that were drafted ahead."""
        self._next = None
        if self._blocks:
            is_wanted = not (session.is_over or session.plain_rounds_left)
            self._next = self.take(session.fence, is_wanted=is_wanted)
        num_wasted, self._num_wasted_tokens = self._num_wasted_tokens, 0
        ahead = AheadPart(
            next_is_held=self._next is not None,
            is_ahead=block is not None and block.is_ahead,
            num_wasted_draft_tokens=min(num_wasted, MAX_UINT32),
            held_bytes=self.num_bytes,
        )
        return replace(verdict, ahead=ahead)

    @override
    def clear(self) -> None:
        for place in list(self._blocks):
            self._drop(place, HeldFate.ENDED)

    @override
    def close(self, session: TargetSession) -> None:
        self.clear()

    def _count(self, block: ReceivedBlock, fate: HeldFate) -> None:
        """Counts what became of a block. Its tokens are wasted if its text did not come true, or it was not wanted."""
        self._tally.fates[fate] += 1
        if fate not in (HeldFate.HIT, HeldFate.LATE):
            self._num_wasted_tokens += len(block.token_ids)

    def _drop(self, place: RoundPlace, fate: HeldFate) -> ReceivedBlock:
        block = self._blocks.pop(place)
        self._resize(-block.num_bytes)
        self._count(block, fate)
        return block

    def _resize(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tally.num_bytes += num_bytes


def _place_of(fence: Fence) -> RoundPlace:
    return fence.round, fence.prefix_len, fence.prefix_hash
