"""Choice of the drafts of a session's rounds: the seam between the loop and what chooses."""

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from typing_extensions import override

from draftwire_gateway.session.ports import DrafterPort, TargetPort
from draftwire_gateway.session.round_times import RoundTimes


class DraftSource(Enum):
    """Drafter of a round."""

    DRAFTER = "drafter"
    """A drafter of the pair's model."""
    AHEAD = "ahead"
    """The same, which uses the time of a verdict to draft for the rounds after."""
    VERIFIER = "verifier"
    """The verifier by itself: without a model, or by its head."""

    __hash__ = object.__hash__  # that of `Enum` is a function in Python, and arms are looked up in every round


class Arm(NamedTuple):
    """One way to run rounds."""

    source: DraftSource | None
    """None for plain decoding."""
    length: int
    """Draft tokens of a round, of a token tree on each path; 0 for plain decoding."""
    num_nodes: int = 0
    """Draft tokens of a token tree, at least as many as its length; 0 for a chain."""

    @property
    def uses_drafter(self) -> bool:
        """Whether a drafter drafts."""
        return self.source in (DraftSource.DRAFTER, DraftSource.AHEAD)

    @property
    def num_rows(self) -> int:
        """Draft tokens that the verifier reads at most."""
        return self.num_nodes or self.length


PLAIN = Arm(None, 0)


class Policy(Protocol):
    """Chooses what is drafted for the rounds of one session.

    Depends only on lengths and on rounds that are over, never on drafted tokens: see docs/exactness.md. All but
    `next_draft` may be left as it is here, where every draft pays and is as long as there is room.
    """

    def observe(self, times: RoundTimes) -> None:
        """Learns from a committed round; a `RoundObserver`."""
        return

    @property
    def uses_drafter(self) -> bool:
        """Whether a drafter is to draft now, if there is one: only then is the session opened on it."""
        return True

    def preferred(self, target: TargetPort, drafters: Sequence[DrafterPort], session_id: int) -> DrafterPort:
        """Returns the drafter to open the session on, whose blocks go to the target: of at least one, each of another
        model, the best by load first. The session's id is random.
        """
        return drafters[0]

    def join(self, target: TargetPort, drafter: DrafterPort | None) -> None:
        """Records who drafts for the session from now on, if anybody does; called again when that changes."""
        return

    def leave(self) -> None:
        """Records that the session runs no rounds, until it joins again."""
        return

    @abstractmethod
    def next_draft(self, round_number: int, most: int) -> Arm:
        """Returns what the drafter is to draft for the round that is requested now; `PLAIN` for nothing. There is room
        for `most` tokens, on each path of a tree; less than 1 for none.
        """

    def replace_arm(self, round_number: int, arm: Arm) -> None:
        """Records that something else is requested for a round than `next_draft` has just returned."""
        return

    def num_rounds(self, most: int) -> int:
        """Returns how many rounds without a drafter to request at once, 1 to `most`."""
        return most

    def next_own_length(self, round_number: int, most: int) -> int:
        """Returns how many tokens the verifier is to draft by itself in each of the rounds that are requested now, 0 to
        `most`, from `round_number` on.
        """
        return most


class FixedPolicy(Policy):
    """Drafts equally many tokens for every round, as far as there is room."""

    def __init__(self, num_draft_tokens: int) -> None:
        """`num_draft_tokens` is what the request says, 0 for plain decoding."""
        self._num_draft_tokens = num_draft_tokens

    @override
    def next_draft(self, round_number: int, most: int) -> Arm:
        length = min(self._num_draft_tokens, most)
        return Arm(DraftSource.DRAFTER, length) if length >= 1 else PLAIN
