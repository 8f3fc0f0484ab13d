"""Which session the drafter works for next. Pure: no tensors, no transport, no clock."""

from collections import Counter, deque
from dataclasses import dataclass, field

from draftwire.errors import InvalidRequestError, NoRoomError, ProtocolViolationError
from draftwire.rounds import Calibration, CommittedTokens, DraftSessionSpec, Fence
from draftwire.services.leases import SessionKey


@dataclass(slots=True)
class DraftSession:
    """The drafter's side of one session. Changed by the scheduler only."""

    spec: DraftSessionSpec
    lease_id: int
    committed: CommittedTokens
    last_drafted: tuple[int, int] = (-1, 0)
    """Round and attempt that were last asked for."""

    @property
    def key(self) -> SessionKey:
        """Names the session in one epoch."""
        return self.spec.session_id, self.spec.epoch


@dataclass(frozen=True, slots=True)
class Step:
    """Work for one session: read its prompt, or bring it up to date and draft."""

    session: DraftSession
    calibration: Calibration | None
    """None is the prompt."""


@dataclass(slots=True)
class Scheduler:
    """Takes work as it comes and hands it out in that order."""

    context_length: int
    max_sessions: int
    max_draft_tokens: int
    sessions: dict[SessionKey, DraftSession] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that had no effect, by reason."""
    _ready: deque[Step] = field(default_factory=deque)

    def open(self, spec: DraftSessionSpec, lease_id: int) -> DraftSession:
        """Admits a session and schedules the reading of its prompt.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open, or the prompt leaves no room to draft in.
        """
        key = (spec.session_id, spec.epoch)
        if key in self.sessions:
            raise InvalidRequestError("session is open already")
        if not 1 <= spec.max_draft_tokens <= self.max_draft_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {spec.max_draft_tokens} is not in 1..{self.max_draft_tokens}, "
                "the drafter's limit"
            )
        if not spec.token_ids:
            raise InvalidRequestError("the prompt is empty")
        if len(spec.token_ids) >= self.context_length:
            raise NoRoomError(f"{len(spec.token_ids)} prompt tokens exceed the drafter's context")
        if len(self.sessions) >= self.max_sessions:
            raise NoRoomError(f"{self.max_sessions} sessions are open, which is the limit; retry in a second")
        session = DraftSession(spec, lease_id, CommittedTokens(spec.token_ids))
        self.sessions[key] = session
        self._ready.append(Step(session, None))
        return session

    def calibrate(self, calibration: Calibration) -> None:
        """Commits a session's new tokens and schedules its next block. A stale message is dropped.

        Raises:
            ProtocolViolationError: the message does not continue what the session knows. Its session is unusable.
        """
        fence = calibration.fence
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None or (fence.round, calibration.attempt) <= session.last_drafted:
            self.dropped["unknown_session" if session is None else "stale"] += 1
            return
        if calibration.base_len != len(session.committed):
            raise ProtocolViolationError(
                f"calibration from {calibration.base_len} tokens, but {len(session.committed)} are known"
            )
        if not 1 <= calibration.num_draft_tokens <= session.spec.max_draft_tokens:
            raise ProtocolViolationError(
                f"{calibration.num_draft_tokens} draft tokens wanted, the limit is {session.spec.max_draft_tokens}"
            )
        session.committed.append(calibration.token_ids)
        if fence != Fence(*session.key, fence.round, len(session.committed), session.committed.hash):
            raise ProtocolViolationError("calibration for another prefix than the session's")
        if len(session.committed) + calibration.num_draft_tokens > self.context_length:
            raise ProtocolViolationError("calibration beyond the drafter's context")
        session.last_drafted = (fence.round, calibration.attempt)
        self._ready.append(Step(session, calibration))

    def close(self, session_id: int, epoch: int) -> DraftSession | None:
        """Forgets a session and what waits for it; returns it if there was one."""
        session = self.sessions.pop((session_id, epoch), None)
        if session is not None:
            self._ready = deque(step for step in self._ready if step.session is not session)
        return session

    def of_lease(self, lease_id: int) -> list[DraftSession]:
        """Returns the sessions that were opened under a lease."""
        return [session for session in self.sessions.values() if session.lease_id == lease_id]

    def next_step(self) -> Step | None:
        """Returns the next piece of work, or None."""
        return self._ready.popleft() if self._ready else None

    def is_open(self, session: DraftSession) -> bool:
        """Whether a session was not closed meanwhile."""
        return self.sessions.get(session.key) is session
