"""The drafter's scheduler, which batches sessions into steps. Pure: no tensors, no transport, no clock of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftwire.engine.draft_session import DraftOption, DraftOutcome, DraftSession, Step, StepItem, StepResult
from draftwire.engine.session_book import SessionBook
from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import Calibration, DraftBlock, DraftSessionSpec, Fence, RoundOutcome, SendDrafted
from draftwire.requests.automaton import Automaton


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

    options: Sequence[DraftOption] = ()

    def open(self, spec: DraftSessionSpec, lease_id: int, automaton: Automaton | None = None) -> DraftSession:
        """Admits a session and schedules its prefill.

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
        for option in self.options:
            option.check_session(spec)
        num_tokens = len(spec.token_ids)
        session = DraftSession(
            spec=spec, lease_id=lease_id, automaton=automaton, num_known=num_tokens, num_sent=num_tokens
        )
        session.num_spare = sum(option.num_spare(spec) for option in self.options)
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
        for option in self.options:
            option.check_calibration(calibration, session.spec)
        session.latest, session.num_sent = calibration, fence.prefix_len
        session.permit = calibration.permit or session.permit
        is_known = fence.round <= session.last_asked  # by the outcome of the round before
        if new_ids or not is_known:
            self.commit(session, fence, new_ids)
        if not is_known:
            self.ask(session, calibration)
        self._go_on(session)

    def learn(self, outcome: RoundOutcome) -> None:
        """Commits what a round has committed, before its calibration comes, and schedules the next block, if the latest
        calibration allows it. An outcome that does not continue the committed tokens, or has more tokens than the
        session allows, is dropped: the calibration decides.
        """
        fence = outcome.fence
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or session.latest is None or fence.prefix_len <= len(session.committed):
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        base_len = fence.prefix_len - len(outcome.token_ids)
        most = session.spec.parameters.max_draft_tokens + 1
        fits = fence.prefix_len <= session.spec.max_len and len(outcome.token_ids) <= most
        follows = base_len == len(session.committed)
        if not (follows and fits) or fence.prefix_hash != session.committed.hash_with(outcome.token_ids):
            self.dropped["outcome"] += 1
            return
        self.commit(session, fence, outcome.token_ids)
        session.outcome = outcome
        self._go_on(session)

    def _go_on(self, session: DraftSession) -> None:
        """Schedules the block that follows an outcome, once a calibration lets the drafter go so far: that of the round
        before may come later than the outcome.
        """
        outcome, latest = session.outcome, session.latest
        if outcome is None or latest is None or outcome.fence.round > latest.fence.round + latest.max_rounds_ahead:
            return
        session.outcome = None
        fence = outcome.fence
        length = session.length_at(fence.prefix_len)
        if length >= 1 and fence.round > session.last_asked:
            self.ask(session, Calibration(fence, len(session.committed), [], length, stop_below=latest.stop_below))

    def commit(self, session: DraftSession, fence: Fence, new_ids: list[int]) -> None:
        """Commits tokens of a session before a round."""
        session.committed.append(new_ids)
        session.num_unread += len(new_ids)
        for option in self.options:
            option.committed(session, fence, new_ids)

    def ask(self, session: DraftSession, calibration: Calibration) -> None:
        """Schedules a session's next block, unless it was drafted ahead or is being drafted."""
        session.last_asked = calibration.fence.round
        if any(option.is_drafted(session, calibration) for option in self.options):
            return
        session.calibration = calibration  # replaces an older one, whose block is obsolete
        self.resume(session)

    def resume(self, session: DraftSession) -> None:
        """Schedules the block that a session was asked for, if it was, once no option holds it back."""
        is_waiting = session.calibration is not None and not session.queued
        if is_waiting and all(option.may_draft(session) for option in self.options):
            self.enqueue(session)

    def enqueue(self, session: DraftSession) -> None:
        """Has a session take part in a step."""
        session.queued = True
        self._ready.append(session)

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
        for option in self.options:
            work = option.spare_work()
            if work is not None:
                return Step([], work)
        return None

    def abandon(self, step: Step) -> None:
        """Forgets a step that failed."""
        for option in self.options:
            option.abandoned(step)

    @property
    def has_requests(self) -> bool:
        """Whether something that was requested waits for a step. Any thread may ask."""
        return bool(self._ready)

    def close(self, session_id: int, epoch: int) -> DraftSession | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = super().close(session_id, epoch)
        if session is not None:
            for option in self.options:
                option.closed(session)
        return session

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Updates the sessions and returns their results. Sessions that were closed meanwhile are left out."""
        self._record_costs(step.items, result.num_reused, result.num_read, result.calibration_s)
        completed = [
            Completed(session, block, is_opened=False, is_flushed=self._is_flushed(session, block))
            for option in self.options
            for session, block in option.completed(step, result)
        ]
        for item, outcome, num_unread in zip(step.items, result.outcomes, result.num_unread, strict=True):
            session = item.session
            # Tokens committed during the step are unread as well.
            session.num_unread = num_unread + len(session.committed) - session.num_known
            if not self.is_open(session):
                continue
            is_opened = session.is_reading and num_unread == 0
            session.is_reading = session.is_reading and num_unread > 0
            if session.calibration is item.calibration and outcome is not None:
                session.calibration = None
            session.queued = False
            if session.is_reading:
                self.enqueue(session)
            self.resume(session)
            if isinstance(outcome, DraftBlock) and not session.has_shown_permit:
                session.has_shown_permit = True
                outcome = replace(outcome, permit=session.permit)
            completed.append(Completed(session, outcome, is_opened, self._is_flushed(session, outcome)))
        return completed

    def _is_flushed(self, session: DraftSession, outcome: DraftOutcome) -> bool:
        return isinstance(outcome, DraftBlock) and session.cut_at == outcome.fence.round

    def _new_ids(self, session: DraftSession, calibration: Calibration) -> list[int]:
        """Returns the tokens of a calibration that are not committed yet.

        Raises:
            ProtocolViolationError: it does not continue the committed tokens.
        """
        fence, base_len, num_known = calibration.fence, calibration.base_len, len(session.committed)
        if base_len != session.num_sent:
            raise ProtocolViolationError(f"calibration from {base_len} tokens, but {session.num_sent} are known")
        repeated = session.committed.ids[base_len : fence.prefix_len]
        new_ids = calibration.token_ids[len(repeated) :]
        is_whole = fence.prefix_len == base_len + len(calibration.token_ids)
        if not is_whole or repeated != calibration.token_ids[: len(repeated)]:
            raise ProtocolViolationError("calibration for another prefix than the session's")
        is_latest = fence.prefix_len == num_known + len(new_ids)
        if is_latest and fence.prefix_hash != session.committed.hash_with(new_ids):
            raise ProtocolViolationError("calibration for another prefix than the session's")
        return new_ids

    def _item(self, session: DraftSession, max_read: int | None) -> StepItem:
        base_len, session.num_known = session.num_known, len(session.committed)
        calibration = None if session.is_reading else session.calibration
        return StepItem(session, base_len, session.committed.ids[base_len:], calibration, max_read)
