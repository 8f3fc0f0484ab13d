"""The wait for a drafter's blocks: whether one is awaited, and whether the drafter is awake. Calls nobody."""

from enum import Enum, auto

MAX_STRETCH = 2.0
"""A block counts in the estimate of a drafter's times as at most so many times the timeout that it was asked under: one
pause, of the verifier too, must not make all sessions patient."""


class BlockFate(Enum):
    """Outcome of a round's block."""

    NOT_REQUESTED = auto()
    VERIFIED = auto()
    MISSING = auto()
    """The drafter replied in time that it sent the block, which the verifier does not have."""
    LATE = auto()
    """The drafter did not reply in time, and the round was plain."""


class BlockWait:
    """The latest request of a block. Times are of one clock, seconds; a seat makes a new one for each drafter."""

    def __init__(self) -> None:
        self.is_awaited = False
        """Whether a block of the open round is awaited: not if it was late, though it may still be verified."""
        self.is_asleep = False
        """Whether the drafter did not reply in time, and is not asked for blocks until it does."""
        self.flush_requested = False
        """Whether the drafter was asked for the tokens drawn so far of that block."""
        self.num_missing = 0
        """Blocks in a row that went missing."""
        self.num_tokens = 0
        """How many tokens were requested of it."""
        self.is_held = False
        """Whether it was drafted ahead: how soon it is verified tells nothing of the drafter."""
        self._round = -1
        self._asked_at = 0.0
        self._timeout_s = 0.0
        self._asleep_since = 0.0
        self._has_replied = self._is_missing = False

    def begin(self, round_number: int, num_tokens: int, now: float, timeout_s: float, *, is_held: bool = False) -> None:
        """Starts to wait for the block of a round, which is requested now; `is_held` if the verifier has it already."""
        self._round, self._asked_at, self._timeout_s = round_number, now, timeout_s
        self.num_tokens = num_tokens
        self.is_awaited, self.flush_requested = True, is_held
        self.is_held = self._has_replied = is_held
        self._is_missing = False

    def expire(self, now: float) -> bool:
        """Ends the wait for a block that is late; returns whether the drafter fell asleep.

        It does unless it has replied: then the verifier has the block, and is late itself, or will never get it. The
        block may still be the first to be verified.
        """
        self.is_awaited, self._is_missing = False, self._has_replied
        if self._is_missing:
            return False
        self.is_asleep, self._asleep_since = True, now
        return True

    def take_reply(self, round_number: int) -> bool:
        """Records the reply to the flush of a round; returns False, and records nothing, for any other message."""
        if not self.flush_requested or round_number != self._round or self._has_replied:
            return False
        self._has_replied = True
        return True

    def end(self, round_number: int, has_block: bool) -> BlockFate:
        """Ends the wait with the round's verdict: of a block, or of a plain round."""
        was_awaited, self.is_awaited = self.is_awaited, False
        if self._round != round_number:
            return BlockFate.NOT_REQUESTED
        if was_awaited or has_block:
            self.num_missing = 0
            return BlockFate.VERIFIED
        if self._is_missing:
            self.num_missing += 1
            return BlockFate.MISSING
        return BlockFate.LATE

    def wake(self) -> bool:
        """Wakes the drafter; returns whether it was asleep."""
        was_asleep, self.is_asleep = self.is_asleep, False
        return was_asleep

    def sleeping_s(self, now: float) -> float:
        """Returns for how long the drafter has been asleep; 0 if it is awake."""
        return now - self._asleep_since if self.is_asleep else 0.0

    def seconds_until(self, arrived_at: float) -> float:
        """Returns how long the block took that arrived then, as the estimate of the drafter's times counts it."""
        return min(arrived_at - self._asked_at, MAX_STRETCH * self._timeout_s)
