"""The drafter's scheduler, which batches sessions into steps. Pure: no tensors, no transport, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftwire.engine.session_book import EngineSession, SessionBook
from draftwire.errors import DraftwireError, InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import Calibration, DraftBlock, DraftSessionSpec, Fence, Permit, SendDrafted
from draftwire.requests.automaton import Automaton


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(EngineSession[DraftSessionSpec]):
    """State of a session at the drafter. Changed by the scheduler only."""

    num_known: int
    """Committed tokens that were passed to the strategy."""
    last_asked: tuple[int, int] = (-1, 0)
    """Round and attempt of the latest calibration."""
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
class Step:
    """One call into the engine."""

    items: Sequence[StepItem]

    @property
    def reads_prompts(self) -> bool:
        """Whether some session is in prefill."""
        return any(item.max_read is not None for item in self.items)


DraftOutcome = DraftBlock | DraftwireError | None
"""Outcome of a session's part in a step: a block, an error that fails the session, or None if tokens were only read."""


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


class Scheduler(SessionBook[DraftSession, Step]):
    """Queues prompts and calibrations and batches them into steps. One step runs at a time."""

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
        if session is None or (fence.round, calibration.attempt) <= session.last_asked:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        if calibration.base_len != len(session.committed):
            raise ProtocolViolationError(
                f"calibration from {calibration.base_len} tokens, but {len(session.committed)} are known"
            )
        limit = session.spec.parameters.max_draft_tokens
        if not 1 <= calibration.num_draft_tokens <= limit:
            raise ProtocolViolationError(f"{calibration.num_draft_tokens} draft tokens wanted, the limit is {limit}")
        session.committed.append(calibration.token_ids)
        if fence != Fence(*session.key, fence.round, len(session.committed), session.committed.hash):
            raise ProtocolViolationError("calibration for another prefix than the session's")
        if len(session.committed) + calibration.num_draft_tokens > session.spec.max_len:
            raise ProtocolViolationError("calibration beyond the session's max_len")
        session.num_unread += len(calibration.token_ids)
        session.last_asked = (fence.round, calibration.attempt)
        session.permit = calibration.permit or session.permit
        session.calibration = calibration  # replaces an older one, whose block is obsolete
        if not session.queued:
            session.queued = True
            self._ready.append(session)

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
        return Step(items) if items else None

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Updates the sessions and returns their results. Sessions that were closed meanwhile are left out."""
        self._record_costs(step.items, result.num_reused, result.num_read, result.calibration_s)
        completed: list[Completed] = []
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
            session.queued = session.is_reading or session.calibration is not None
            if session.queued:
                self._ready.append(session)
            if isinstance(outcome, DraftBlock) and not session.has_shown_permit:
                outcome = replace(outcome, permit=session.permit)
                session.has_shown_permit = True
            is_flushed = isinstance(outcome, DraftBlock) and session.cut_at == (outcome.fence.round, outcome.attempt)
            completed.append(Completed(session, outcome, is_opened, is_flushed))
        return completed

    def _item(self, session: DraftSession, max_read: int | None) -> StepItem:
        base_len, session.num_known = session.num_known, len(session.committed)
        calibration = None if session.is_reading else session.calibration
        return StepItem(session, base_len, session.committed.ids[base_len:], calibration, max_read)
