"""The drafter's scheduler, which batches sessions into steps. Pure: no tensors, no transport, no clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftwire.drafting.growth_plan import num_read_nodes
from draftwire.drafting.strategy import Draft
from draftwire.engine.session_book import EngineSession, SessionBook
from draftwire.errors import DraftwireError, InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import (
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    Permit,
    RoundOutcome,
    SendDrafted,
)
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.requests.automaton import Automaton
from draftwire_drafter.ahead import GUESSES, Branch, Endings
from draftwire_drafter.session_trees import check_tree, check_trees


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(EngineSession[DraftSessionSpec]):
    """State of a session at the drafter. Changed by the scheduler only."""

    num_known: int
    """Committed tokens that were passed to the strategy."""
    last_calibrated: tuple[int, int] = (-1, 0)
    """Round and attempt of the latest calibration."""
    last_asked: tuple[int, int] = (-1, 0)
    """Round and attempt of the block that was requested last, by a calibration or by an outcome."""
    max_rounds_ahead: int = 0
    """Of the latest calibration."""
    num_draft_tokens: int = 0
    """Of the latest calibration."""
    root: Branch | None = None
    """The committed text, and the texts that it may become; None before the first calibration."""
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
    cut_at: tuple[int, int] | None = None
    """Round and attempt of the block that is to end after the token that is being drawn. Set on the event loop, read on
    the torch thread during drafting."""

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache to reserve: for the text, for trees, and for what branches do not share with it."""
        nodes = num_read_nodes(self.spec.max_tree_nodes, self.spec.parameters.max_draft_tokens)
        branch_len = BLOCK_SIZE + 2 * (self.spec.parameters.max_draft_tokens + 1)
        return self.spec.max_len + nodes + self.spec.max_branches * blocks_for(branch_len) * BLOCK_SIZE

    @property
    def num_guesses(self) -> int:
        """Guesses to make for each place of its next block."""
        return GUESSES if self.spec.max_branches and self.max_rounds_ahead else 0

    @property
    def reads_much(self) -> bool:
        """Whether more is unread than a round commits: a prompt, or tokens committed during its prefill."""
        return self.is_reading or self.num_unread > self.spec.parameters.max_draft_tokens + 1


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step: new committed tokens to read, and the block to draft, if any."""

    session: DraftSession
    base_len: int
    """Committed tokens that were passed to the strategy before."""
    token_ids: list[int]
    """New committed tokens."""
    calibration: Calibration | None
    """The block to draft; None only reads."""
    max_read: int | None
    """Tokens to read at most; None is no limit."""


@dataclass(frozen=True, slots=True)
class AheadItem:
    """One branch's part in a step that nobody asked for yet."""

    session: DraftSession
    branch: Branch
    parent: Branch | None
    """The text that it continues, to draft its block. None reads the last token of its block, to guess the next one."""

    @property
    def reads_on(self) -> bool:
        """Whether nothing is drafted."""
        return self.parent is None

    @property
    def num_wanted(self) -> int:
        """Tokens that its block has to have, so that it is sent: one that was cut short is drafted anew if it is
        requested, but one that is requested while it is drafted is sent as it is.
        """
        if self.reads_on:
            return 0
        return 1 if self.branch.calibration is not None else self.branch.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One call into the engine: for what was requested or, if nothing was, for what may be requested next."""

    items: Sequence[StepItem]
    ahead: Sequence[AheadItem] = ()

    @property
    def reads_prompts(self) -> bool:
        """Whether some session is in prefill."""
        return any(item.max_read is not None for item in self.items)


DraftOutcome = DraftBlock | DraftwireError | None
"""Outcome of a session's part in a step: a block, an error that fails the session, or None if tokens were only read."""


AheadOutcome = Draft | DraftwireError | None
"""Outcome of a branch's part in a step: a block, an error if it cannot be drafted for, or None if it was cut short."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Sequences hold one entry for each item."""

    outcomes: Sequence[DraftOutcome]
    num_unread: Sequence[int]
    num_reused: Sequence[int]
    num_read: int
    """Tokens that were read before drafting."""
    calibration_s: float
    """Time of that reading, seconds."""
    draft_s: float = 0.0
    """Time of drafting, seconds."""
    num_passes: int = 0
    """Forward passes of drafting."""
    guesses: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """By index of the item, what else may stand in the places of its block."""
    ahead: Sequence[AheadOutcome] = ()
    """One for each branch of the step."""
    timings: DraftTimings = field(default_factory=DraftTimings)
    """Of each branch's block."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of a step for one session."""

    session: DraftSession
    outcome: DraftOutcome
    """A block is sent; an error fails the session."""
    is_opened: bool
    """Whether its prefill was completed in this step."""
    is_flushed: bool = False
    """Whether the outcome is a block that the gateway asked for as far as it was drawn, and gets a reply for."""


@dataclass(kw_only=True)
class Scheduler(SessionBook[DraftSession, Step]):
    """Queues prompts and calibrations and batches them into steps. One step runs at a time."""

    max_tree_nodes: int = 0
    """Most tokens of a token tree that a session may ask for."""
    endings: Endings = field(default_factory=Endings)
    """How rounds have ended so far."""
    adopted: list[Branch] = field(default_factory=list)
    """Branches that have become the texts of their sessions, for the engine, which takes them out."""
    left: list[Branch] = field(default_factory=list)
    """Branches that will not, for the engine, which takes them out."""
    branch_outcomes: Counter[str] = field(default_factory=Counter)
    """Branches by what became of them: "hit", their text came true; "missed", another did; "abandoned", there was no
    time or no room for their blocks.
    """

    def open(self, spec: DraftSessionSpec, lease_id: int, automaton: Automaton | None = None) -> DraftSession:
        """Admits a session and schedules its prefill.

        Args:
            spec: the session.
            lease_id: lease that the session belongs to.
            automaton: of its structured output, if there is one that this model supports.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            ProtocolViolationError: the session was closed before it was opened.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        self._check_new(spec)
        if spec.target_vocab_size < 1:
            raise InvalidRequestError("target_vocab_size must be at least 1")
        wanted = spec.parameters.max_draft_tokens
        if not 1 <= wanted <= self.max_draft_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {wanted} is not in 1..{self.max_draft_tokens}, the drafter's limit"
            )
        if not spec.token_ids:
            raise InvalidRequestError("the prompt is empty")
        self._check_prompt_len(spec)
        self._check_max_len(spec)
        check_trees(spec, self.max_tree_nodes)
        session = DraftSession(spec=spec, lease_id=lease_id, automaton=automaton, num_known=len(spec.token_ids))
        session.permit = spec.permit
        self._admit(session)
        self._ready.append(session)
        return session

    def calibrate(self, calibration: Calibration) -> None:
        """Commits a session's new tokens and schedules its next block. A stale message is dropped.

        Raises:
            ProtocolViolationError: the message does not continue the committed tokens. The session must be closed.
        """
        fence, asked = calibration.fence, (calibration.fence.round, calibration.attempt)
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or asked <= session.last_calibrated:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        new_ids = self._new_ids(session, calibration)
        limit = session.spec.parameters.max_draft_tokens
        if not 1 <= calibration.num_draft_tokens <= limit:
            raise ProtocolViolationError(f"{calibration.num_draft_tokens} draft tokens wanted, the limit is {limit}")
        if fence.prefix_len + calibration.num_draft_tokens > session.spec.max_len:
            raise ProtocolViolationError("calibration beyond the session's max_len")
        check_tree(calibration, session.spec)
        session.last_calibrated = asked
        session.max_rounds_ahead = calibration.max_rounds_ahead
        session.num_draft_tokens = calibration.num_draft_tokens
        session.permit = calibration.permit or session.permit
        is_known = asked <= session.last_asked  # by the outcome of the round before
        if new_ids or not is_known:
            self._commit(session, fence, new_ids)
        if not is_known:
            self._ask(session, calibration)

    def learn(self, outcome: RoundOutcome) -> None:
        """Commits what a round has committed, before its calibration comes, and schedules the next block, unless that
        was drafted ahead. An outcome that does not continue the committed tokens is dropped: the calibration decides.
        """
        fence = outcome.fence
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or session.root is None or fence.round <= session.root.fence.round:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        base_len = fence.prefix_len - len(outcome.token_ids)
        follows = base_len == len(session.committed) and bool(outcome.token_ids) and session.spec.max_branches > 0
        if not follows or fence.prefix_hash != session.committed.hash_with(outcome.token_ids):
            self.dropped["outcome"] += 1
            return
        self._commit(session, fence, outcome.token_ids)
        length = self._length_at(session, fence.prefix_len)
        if length >= 1 and fence.round <= session.last_calibrated[0] + session.max_rounds_ahead:
            self._ask(session, Calibration(fence, base_len, outcome.token_ids, length))

    def send_drafted(self, command: SendDrafted) -> bool:
        """Ends the current block, queued or being drawn, after at most one more token. A stale command is dropped.

        Returns:
            Whether that block was sent before, so that the reply is due at once.
        """
        session = self.sessions.get((command.session_id, command.epoch))
        asked_for = (command.round, command.attempt)
        if session is None or session.calibration is None or session.last_asked != asked_for:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return session is not None and session.last_asked == asked_for
        session.cut_at = asked_for
        return False

    def next_step(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do. Pass it to `complete` after."""
        items = [self._item(session, max_read) for session, max_read in self._take_ready()]
        if items:
            return Step(items)
        ahead = [item for session in self.sessions.values() for item in self._ahead_items(session)]
        for item in ahead:
            item.branch.in_step = True
        return Step([], ahead) if ahead else None

    def abandon(self, step: Step) -> None:
        """Forgets a step that failed."""
        for item in step.ahead:
            self._end_ahead(item, None, DraftTimings())

    @property
    def has_requests(self) -> bool:
        """Whether something that was requested waits for a step. Any thread may ask."""
        return bool(self._ready)

    def close(self, session_id: int, epoch: int) -> DraftSession | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = super().close(session_id, epoch)
        if session is not None and session.root is not None:
            self._leave(session.root)
            session.root.is_left = session.root.in_step  # the engine closes its sequence with the session
        return session

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Updates the sessions and returns their results. Sessions that were closed meanwhile are left out."""
        self._record_costs(step.items, result.num_reused, result.num_read, result.calibration_s)
        completed: list[Completed] = []
        for ahead, draft in zip(step.ahead, result.ahead, strict=True):
            done = self._end_ahead(ahead, draft, result.timings)
            if done is not None:
                completed.append(done)
        parts = zip(step.items, result.outcomes, result.num_unread, strict=True)
        for index, (item, outcome, num_unread) in enumerate(parts):
            session = item.session
            # Tokens committed during the step are unread as well.
            session.num_unread = num_unread + len(session.committed) - session.num_known
            if not self.is_open(session):
                continue
            is_opened = session.is_reading and num_unread == 0
            session.is_reading = session.is_reading and num_unread > 0
            if session.calibration is item.calibration and outcome is not None:
                session.calibration = None
            session.queued = session.is_reading or session.calibration is not None
            if session.queued:
                self._ready.append(session)
            if isinstance(outcome, DraftBlock):
                is_chain = not outcome.parents  # how rounds end tells nothing of trees
                if session.root is not None and session.root.fence == outcome.fence and is_chain:
                    session.root.block, session.root.guesses = outcome.token_ids, result.guesses.get(index, [])
                outcome = self._with_permit(session, outcome)
            completed.append(Completed(session, outcome, is_opened, self._is_flushed(session, outcome)))
        return completed

    def _with_permit(self, session: DraftSession, block: DraftBlock) -> DraftBlock:
        if session.has_shown_permit:
            return block
        session.has_shown_permit = True
        return replace(block, permit=session.permit)

    def _is_flushed(self, session: DraftSession, outcome: DraftOutcome) -> bool:
        return isinstance(outcome, DraftBlock) and session.cut_at == (outcome.fence.round, outcome.attempt)

    def _new_ids(self, session: DraftSession, calibration: Calibration) -> list[int]:
        """Returns the tokens of a calibration that no outcome has brought before.

        Raises:
            ProtocolViolationError: it does not continue the committed tokens.
        """
        fence, base_len, num_known = calibration.fence, calibration.base_len, len(session.committed)
        if base_len != num_known and not (session.spec.max_branches and base_len < num_known):
            raise ProtocolViolationError(f"calibration from {base_len} tokens, but {num_known} are known")
        repeated = session.committed.ids[base_len : fence.prefix_len]
        new_ids = calibration.token_ids[len(repeated) :]
        is_whole = fence.prefix_len == base_len + len(calibration.token_ids)
        if not is_whole or repeated != calibration.token_ids[: len(repeated)]:
            raise ProtocolViolationError("calibration for another prefix than the session's")
        is_latest = fence.prefix_len == num_known + len(new_ids)
        if is_latest and fence.prefix_hash != session.committed.hash_with(new_ids):
            raise ProtocolViolationError("calibration for another prefix than the session's")
        return new_ids

    def _commit(self, session: DraftSession, fence: Fence, new_ids: list[int]) -> None:
        """Commits tokens before a round, and keeps the branches that continue them."""
        session.committed.append(new_ids)
        session.num_unread += len(new_ids)
        root = session.root
        found = None if root is None else root.find(fence.round, new_ids)
        if root is not None and root.fence.round + 1 == fence.round and session.spec.parameters.shares_text:
            self.endings.learn(root, new_ids)
        if found is not None and found is root:
            return
        if found is None:
            found = Branch(fence, new_ids)
        elif found.block is not None:
            self._adopt(session, found)
        if root is not None:
            self._leave(root, found)
        found.parent = None
        session.root = found

    def _ask(self, session: DraftSession, calibration: Calibration) -> None:
        """Schedules a session's next block, unless it was drafted ahead or is being drafted."""
        root = session.root
        assert root is not None, "its text was committed"
        session.last_asked = calibration.fence.round, calibration.attempt
        if calibration.attempt == 0 and root.block is not None:
            return
        session.calibration = calibration  # replaces an older one, whose block is obsolete
        if root.in_step and not root.calibration and calibration.attempt == 0:
            root.calibration = calibration
            session.queued = True
        if not session.queued:
            session.queued = True
            self._ready.append(session)

    def _adopt(self, session: DraftSession, branch: Branch) -> None:
        """Makes a branch's sequence the session's own: it has read what it was drafted from."""
        session.num_known = branch.fence.prefix_len
        session.num_unread = 1
        self.branch_outcomes["hit"] += 1
        self.adopted.append(branch)

    def _leave(self, root: Branch, kept: Branch | None = None) -> None:
        """Drops the branches of a text, except one and those that continue it."""
        family = set() if kept is None else set(kept.family())
        for branch in root.family():
            if branch not in family and branch is not root:
                branch.is_left = True
                self.branch_outcomes["missed"] += branch.block is not None
                if not branch.in_step:  # else it ends there
                    self.left.append(branch)

    def _ahead_items(self, session: DraftSession) -> list[AheadItem]:
        """Returns what to draft for texts that a session may have next."""
        node = session.root
        if node is None or session.queued or session.last_asked < session.last_calibrated:
            return []
        last_round = session.last_calibrated[0] + session.max_rounds_ahead
        while node.block is not None and node.fence.round < last_round:
            if node.next_guesses is None:
                return [AheadItem(session, node, None)]
            if not node.is_expanded:
                node.is_expanded = True
                self._expand(session, node)
                if node.children:
                    return [AheadItem(session, child, node) for child in node.children]
            if not node.children:
                return []
            node = node.children[0]
        return []

    def _expand(self, session: DraftSession, node: Branch) -> None:
        """Chooses the texts that a text may become."""
        block = node.block or []
        stops = session.spec.parameters.stop_token_ids
        most = session.spec.max_branches // max(1, session.max_rounds_ahead)
        path = _path_to(node)
        for ending in self.endings.likeliest(node, most):
            added = [*block[: ending.num_kept], ending.token_id]
            prefix_len = node.fence.prefix_len + len(added)
            length = self._length_at(session, prefix_len)
            if length < 1 or not stops.isdisjoint(added):
                continue
            prefix_hash = session.committed.hash_with([*path, *added])
            fence = Fence(*session.key, node.fence.round + 1, prefix_len, prefix_hash)
            node.children.append(Branch(fence, added, node, ending.num_kept, length))

    def _length_at(self, session: DraftSession, prefix_len: int) -> int:
        """Returns how many tokens to draft after so many committed ones. One is left for the verifier."""
        return min(session.num_draft_tokens, session.spec.max_len - prefix_len - 1)

    def _end_ahead(self, item: AheadItem, draft: AheadOutcome, timings: DraftTimings) -> Completed | None:
        """Ends a branch's part in a step, and returns its block if that is to be sent."""
        session, branch = item.session, item.branch
        branch.in_step = False
        calibration, branch.calibration = branch.calibration, None
        if branch.is_left:
            self.left.append(branch)
            return None
        if item.reads_on:
            branch.next_guesses = draft.guesses[0] if isinstance(draft, Draft) else []
            return None
        if not isinstance(draft, Draft):
            self.branch_outcomes["abandoned"] += 1
            self.left.append(branch)
            if branch.parent is not None:
                branch.parent.children.remove(branch)
                # One that was cut short is chosen again; one that cannot be drafted for never could.
                branch.parent.is_expanded = draft is not None or bool(branch.parent.children)
            if calibration is not None:
                self._ready.append(session)
            return None
        branch.block, branch.guesses = draft.token_ids, draft.guesses
        block = DraftBlock(branch.fence, draft.token_ids, draft.distributions, timings=timings)
        if calibration is not None:
            self._adopt(session, branch)
            if session.calibration is calibration:
                session.calibration, session.queued = None, False
            else:
                self._ready.append(session)
        return Completed(session, block, is_opened=False, is_flushed=self._is_flushed(session, block))

    def _item(self, session: DraftSession, max_read: int | None) -> StepItem:
        base_len, session.num_known = session.num_known, len(session.committed)
        calibration = None if session.is_reading else session.calibration
        return StepItem(session, base_len, session.committed.ids[base_len:], calibration, max_read)


def _path_to(branch: Branch) -> list[int]:
    """Returns the tokens by which a branch's text is longer than the committed one."""
    path: list[int] = []
    while branch.parent is not None:
        path = [*branch.added, *path]
        branch = branch.parent
    return path
