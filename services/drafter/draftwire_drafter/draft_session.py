"""State of a session at the drafter. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from draftwire.drafting.growth_plan import num_read_nodes
from draftwire.engine.session_book import EngineSession
from draftwire.method.ahead_limits import room_for_drafts
from draftwire.method.rounds import Calibration, DraftSessionSpec, Permit
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire_drafter.ahead import GUESSES, Branch


@dataclass(slots=True)
class Fed:
    """The features that a session was fed with."""

    stop: int
    """Position behind the last ones."""
    limit: int
    """Position behind the last ones that were asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(EngineSession[DraftSessionSpec]):
    """State of a session at the drafter. Changed by the scheduler only."""

    num_known: int
    """Committed tokens that were passed to the strategy."""
    last_calibrated: int = -1
    """Round of the latest calibration."""
    last_asked: int = -1
    """Round of the block that was requested last, by a calibration or by an outcome."""
    max_rounds_ahead: int = 0
    """Rounds ahead of the latest calibration."""
    num_draft_tokens: int = 0
    """Draft tokens of the latest calibration."""
    root: Branch | None = None
    """The committed text, and the texts that it may become; None before the first calibration."""
    outcome_s: float | None = None
    """Usual time from sending a block until it is known how its round ended, seconds; None before any round."""
    num_ahead: Counter[int] = field(default_factory=Counter)
    """Number of blocks that the verifier holds or may come to hold, by coming round, whatever became of their texts."""
    fed: Fed | None = None
    """None before features were asked for."""
    calibration: Calibration | None = None
    """The calibration whose block is drafted next."""
    queued: bool = True
    """Whether it waits for a step or is in one: first for prefill, later for a calibration."""
    is_reading: bool = True
    """Whether its prompt is still being read."""
    permit: Permit | None = None
    """Lets it push blocks; None until the first calibration, if the session was opened without."""
    has_shown_permit: bool = False
    """Whether a block was sent; the first one carries the permit."""
    cut_at: int | None = None
    """Round of the block that is to end after the token that is being drawn. Set on the event loop, read on the torch
    thread during drafting."""

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache to reserve: for the text, for trees, and for what branches do not share with it."""
        nodes = num_read_nodes(self.spec.max_tree_nodes, self.spec.parameters.max_draft_tokens)
        branch_len = BLOCK_SIZE + 2 * (self.spec.parameters.max_draft_tokens + 1)
        return self.spec.max_len + nodes + self.spec.max_branches * blocks_for(branch_len) * BLOCK_SIZE

    @property
    def num_branches_left(self) -> int:
        """Texts for which to draft ahead now at most: a share of all for each round, as far as the verifier holds their
        blocks. It would drop others, and nobody would send them again.
        """
        share = self.spec.max_branches // max(1, self.max_rounds_ahead)
        return min(share, (self.spec.max_held_blocks or self.spec.max_branches) - self.num_ahead.total())

    @property
    def num_guesses(self) -> int:
        """Guesses to make for each place of its next block."""
        return GUESSES if self.spec.max_branches and self.max_rounds_ahead else 0

    @property
    def reads_much(self) -> bool:
        """Whether more is unread than a round commits: a prompt, or tokens committed during its prefill."""
        return self.is_reading or self.num_unread > self.spec.parameters.max_draft_tokens + 1

    def length_at(self, prefix_len: int) -> int:
        """Returns how many tokens to draft after so many committed ones."""
        return min(self.num_draft_tokens, room_for_drafts(self.spec.max_len, prefix_len))
