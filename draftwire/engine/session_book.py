"""The open sessions of a drafter or a verifier: admission, selection for the next step, and step costs.

Pure: no tensors, no transport, no clock.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from draftwire.engine.admission import ClosedEarly, Room
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import PrefillPacer, share
from draftwire.errors import InvalidRequestError
from draftwire.method.rounds import CommittedTokens, DraftSessionSpec, TargetSessionSpec
from draftwire.requests.automaton import Automaton
from draftwire.runtime.served_request import served_request_id

AnySpec = DraftSessionSpec | TargetSessionSpec
Spec = TypeVar("Spec", bound=AnySpec, covariant=True)


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSession(ABC, Generic[Spec]):
    """State of a session at the drafter or the verifier. Changed by its scheduler only."""

    spec: Spec
    lease_id: int
    automaton: Automaton | None = None
    """State machine of its structured output, if it has one. Used on the torch thread only."""
    committed: CommittedTokens = field(init=False)
    num_unread: int = field(init=False)
    """Committed tokens that are not in the KV cache yet, as far as the scheduler knows."""
    num_reused: int | None = None
    """Prefix cache hits: tokens that did not have to be read; None before the first step."""
    queued: bool = False
    """Whether it waits for a step or is in one."""
    request_id: str = field(default_factory=served_request_id)
    """Id of the user's request, for log lines; empty where the gateway did not send one."""

    def __post_init__(self) -> None:
        self.committed = CommittedTokens(self.spec.token_ids)
        self.num_unread = len(self.committed)

    @property
    def key(self) -> SessionKey:
        """Session id and epoch."""
        return self.spec.session_id, self.spec.epoch

    @property
    @abstractmethod
    def is_reading(self) -> bool:
        """Whether its prompt is still being read."""

    @property
    def reads_much(self) -> bool:
        """Whether its unread tokens are read in chunks, as prompts are."""
        return self.is_reading

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache to reserve for it."""
        return self.spec.max_len

    @property
    def num_readable(self) -> int:
        """Unread tokens that one step may read."""
        return self.num_unread


Session = TypeVar("Session", bound=EngineSession[AnySpec])


class StepPart(Protocol):
    """One session's part in a step."""

    @property
    def session(self) -> EngineSession[AnySpec]:
        """The session."""

    @property
    def max_read(self) -> int | None:
        """Tokens to read at most; None is no limit."""


class EngineStep(Protocol):
    """One call into an engine."""

    @property
    def items(self) -> Sequence[StepPart]:
        """One part for each session in the step."""


Step = TypeVar("Step", bound=EngineStep)


@dataclass(kw_only=True)
class SessionBook(ABC, Generic[Session, Step]):
    """Base class of the schedulers: open sessions, admission, and the queue for steps. One step runs at a time."""

    context_length: int
    max_draft_tokens: int
    """Most draft tokens that a session may ask for."""
    room: Room
    """Reservations of the open sessions."""
    pacer: PrefillPacer
    """Limits the prompt tokens of a step."""
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    """The open sessions, in the order in which they were opened."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that had no effect, by reason."""
    prefix_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of opened sessions ("queried") and how many of them did not have to be read ("reused")."""
    closed_early: ClosedEarly = field(default_factory=ClosedEarly)
    """Sessions that were closed before they were opened."""
    _ready: list[Session] = field(default_factory=list)
    """Sessions that wait for a step."""

    @abstractmethod
    def next_step(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do now. Pass it to the scheduler's `complete` after."""

    @property
    def holds_for_s(self) -> float | None:
        """Seconds after which to ask for a step again, where there was none and no work comes; None for never."""
        return None

    def is_open(self, session: Session) -> bool:
        """Whether this very session is open: false if it was closed and another one was opened under its key."""
        return self.sessions.get(session.key) is session

    def of_lease(self, lease_id: int) -> list[Session]:
        """Returns the sessions that were opened under a lease."""
        return [session for session in self.sessions.values() if session.lease_id == lease_id]

    def abandon(self, step: Step) -> None:
        """Forgets a step that failed; its sessions are closed next. By default nothing has to be done."""

    def close(self, session_id: int, epoch: int) -> Session | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = self.sessions.pop((session_id, epoch), None)
        if session is None:
            self.closed_early.add((session_id, epoch))
        else:
            self.room.release(session.key)
            if session in self._ready:
                self._ready.remove(session)
        return session

    def _check_new(self, spec: AnySpec) -> None:
        """Checks that a session can be opened under its key.

        Raises:
            InvalidRequestError: it is open already.
            ProtocolViolationError: it was closed before it was opened.
        """
        key = (spec.session_id, spec.epoch)
        if key in self.sessions:
            raise InvalidRequestError("session is open already")
        self.closed_early.refuse(key)

    def _check_prompt_len(self, spec: AnySpec) -> None:
        prompt_len = spec.parameters.prompt_len
        if not 1 <= prompt_len <= len(spec.token_ids):
            raise InvalidRequestError(f"prompt_len {prompt_len} is not within the {len(spec.token_ids)} ids")

    def _check_max_len(self, spec: AnySpec) -> None:
        if not len(spec.token_ids) < spec.max_len <= self.context_length:
            raise InvalidRequestError(
                f"max_len {spec.max_len} is not in {len(spec.token_ids) + 1}..{self.context_length}, from one token "
                "beyond the ids to the context"
            )

    def _admit(self, session: Session) -> None:
        """Opens a session whose spec was checked.

        Raises:
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        self.room.reserve(session.key, session.num_reserved)
        self.sessions[session.key] = session

    def _take_ready(self) -> list[tuple[Session, int | None]]:
        """Removes from the queue the sessions of the next step; returns each with its limit of tokens to read, or None.

        Sessions in prefill share the pacer's budget. Those that get no share of it stay in the queue.
        """
        ready = {session.key for session in self._ready}
        reading = [session for session in self.sessions.values() if session.reads_much and session.key in ready]
        sessions_run = any(not session.is_reading for session in self.sessions.values())
        wanted, most = [each.num_unread for each in reading], [each.num_readable for each in reading]
        budget = self.pacer.budget(wanted, sessions_run, is_alone=len(reading) == len(self._ready))
        limits = dict(zip((each.key for each in reading), share(budget, wanted, most), strict=True))
        taken = [(session, limits.get(session.key)) for session in self._ready if limits.get(session.key, 1)]
        self._ready = [session for session in reading if not limits[session.key]]
        return taken

    def _record_costs(
        self, parts: Sequence[StepPart], num_reused: Sequence[int], num_read: int, seconds: float
    ) -> None:
        """Records prefix cache hits and the cost of a step. To be called before its sessions change.

        Args:
            parts: of the step.
            num_reused: prefix cache hits of each part's session, tokens.
            num_read: tokens that the step read in all.
            seconds: time of the step.
        """
        num_prompt_tokens = 0
        for part, reused in zip(parts, num_reused, strict=True):
            session = part.session
            if session.num_reused is None:
                session.num_reused = reused
                session.num_unread -= reused
                self.prefix_tokens.update(queried=len(session.spec.token_ids), reused=reused)
            if part.max_read is not None and session.reads_much:
                num_prompt_tokens += min(session.num_unread, part.max_read)
        self.pacer.learn(num_prompt_tokens, num_read - num_prompt_tokens, seconds)
