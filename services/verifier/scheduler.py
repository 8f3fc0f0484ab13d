"""Which session's work the verifier does next. Pure: no tensors, no transport, no clock but the one it is given."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.rounds import (
    CommittedTokens,
    DraftBlock,
    ExtraToken,
    Fence,
    FenceVerdict,
    PlainRun,
    TargetSessionSpec,
    Verdict,
    judge_fence,
)
from draftwire.services.leases import SessionKey
from draftwire.verification import rule_named


@dataclass(slots=True)
class TargetSession:
    """The verifier's side of one session. Changed by the scheduler only."""

    spec: TargetSessionSpec
    lease_id: int
    committed: CommittedTokens
    round: int
    """The round that is decided next."""
    plain_rounds_left: int
    block: DraftBlock | None = None
    """The block that waits for the current round."""
    queued: bool = False
    """Waits for a step or is in one."""
    queued_at: float = 0.0
    """When it began to wait, by the scheduler's clock."""

    @property
    def key(self) -> SessionKey:
        """Names the session in one epoch."""
        return self.spec.session_id, self.spec.epoch

    @property
    def fence(self) -> Fence:
        """What a message about the current round must say."""
        return Fence(*self.key, self.round, len(self.committed), self.committed.hash)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass for one session."""

    session: TargetSession
    block: DraftBlock | None
    """None is plain decoding."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the engine decided in a step."""

    token_ids: list[int]
    num_accepted: int
    verify_us: int


@dataclass(slots=True)
class Scheduler:
    """Takes work as it comes and hands out steps in the order in which it came, one per session at a time."""

    context_length: int
    vocab_size: int
    max_sessions: int
    max_draft_tokens: int
    clock: Callable[[], float] = time.perf_counter
    sessions: dict[SessionKey, TargetSession] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that had no effect, by reason."""
    _ready: deque[TargetSession] = field(default_factory=deque)

    def open(self, spec: TargetSessionSpec, lease_id: int) -> TargetSession:
        """Admits a session.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open.
        """
        self._check(spec)
        key = (spec.session_id, spec.epoch)
        if key in self.sessions:
            raise InvalidRequestError("session is open already")
        if len(self.sessions) >= self.max_sessions:
            raise NoRoomError(f"{self.max_sessions} sessions are open, which is the limit; retry in a second")
        committed = CommittedTokens(spec.token_ids)
        session = TargetSession(spec, lease_id, committed, spec.first_round, spec.plain_rounds)
        self.sessions[key] = session
        if session.plain_rounds_left:
            self._enqueue(session)
        return session

    def offer_block(self, block: DraftBlock) -> FenceVerdict:
        """Takes a draft block. It is verified if it is for the session's current round and nothing else is.

        Raises:
            InvalidRequestError: the block's size is out of range.
        """
        session, verdict = self._judge(block.fence)
        if session is None:
            return verdict
        if not 1 <= len(block.token_ids) <= session.spec.max_draft_tokens:
            raise InvalidRequestError(
                f"block of {len(block.token_ids)} draft tokens, the session's limit is {session.spec.max_draft_tokens}"
            )
        if len(session.committed) + len(block.token_ids) >= self.context_length:
            raise InvalidRequestError("block reaches beyond the target's context")
        session.block = block
        self._enqueue(session)
        return verdict

    def run_plain(self, run: PlainRun) -> FenceVerdict:
        """Starts plain decoding, if the current round is still free.

        Raises:
            InvalidRequestError: no round is wanted, or the target's context has no room for one.
        """
        session, verdict = self._judge(run.fence)
        if session is not None:
            if run.num_rounds < 1:
                raise InvalidRequestError("a plain run has at least one round")
            if len(session.committed) >= self.context_length:
                raise InvalidRequestError("plain run beyond the target's context")
            session.plain_rounds_left = run.num_rounds
            self._enqueue(session)
        return verdict

    def close(self, session_id: int, epoch: int) -> TargetSession | None:
        """Forgets a session and what waits for it; returns it if there was one."""
        session = self.sessions.pop((session_id, epoch), None)
        if session is not None and session in self._ready:
            self._ready.remove(session)
        return session

    def of_lease(self, lease_id: int) -> list[TargetSession]:
        """Returns the sessions that were opened under a lease."""
        return [session for session in self.sessions.values() if session.lease_id == lease_id]

    def next_step(self) -> Step | None:
        """Returns the next step, or None when there is nothing to do. Call `complete` or `abandon` with it after."""
        if not self._ready:
            return None
        session = self._ready.popleft()
        return Step(session, session.block)

    def complete(self, step: Step, result: StepResult, started_at: float) -> Verdict | None:
        """Commits what a step decided and returns the verdict; None if the session was closed meanwhile."""
        session, block = step.session, step.block
        if self.sessions.get(session.key) is not session:
            return None
        fence = session.fence
        session.committed.append(result.token_ids)
        session.round += 1
        session.block = None
        session.queued = False
        queue_us = int(max(0.0, started_at - session.queued_at) * 1e6)
        if block is None:
            stopped = result.token_ids[-1] in session.spec.stop_token_ids
            full = len(session.committed) >= self.context_length
            session.plain_rounds_left = 0 if stopped or full else session.plain_rounds_left - 1
        if session.plain_rounds_left:
            self._enqueue(session)
        num_draft_tokens = len(block.token_ids) if block else 0
        return Verdict(
            fence=fence,
            token_ids=result.token_ids,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=result.num_accepted,
            extra=_extra_kind(num_draft_tokens, result.num_accepted),
            plain_rounds_left=session.plain_rounds_left,
            verify_us=result.verify_us,
            queue_us=queue_us,
            **({"timings": block.timings} if block else {}),
        )

    def abandon(self, step: Step) -> None:
        """Takes back a step whose block turned out to be unusable; the round stays open for a plain run."""
        step.session.block = None
        step.session.queued = False

    def _enqueue(self, session: TargetSession) -> None:
        session.queued = True
        session.queued_at = self.clock()
        self._ready.append(session)

    def _judge(self, fence: Fence) -> tuple[TargetSession | None, FenceVerdict]:
        """Returns the session if the message is for its current round and that round has no work yet."""
        session = self.sessions.get((fence.session_id, fence.epoch))
        if session is None:  # closed, or an epoch that ended
            self.dropped["unknown_session"] += 1
            return None, FenceVerdict.STALE
        verdict = judge_fence(fence, session.fence)
        if verdict is FenceVerdict.CURRENT and session.queued:  # a second message for a round that is being decided
            verdict = FenceVerdict.STALE
        if verdict is not FenceVerdict.CURRENT:
            self.dropped[verdict.value] += 1
            return None, verdict
        return session, verdict

    def _check(self, spec: TargetSessionSpec) -> None:
        rule_named(spec.rule)
        if not 1 <= len(spec.token_ids) < self.context_length:
            raise InvalidRequestError(
                f"{len(spec.token_ids)} prompt tokens; must be 1 to {self.context_length - 1}, the context less one"
            )
        if not 1 <= spec.prompt_len <= len(spec.token_ids):
            raise InvalidRequestError(f"prompt_len {spec.prompt_len} is not within the {len(spec.token_ids)} ids")
        if max(spec.token_ids) >= self.vocab_size:
            raise InvalidRequestError(f"token id {max(spec.token_ids)} is beyond the vocabulary of {self.vocab_size}")
        if spec.max_draft_tokens > self.max_draft_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {spec.max_draft_tokens} is above the verifier's limit {self.max_draft_tokens}"
            )


def _extra_kind(num_draft_tokens: int, num_accepted: int) -> ExtraToken:
    if num_draft_tokens == 0:
        return ExtraToken.PLAIN
    return ExtraToken.BONUS if num_accepted == num_draft_tokens else ExtraToken.RECOVERED
