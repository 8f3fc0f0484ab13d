"""Which sessions take part in the verifier's next step. Pure: no tensors, no transport, no clock but the given one.

Whatever is ready when a step begins goes into it: draft blocks, plain rounds, and as much of waiting prompts as the
running sessions can bear.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from draftwire.audit import AuditSums
from draftwire.engine.session_book import EngineSession, SessionBook
from draftwire.errors import BlockViolationError, DraftwireError, InvalidRequestError, Violation
from draftwire.method.encoding import log_probs
from draftwire.method.rounds import (
    Fence,
    FenceVerdict,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
    judge_fence,
)
from draftwire.method.token_source import TokenSource
from draftwire.requests.automaton import Automaton
from draftwire.requests.rules import unknown_rule
from draftwire.verification import RULES, VerificationRule
from draftwire.verification.target import Judgement, JudgingOutcome, StillReading
from draftwire_verifier.idle import IdleWatch

MAX_UINT32 = 2**32 - 1
"""Largest number that the messages hold."""
REPORTED_CHUNK = 128
"""Tokens of each prompt with log-probabilities that are read in a step at most: each of them takes a row over the
vocabulary."""
MAX_FIRST_ROUND = 2**31
"""Leaves room to count rounds."""


@dataclass(slots=True, eq=False, kw_only=True)
class TargetSession(EngineSession[TargetSessionSpec]):
    """The verifier's side of one session. Changed by the scheduler only."""

    rule: VerificationRule
    """Decides its rounds."""
    round: int
    """The round that is decided next."""
    plain_rounds_left: int
    drafter_id: int | None = None
    """The drafter whose blocks it takes: the last that showed a permit. None is not known yet, or has lost its part."""
    permit_number: int = -1
    """Of the permit that it showed; -1 as long as nobody has shown one."""
    is_audited: bool = True
    """Whether its draft tokens count in the audit: not if they are drawn with the numbers of an earlier session."""
    block: ReceivedBlock | None = None
    """The block that waits for the current round."""
    waits_since: float | None = None
    """When it began to wait for its drafter's next block, by the scheduler's clock; None if it does not."""
    queued_at: float = 0.0
    """When it began to wait, by the scheduler's clock."""

    @property
    def fence(self) -> Fence:
        """What a message about the current round must say."""
        return Fence(*self.key, self.round, len(self.committed), self.committed.hash)

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read: later only the last token is unread."""
        return self.num_unread > 1

    @property
    def num_readable(self) -> int:
        """Unread tokens that one step may read."""
        is_reported = self.spec.logprobs.prompt_logprobs is not None
        return min(self.num_unread, REPORTED_CHUNK) if is_reported else self.num_unread

    @property
    def has_speculation(self) -> bool:
        """Whether it takes blocks: those of its drafter or, if it has had none, of one that shows a permit."""
        return self.drafter_id is not None or bool(self.permit_number < 0 and self.spec.permit_key)


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step."""

    session: TargetSession
    block: ReceivedBlock | None
    """None is plain decoding."""
    max_read: int
    """If more of the committed tokens are unread, only so many are read and nothing is decided."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    items: Sequence[StepItem]
    started_at: float
    """By the scheduler's clock."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the engine did in a step. Sequences hold one entry for each item."""

    outcomes: Sequence[JudgingOutcome]
    num_unread: Sequence[int]
    """Committed tokens that are still unread; a round that was decided leaves the last one."""
    num_reused: Sequence[int]
    """Tokens that were taken over from other sessions when the session was first seen."""
    num_tokens: int
    """Tokens that the forward pass read, draft tokens included."""
    verify_us: int
    audits: Sequence[AuditSums | None] = ()
    """What the draft tokens of each item say about their drafter; None where they say nothing."""


Completed = tuple[TargetSession, Verdict | PromptRead | DraftwireError]
"""An error ends the session."""


@dataclass(kw_only=True)
class Scheduler(SessionBook[TargetSession, Step]):
    """Takes work as it comes and puts it into steps. One step runs at a time."""

    vocab_size: int
    rules: Mapping[str, VerificationRule] = field(default_factory=lambda: RULES)
    """Those that sessions may ask for, by name."""
    clock: Callable[[], float] = time.perf_counter
    draft_wait_s: float = 0.0
    """From verdicts to the blocks that followed them, summed over all sessions. Rounds that nobody drafted for are left
    out."""
    idle: IdleWatch = field(default_factory=IdleWatch)
    """For how long no step was run because sessions waited."""

    def open(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> TargetSession:
        """Admits a session.

        Args:
            spec: the session.
            lease_id: whose it is.
            automaton: follows the form of its text, if that has one.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            ProtocolViolationError: the session was closed before it was opened.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        rule = self.rules.get(spec.parameters.rule.name)
        if rule is None:
            raise unknown_rule(self.rules)
        self._check(spec)
        assert (automaton is None) is (spec.parameters.sampling.structured_output is None), "a form is followed"
        self._check_new(spec)
        session = TargetSession(
            spec=spec,
            rule=rule,
            lease_id=lease_id,
            automaton=automaton,
            round=spec.first_round,
            plain_rounds_left=spec.plain_rounds,
        )
        self._admit(session)
        if session.plain_rounds_left:
            self._enqueue(session)
        return session

    def take_permit(self, block: ReceivedBlock) -> TargetSession | None:
        """Makes the sender of a block the drafter of its session, if the block shows a permit of a higher number.

        Comes before `offer_block`, and whatever becomes of the block: a permit comes once, with a block that may be
        stale.

        Returns:
            The session, if it has another drafter now.

        Raises:
            BlockViolationError: the permit was not made for this session.
        """
        session, permit = self.sessions.get((block.fence.session_id, block.fence.epoch)), block.permit
        if session is None or permit is None:
            return None
        if not permit.is_made_with(session.spec.permit_key):
            raise BlockViolationError(Violation.PEER, "block with a permit that was not made for its session")
        if permit.number <= session.permit_number:
            return None
        session.drafter_id, session.permit_number = block.drafter_id, permit.number
        return session

    def end_speculation(self, session: TargetSession) -> None:
        """Takes no more blocks for a session, until another drafter shows a permit of a higher number."""
        session.drafter_id = None

    def offer_block(self, block: ReceivedBlock) -> None:
        """Takes a draft block. It is verified if it is for the session's current round and nothing else is.

        A stale block is dropped, whatever else is wrong with it. So is one whose permit has been overtaken.

        Raises:
            BlockViolationError: the block breaks the protocol. The session is as it was.
        """
        known = self.sessions.get((block.fence.session_id, block.fence.epoch))
        if known is not None and block.permit is not None and block.permit.number < known.permit_number:
            self.dropped["stale"] += 1
            return
        if known is not None and not known.has_speculation:
            self.dropped["no_speculation"] += 1
            return
        session, verdict = self._judge(block.fence)
        if verdict is FenceVerdict.STALE:
            return
        if known is not None and known.drafter_id != block.drafter_id:
            raise BlockViolationError(Violation.PEER, "block from a drafter that is not the session's")
        if verdict is FenceVerdict.VIOLATION:
            raise BlockViolationError(Violation.PREFIX, "block for another prefix than the session's")
        if session is None:
            return
        if isinstance(block.draft, BlockViolationError):
            raise block.draft
        limit = session.spec.parameters.max_draft_tokens
        if len(block.token_ids) > limit:
            raise BlockViolationError(
                Violation.LENGTH,
                f"block of {len(block.token_ids)} draft tokens, the session's limit is {limit}",
            )
        if len(session.committed) + len(block.token_ids) >= session.spec.max_len:
            raise BlockViolationError(Violation.LENGTH, "block reaches beyond the session's max_len")
        if session.rule.needs_draft_probs and not block.has_distributions:
            raise BlockViolationError(
                Violation.NO_DISTRIBUTIONS, f"rule {session.rule.name} needs the distributions that were drawn from"
            )
        session.block = block
        if session.waits_since is not None:
            self.draft_wait_s += self.clock() - session.waits_since
            self._end_wait(session)
        self._enqueue(session)

    def run_plain(self, run: PlainRun) -> FenceVerdict:
        """Starts plain decoding, if the current round is still free.

        Raises:
            InvalidRequestError: no round is wanted, or the session has no room for one.
        """
        session, verdict = self._judge(run.fence)
        if session is not None:
            if run.num_rounds < 1:
                raise InvalidRequestError("a plain run has at least one round")
            if len(session.committed) >= session.spec.max_len:
                raise InvalidRequestError("plain run beyond the session's max_len")
            session.plain_rounds_left = run.num_rounds
            self._end_wait(session)
            self._enqueue(session)
        return verdict

    def close(self, session_id: int, epoch: int) -> TargetSession | None:
        """Forgets a session and what waits for it; returns it if there was one."""
        session = super().close(session_id, epoch)
        if session is not None:
            self._end_wait(session)
        return session

    def next_step(self) -> Step | None:
        """Returns the next step, or None when there is nothing to do. Call `complete` with it after."""
        items = [StepItem(session, session.block, max_read or 1) for session, max_read in self._take_ready()]
        now = self.clock()
        self.idle.set_idle(not items, now)
        return Step(items, now) if items else None

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Commits what a step decided and returns what is to be sent, but of sessions that were closed meanwhile."""
        self._record_costs(step.items, result.num_reused, result.num_tokens, result.verify_us / 1e6)
        deliveries: list[Completed] = []
        for item, outcome, num_unread in zip(step.items, result.outcomes, result.num_unread, strict=True):
            session = item.session
            session.num_unread = num_unread
            if not self.is_open(session):
                continue
            if isinstance(outcome, Judgement | StillReading) and outcome.prompt is not None:
                deliveries.append((session, PromptRead(*session.key, outcome.prompt)))
            if isinstance(outcome, Judgement):
                deliveries.append((session, self._commit(item, outcome, step.started_at, result.verify_us)))
            elif isinstance(outcome, StillReading):
                self._ready.append(session)
            else:
                deliveries.append((session, outcome))
        return deliveries

    def _commit(self, item: StepItem, judgement: Judgement, started_at: float, verify_us: int) -> Verdict:
        session, block = item.session, item.block
        fence = session.fence
        session.committed.append(judgement.token_ids)
        session.round += 1
        session.block, session.queued = None, False
        queue_us = min(int(max(0.0, started_at - session.queued_at) * 1e6), MAX_UINT32)
        if block is None:
            stopped = judgement.token_ids[-1] in session.spec.parameters.stop_token_ids
            full = len(session.committed) >= session.spec.max_len
            session.plain_rounds_left = 0 if stopped or full else session.plain_rounds_left - 1
        if session.plain_rounds_left:
            self._enqueue(session)
        else:
            session.waits_since = self.clock()
            self.idle.wait(1, session.waits_since)
        num_draft_tokens = len(block.token_ids) if block else 0
        return Verdict(
            fence=fence,
            token_ids=judgement.token_ids,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=judgement.num_accepted,
            extra=_extra_kind(num_draft_tokens, judgement.num_accepted),
            plain_rounds_left=session.plain_rounds_left,
            verify_us=verify_us,
            queue_us=queue_us,
            num_near_ties=judgement.num_near_ties,
            num_cached_tokens=session.num_reused or 0,
            logprobs=judgement.logprobs,
            draft_logprobs=_draft_logprobs(block, judgement.token_ids) if session.spec.reports_draft_logprobs else [],
            **({"timings": block.timings} if block else {}),
        )

    def _end_wait(self, session: TargetSession) -> None:
        if session.waits_since is not None:
            session.waits_since = None
            self.idle.wait(-1, self.clock())

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
        sampling, wanted = spec.parameters.sampling, spec.parameters.max_draft_tokens
        sampling.check_vocabulary(self.vocab_size)
        allowed = sampling.allowed_token_ids
        possible = range(self.vocab_size) if allowed is None else allowed
        if sampling.min_tokens and spec.parameters.stop_token_ids.issuperset(possible):
            raise InvalidRequestError("all tokens that are possible are stop tokens, which min_tokens keeps away")
        if not 1 <= len(spec.token_ids) < self.context_length:
            raise InvalidRequestError(
                f"{len(spec.token_ids)} prompt tokens; must be 1 to {self.context_length - 1}, the context less one"
            )
        if spec.first_round > MAX_FIRST_ROUND:
            raise InvalidRequestError(f"first_round {spec.first_round} is above {MAX_FIRST_ROUND}")
        self._check_prompt_len(spec)
        if max(spec.token_ids) >= self.vocab_size:
            raise InvalidRequestError(f"token id {max(spec.token_ids)} is beyond the vocabulary of {self.vocab_size}")
        self._check_max_len(spec)
        if wanted > self.max_draft_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {wanted} is above the verifier's limit {self.max_draft_tokens}"
            )


def _extra_kind(num_draft_tokens: int, num_accepted: int) -> TokenSource:
    if num_draft_tokens == 0:
        return TokenSource.PLAIN
    return TokenSource.BONUS if num_accepted == num_draft_tokens else TokenSource.RECOVERED


def _draft_logprobs(block: ReceivedBlock | None, token_ids: Sequence[int]) -> list[float]:
    """Returns what a drafter gave each token of a verdict; NaN behind its block, and where it did not say."""
    given: list[float] = []
    if block is not None and block.has_distributions:
        assert not isinstance(block.draft, BlockViolationError), "such a block is refused"
        given = log_probs(block.draft, token_ids[: len(block.token_ids)])
    return given + [math.nan] * (len(token_ids) - len(given))
