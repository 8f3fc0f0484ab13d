"""A session at the verifier, its part in a step, and where its blocks come from.

Which source serves a round is fixed before the round begins, by what the gateway asked for: a calibration asks a
drafter, whose blocks are pushed, and a run may name a strategy of the verifier. It is never whose block is there first,
which may depend on the tokens in it: see docs/exactness.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from typing_extensions import override

from draftwire.audit import AuditSums
from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import EngineSession
from draftwire.method.round_parts import GuessPart, LogprobsPart
from draftwire.method.rounds import Fence, LocalDraft, Permit, ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.models.kv_cache import CachedSequence
from draftwire.requests.logprobs import MAX_PROMPT_PART
from draftwire.verification import VerificationRule
from draftwire.verification.deciding import Judgement, JudgingOutcome, MadeMasks, TokenReport, reports_prompt

MAX_UINT32 = 2**32 - 1
"""Largest value of a count in a verdict."""
NO_DRAFTER = -1
"""Identity of the sender of a local block: no drafter has it."""
REPORTED_CHUNK = MAX_PROMPT_PART
"""Most prompt tokens of a session that reports them in one step: each needs a row of logits over the vocabulary, and
all are in one report."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """A block that is to be drafted in the step that decides its round."""

    session: "TargetSession"
    strategy: str
    """Name of the `StepDrafter`."""
    num_draft_tokens: int
    """Most draft tokens; the target's own has room behind them."""


@dataclass(frozen=True, slots=True)
class OrderedBlocks:
    """Blocks that were drafted in a step."""

    by_session: Mapping[SessionKey, ReceivedBlock | None] = field(default_factory=dict)
    """None where it failed, and the round is decided without a draft; a session is missing while its text is read."""
    seconds: float = 0.0
    """How long it took."""


class StepDrafter(Protocol):
    """Drafts what is ordered, for all sessions of a step at once. All methods run on the torch thread."""

    def draft(self, orders: Sequence[DraftOrder], targets: Mapping[SessionKey, CachedSequence]) -> OrderedBlocks:
        """Returns blocks for some of the orders. Raises nothing: rounds go on without drafts.

        Args:
            orders: of different sessions.
            targets: sequences of the sessions in the target's cache, as far as they have one.
        """

    def rehearse(self, targets: Sequence[CachedSequence], num_tokens: int, context_length: int) -> None:
        """Drafts for all sequences at once, as if their tokens were all 0, and forgets that.

        Args:
            targets: in the target's cache, which has read at least one token of each.
            num_tokens: of each block; fewer than the context.
            context_length: in tokens: blocks end before it.
        """

    def forget(self, key: SessionKey) -> None:
        """Frees what it keeps of a session, if it keeps anything."""


class BlockSource:
    """One source of one session's blocks, with all that is kept of the session for it. By default it has none."""

    def block(self, session: "TargetSession") -> ReceivedBlock | None:
        """Returns the block of the round that begins, if it is there at once. Called if the source serves the round."""
        return None

    def order(self, session: "TargetSession") -> DraftOrder | None:
        """Returns what is to be drafted in the step of the current round. Called if the source serves the round."""
        return None

    def report(
        self, session: "TargetSession", verdict: Verdict, block: ReceivedBlock | None, *, has_failed: bool
    ) -> Verdict:
        """Returns a verdict with what the source adds. Called once a round, whoever served it, before the next begins.

        Args:
            session: its text and round are those after the verdict.
            verdict: as other sources have left it.
            block: the block that was judged and whose tokens could enter the text, if there was one.
            has_failed: whether a block was ordered that could not be drafted.
        """
        return verdict

    def close(self, session: "TargetSession") -> None:
        """Ends it with its session."""


class PushedBlocks(BlockSource):
    """Blocks that the session's drafter pushes: by default that of the current round alone, which is waited for."""

    def keeps(self, session: "TargetSession", block: ReceivedBlock) -> bool:
        """Whether a block is no business of the current round, but is kept or dropped here."""
        return False

    def keep(self, session: "TargetSession", block: ReceivedBlock) -> bool:
        """Keeps or drops such a block, which was checked, and returns whether it was kept.

        Raises:
            BlockViolationError: it violates the protocol.
        """
        return False

    def clear(self) -> None:
        """Drops all that is kept: the session's drafter was replaced or refused."""


@dataclass(slots=True, eq=False)
class LocalSource(BlockSource):
    """Drafts of the verifier by itself, in the rounds of the session's runs."""

    strategy: str
    """Name of the strategy, one of the verifier's `local_strategies`."""
    num_draft_tokens: int = 0
    """Most tokens of a block, of the latest run that it serves."""

    def may_draft(self) -> bool:
        """Whether what it drafts is to be used at present."""
        return True

    @override
    def report(
        self, session: "TargetSession", verdict: Verdict, block: ReceivedBlock | None, *, has_failed: bool
    ) -> Verdict:
        """Adds the strategy if the block was its own."""
        is_own = block is not None and block.local_strategy == self.strategy
        return replace(verdict, guess=GuessPart(self.strategy)) if is_own else verdict


FindSources = Callable[[LocalDraft, TargetSessionSpec, Iterable[LocalSource]], list[LocalSource]]
"""Returns the sources of a session that a draft names, the preferred one first: those that it has, or new ones.

Raises:
    InvalidRequestError: a strategy is unknown, or the number is out of range.
"""


class SessionReport(TokenReport, Protocol):
    """A `TokenReport` that is also stated in verdicts."""

    def of_round(self, block: ReceivedBlock | None, judgement: Judgement) -> LogprobsPart | None:
        """Returns what the verdict on a block says. Used on the event loop."""


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class TargetSession(EngineSession[TargetSessionSpec]):
    """State of a session at the verifier. Changed by the scheduler only."""

    rule: VerificationRule
    """Verification rule of its rounds."""
    round: int
    """The round that is decided next."""
    plain_rounds_left: int
    is_over: bool = False
    """Whether its text has ended."""
    drafter_id: int | None = None
    """The drafter whose blocks are accepted: the last with a valid permit. None before the first or after a refusal."""
    permit_number: int = -1
    """Number of that drafter's permit; -1 while there was none."""
    pushed: PushedBlocks
    """Source of the rounds outside of runs."""
    local: dict[type[LocalSource], LocalSource] = field(default_factory=dict)
    """Sources of its runs, or of what is watched: one of each kind."""
    run_source: LocalSource | None = None
    """Source of its latest run; None if its rounds are plain."""
    block: ReceivedBlock | None = None
    """The block to verify in the current round."""
    queued_at: float = 0.0
    """Time at which it was queued for a step, by the scheduler's clock."""
    masks: MadeMasks | None = None
    """The masks of its current round, if they were made before the step."""
    report: SessionReport | None = None
    """Reports about its tokens; None if nothing is reported."""

    @property
    def fence(self) -> Fence:
        """Fence that a message for the current round must have."""
        return Fence(*self.key, self.round, len(self.committed), self.committed.hash)

    @property
    def is_reading(self) -> bool:
        """Whether it is in prefill: afterwards only the last committed token is unread."""
        return self.num_unread > 1

    @property
    def num_readable(self) -> int:
        """Unread tokens that one step may read."""
        return min(self.num_unread, REPORTED_CHUNK) if reports_prompt(self.report) else self.num_unread

    @property
    def source(self) -> BlockSource | None:
        """Source of the current round; None if it is plain."""
        return self.run_source if self.plain_rounds_left else self.pushed

    @property
    def sources(self) -> tuple[BlockSource, ...]:
        """All that it has."""
        return (self.pushed, *self.local.values())

    @property
    def order(self) -> DraftOrder | None:
        """Block to draft in the step that decides the current round, if one is."""
        if self.source is None or self.block is not None or self.is_reading or self.masks is not None:
            return None
        return self.source.order(self)

    @property
    def num_rows(self) -> int:
        """Rows of logits that the current round takes at most."""
        if self.block is not None:
            return 1 + len(self.block.token_ids)
        order = self.order
        return 1 + (order.num_draft_tokens if order is not None else 0)

    @property
    @override
    def num_reserved(self) -> int:
        return self.spec.max_len + self.spec.max_tree_nodes  # all of a tree is read before its path is kept

    @property
    def has_speculation(self) -> bool:
        """Whether it accepts blocks: from its drafter or, before the first one, from a drafter with a permit."""
        return self.drafter_id is not None or bool(self.permit_number < 0 and self.spec.permit_key)

    def seat(self, permit: Permit, drafter_id: int) -> None:
        """Makes the holder of a permit its drafter."""
        self.drafter_id, self.permit_number = drafter_id, permit.number
        self.pushed.clear()

    def commit(self, token_ids: list[int]) -> None:
        """Commits the tokens of the current round. The next one has no block yet."""
        self.committed.append(token_ids)
        self.round += 1
        self.masks, self.queued = None, False
        has_stopped = not self.spec.parameters.stop_token_ids.isdisjoint(token_ids)
        self.is_over = has_stopped or len(self.committed) >= self.spec.max_len
        self.plain_rounds_left = 0 if self.is_over else max(0, self.plain_rounds_left - 1)


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step."""

    session: TargetSession
    block: ReceivedBlock | None
    """The block to verify; None is plain decoding."""
    max_read: int
    """Most committed tokens to read. If more are unread, the step only prefills and decides no round."""
    order: DraftOrder | None = None
    """The block that is drafted before the round is decided."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    items: Sequence[StepItem]
    started_at: float
    """Time by the scheduler's clock."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Sequences hold one entry for each item."""

    outcomes: Sequence[JudgingOutcome]
    num_unread: Sequence[int]
    """Committed tokens that are still unread; after a decided round, the last one."""
    num_reused: Sequence[int]
    """Prefix cache hits when the session's sequence was opened, tokens."""
    num_tokens: int
    """Tokens that the forward pass read, draft tokens included."""
    verify_us: int
    """How long it took, drafting included."""
    audit: Callable[[], Sequence[AuditSums | None]] = tuple
    """Returns the audit sums of each item's draft tokens; None if it has no distributions to audit. To be called once,
    on the torch thread, before the next step: no verdict waits for it."""
    drafted: Mapping[SessionKey, ReceivedBlock | None] = field(default_factory=dict)
    """Blocks that were ordered, drafted and verified; see `OrderedBlocks`."""
    draft_s: float = 0.0
    """How long they were drafted, seconds."""
    mask_us: Sequence[int] = ()
    """CPU time of the masks of each session's form; empty if there is no form."""


def mask_us_of(items: Sequence[StepItem]) -> list[int]:
    """Returns the CPU time of the masks of each item's session since its step before. Runs on the torch thread."""
    automata = [item.session.automaton for item in items]
    return [0 if automaton is None else int(automaton.take_cpu_s() * 1e6) for automaton in automata]
