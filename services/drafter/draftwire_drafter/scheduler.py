"""The drafter's scheduler, which batches sessions into steps. Pure: no tensors, no transport, no clock of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from draftwire.drafting.strategy import Draft
from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import SessionBook
from draftwire.errors import DraftwireError, InvalidRequestError, ProtocolViolationError, UnavailableError
from draftwire.method.features import FeatureNeed, FeatureRequest, SessionFeatures
from draftwire.method.rounds import (
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    RoundOutcome,
    SendDrafted,
)
from draftwire.requests.automaton import Automaton
from draftwire_drafter.ahead import Branch
from draftwire_drafter.draft_session import DraftSession, Fed
from draftwire_drafter.lookahead import Lookahead
from draftwire_drafter.session_trees import check_tree, check_trees


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
    """Other tokens that may stand in the places of a block, by index of the item."""
    ahead: Sequence[AheadOutcome] = ()
    """One for each branch of the step."""
    ahead_passes: Sequence[int] = ()
    """Forward passes in which each of them took part."""
    timings: DraftTimings = field(default_factory=DraftTimings)
    """Timings of each branch's block."""


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
    need: FeatureNeed | None = None
    """The features without which nothing is drafted; None if none are needed."""
    lookahead: Lookahead = field(default_factory=Lookahead)
    """Branches that are drafted ahead."""

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
        fence = calibration.fence
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or fence.round <= session.last_calibrated:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        new_ids = self._new_ids(session, calibration)
        limit = session.spec.parameters.max_draft_tokens
        if not 1 <= calibration.num_draft_tokens <= limit:
            raise ProtocolViolationError(f"{calibration.num_draft_tokens} draft tokens wanted, the limit is {limit}")
        if fence.prefix_len + calibration.num_draft_tokens > session.spec.max_len:
            raise ProtocolViolationError("calibration beyond the session's max_len")
        check_tree(calibration, session.spec)
        session.last_calibrated = fence.round
        session.max_rounds_ahead = calibration.max_rounds_ahead
        session.num_draft_tokens = calibration.num_draft_tokens
        session.permit = calibration.permit or session.permit
        is_known = fence.round <= session.last_asked  # by the outcome of the round before
        if new_ids or not is_known:
            self._commit(session, fence, new_ids)
        if not is_known:
            self._ask(session, calibration)

    def learn(self, outcome: RoundOutcome) -> None:
        """Commits what a round has committed, before its calibration comes, and schedules the next block, unless that
        was drafted ahead. An outcome that does not continue the committed tokens, or has more tokens than the session
        allows, is dropped: the calibration decides.
        """
        fence = outcome.fence
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or session.root is None or fence.round <= session.root.fence.round:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        base_len = fence.prefix_len - len(outcome.token_ids)
        follows = base_len == len(session.committed) and bool(outcome.token_ids) and session.spec.max_branches > 0
        most = session.spec.parameters.max_draft_tokens + 1
        fits = fence.prefix_len <= session.spec.max_len and len(outcome.token_ids) <= most
        if not (follows and fits) or fence.prefix_hash != session.committed.hash_with(outcome.token_ids):
            self.dropped["outcome"] += 1
            return
        self._commit(session, fence, outcome.token_ids)
        length = session.length_at(fence.prefix_len)
        if length >= 1 and fence.round <= session.last_calibrated + session.max_rounds_ahead:
            self._ask(session, Calibration(fence, base_len, outcome.token_ids, length))

    def send_drafted(self, command: SendDrafted) -> bool:
        """Ends the current block, queued or being drawn, after at most one more token. A stale command is dropped.

        Returns:
            Whether that block was sent before, so that the reply is due at once.
        """
        session = self.sessions.get((command.session_id, command.epoch))
        if session is None or session.calibration is None or session.last_asked != command.round:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return session is not None and session.last_asked == command.round
        session.cut_at = command.round
        return False

    def next_step(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do. Pass it to `complete` after."""
        items = [self._item(session, max_read) for session, max_read in self._take_ready()]
        if items:
            return Step(items)
        ahead = [item for session in self.sessions.values() for item in self._ahead_items(session)]
        ahead = ahead[: self.room.max_sessions]  # rows; more were never tried. The others are next
        for item in ahead:
            item.branch.in_step = True
        return Step([], ahead) if ahead else None

    def abandon(self, step: Step) -> None:
        """Forgets a step that failed. Its branches are not tried again: nobody who asked for them would be failed."""
        for item in step.ahead:
            self._end_ahead(item, UnavailableError("the step failed"), DraftTimings())

    @property
    def has_requests(self) -> bool:
        """Whether something that was requested waits for a step. Any thread may ask."""
        return bool(self._ready)

    def close(self, session_id: int, epoch: int) -> DraftSession | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = super().close(session_id, epoch)
        if session is not None and session.root is not None:
            self.lookahead.leave(session.root)
            session.root.is_left = session.root.in_step  # the engine closes its sequence with the session
        return session

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Updates the sessions and returns their results. Sessions that were closed meanwhile are left out."""
        self._record_costs(step.items, result.num_reused, result.num_read, result.calibration_s)
        num_rows = sum(item.calibration is not None for item in step.items)
        num_rows += sum(not item.reads_on for item in step.ahead)
        has_trees = any(item.calibration is not None and item.calibration.tree is not None for item in step.items)
        if result.num_passes and not has_trees:  # a pass over a tree has many rows for one session
            self.lookahead.pass_times.learn(num_rows, result.draft_s / result.num_passes)
        completed: list[Completed] = []
        for ahead, draft, num_passes in zip(step.ahead, result.ahead, result.ahead_passes, strict=True):
            ahead.branch.num_passes += num_passes
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
            is_asked = session.calibration is not None and not self._awaits_features(session)
            session.queued = session.is_reading or is_asked
            if session.queued:
                self._ready.append(session)
            if isinstance(outcome, DraftBlock):
                is_chain = not outcome.parents  # how rounds end tells nothing of trees
                if session.root is not None and session.root.fence == outcome.fence and is_chain:
                    session.root.block, session.root.guesses = outcome.token_ids, result.guesses.get(index, [])
                    session.root.sent_at = self.lookahead.clock()
                outcome = self._with_permit(session, outcome)
            completed.append(Completed(session, outcome, is_opened, self._is_flushed(session, outcome)))
        return completed

    def _with_permit(self, session: DraftSession, block: DraftBlock) -> DraftBlock:
        if session.has_shown_permit:
            return block
        session.has_shown_permit = True
        return replace(block, permit=session.permit)

    def _is_flushed(self, session: DraftSession, outcome: DraftOutcome) -> bool:
        return isinstance(outcome, DraftBlock) and session.cut_at == outcome.fence.round

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
        for number in [number for number in session.num_ahead if number <= fence.round]:
            del session.num_ahead[number]
        root = session.root
        found = None if root is None else root.find(fence.round, new_ids)
        if root is not None and root.fence.round + 1 == fence.round:
            self.lookahead.learn_ending(session, root, new_ids)
        if found is not None and found is root:
            return
        if found is None:
            found = Branch(fence, new_ids)
        elif found.block is not None:
            self.lookahead.adopt(session, found)
        if root is not None:
            self.lookahead.leave(root, found)
        found.parent = None
        session.root = found

    def _ask(self, session: DraftSession, calibration: Calibration) -> None:
        """Schedules a session's next block, unless it was drafted ahead or is being drafted."""
        root = session.root
        assert root is not None, "its text was committed"
        session.last_asked = calibration.fence.round
        if root.block is not None:
            return
        session.calibration = calibration  # replaces an older one, whose block is obsolete
        if root.in_step and not root.calibration:
            root.calibration = calibration
            session.queued = True
        if not session.queued and not self._awaits_features(session):
            session.queued = True
            self._ready.append(session)

    def _awaits_features(self, session: DraftSession) -> bool:
        """Whether features of committed tokens are still to come. Of one token alone there is nothing to draft from: a
        head reads a token with the features of the one before.
        """
        if self.need is None:
            return False
        last = len(session.committed) - 1
        return last < 1 or session.fed is None or session.fed.stop < last

    def features_to_request(self, key: SessionKey) -> FeatureRequest | None:
        """Returns what to ask the verifier for, so that a session can be drafted for, now and in coming rounds; None if
        nothing.

        To be called when a session was calibrated: who is not asked for blocks asks for no features.
        """
        session = self.sessions.get(key)
        if self.need is None or session is None or session.permit is None or session.is_reading:
            return None
        window, last = self.need.window, len(session.committed) - 1
        first = None
        if session.fed is None or last - session.fed.stop > window:
            first = max(0, last - window)
            session.fed = Fed(first, first)
        if session.fed.limit - last > window // 2:
            return None
        session.fed.limit = last + window
        return FeatureRequest(*key, session.permit, session.fed.limit, first)

    def take_features(self, features: SessionFeatures) -> bool:
        """Takes note of features that came, for which a block may have waited.

        Returns:
            Whether some of them are new: they are for the engine then.

        Raises:
            ProtocolViolationError: they were not asked for, or have other sizes. The session must be closed.
        """
        session = self.sessions.get((features.session_id, features.epoch))
        if session is None:
            self.dropped["unknown_session"] += 1
            return False
        if self.need is None or session.fed is None or not self.need.fits(features):
            raise ProtocolViolationError("features that were not asked for, or of another size")
        if features.stop <= session.fed.stop:  # sent before they were asked for from another place on
            self.dropped["stale"] += 1
            return False
        if features.first_position > session.fed.stop or features.stop > session.fed.limit:
            raise ProtocolViolationError("features of other positions than were asked for")
        session.fed.stop = features.stop
        if session.calibration is not None and not session.queued and not self._awaits_features(session):
            session.queued = True
            self._ready.append(session)
        return True

    def _ahead_items(self, session: DraftSession) -> list[AheadItem]:
        """Returns what to draft for texts that a session may have next."""
        node = session.root
        if node is None or session.queued or session.last_asked < session.last_calibrated:
            return []
        last_round = session.last_calibrated + session.max_rounds_ahead
        while node.block is not None and node.fence.round < last_round:
            if node.next_guesses is None:
                return [AheadItem(session, node, None)]
            if not node.is_expanded and session.num_branches_left > 0:
                node.is_expanded = True
                self.lookahead.expand(session, node, len(self.sessions) - 1)
            if waiting := [child for child in node.children if child.block is None]:
                return [AheadItem(session, child, node) for child in waiting]
            if not node.children:
                return []
            node = node.children[0]
        return []

    def _end_ahead(self, item: AheadItem, draft: AheadOutcome, timings: DraftTimings) -> Completed | None:
        """Ends a branch's part in a step, and returns its block if that is to be sent."""
        session, branch = item.session, item.branch
        branch.in_step = False
        calibration, branch.calibration = branch.calibration, None
        if branch.is_left:
            self.lookahead.abandon(session, branch)
            return None
        if item.reads_on:
            branch.next_guesses = draft.guesses[0] if isinstance(draft, Draft) else []
            return None
        if not isinstance(draft, Draft):
            self.lookahead.abandon(session, branch)
            if branch.parent is not None:
                branch.parent.children.remove(branch)
                # One that was cut short is chosen again; one that cannot be drafted for never could.
                branch.parent.is_expanded = draft is not None or bool(branch.parent.children)
            if calibration is not None:
                self._ready.append(session)
            return None
        branch.block, branch.guesses = draft.token_ids, draft.guesses
        block = DraftBlock(branch.fence, draft.token_ids, draft.distributions, timings=timings, is_ahead=True)
        if branch.parent is None:  # it came true meanwhile, whether its block was asked for or not
            self.lookahead.adopt(session, branch)
        if calibration is not None:
            if session.calibration is calibration:
                session.calibration, session.queued = None, False
            else:
                self._ready.append(session)
        return Completed(session, block, is_opened=False, is_flushed=self._is_flushed(session, block))

    def _item(self, session: DraftSession, max_read: int | None) -> StepItem:
        base_len, session.num_known = session.num_known, len(session.committed)
        calibration = None if session.is_reading else session.calibration
        return StepItem(session, base_len, session.committed.ids[base_len:], calibration, max_read)
