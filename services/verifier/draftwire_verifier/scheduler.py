"""The verifier's scheduler: continuous batching into steps. Pure: no tensors, no transport, no clock but the given one.

A step takes all work that is ready when it begins: draft blocks, plain rounds, and as large a chunk of waiting prompts
as the latency target of decoding sessions allows.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from typing_extensions import override

from draftwire.audit import AuditSums
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.engine.session_book import EngineSession, SessionBook
from draftwire.errors import BlockViolationError, DraftwireError, InvalidRequestError, Violation
from draftwire.method.ahead_limits import MAX_ROUNDS_AHEAD
from draftwire.method.encoding import log_probs
from draftwire.method.features import FeatureRequest
from draftwire.method.rounds import (
    DraftTimings,
    Fence,
    FenceVerdict,
    LocalDraft,
    Permit,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
    WatchedGuess,
    judge_fence,
)
from draftwire.method.token_source import TokenSource
from draftwire.requests.automaton import Automaton
from draftwire.requests.logprobs import MAX_PROMPT_PART
from draftwire.requests.rules import unknown_rule
from draftwire.verification import RULES, VerificationRule
from draftwire.verification.deciding import Judgement, JudgingOutcome, MadeMasks, StillReading
from draftwire_verifier.block_check import check_block, check_trees
from draftwire_verifier.drafters import Trust
from draftwire_verifier.feeding import Feed
from draftwire_verifier.gathering import Gathering, Ready, UsualWait
from draftwire_verifier.held_blocks import HeldBlocks, HeldFate, HeldTally
from draftwire_verifier.idle import IdleWatch
from draftwire_verifier.local_drafts import LocalText, check_local

MAX_UINT32 = 2**32 - 1
"""Largest value of a uint32 field."""
REPORTED_CHUNK = MAX_PROMPT_PART
"""Most prompt tokens of a session with prompt log-probabilities in one step: each needs a row of logits over the
vocabulary, and all are in one report."""
MAX_FIRST_ROUND = 2**31
"""Largest `first_round`; leaves room to count rounds in uint32."""


@dataclass(slots=True, eq=False, kw_only=True)
class TargetSession(EngineSession[TargetSessionSpec]):
    """State of a session at the verifier. Changed by the scheduler only."""

    rule: VerificationRule
    """Verification rule of its rounds."""
    round: int
    """The round that is decided next."""
    plain_rounds_left: int
    drafter_id: int | None = None
    """The drafter whose blocks are accepted: the last with a valid permit. None before the first or after a refusal."""
    permit_number: int = -1
    """Number of that drafter's permit; -1 while there was none."""
    is_audited: bool = True
    """Whether its draft tokens count in the audit: not if an earlier session drew with the same random numbers."""
    trust: Trust = field(default_factory=Trust)
    """Drafters whose blocks the current round may use."""
    block: ReceivedBlock | None = None
    """The block to verify in the current round."""
    held: HeldBlocks
    """Blocks of coming rounds."""
    local: LocalText | None = None
    """Drafter of the rounds of its runs, or of rounds that are watched; None if nothing ever drafted and nothing is
    watched."""
    num_head_tokens: int = 0
    """Most tokens that the verifier's head drafts for each round of its run; 0 if it does not."""
    watches_head: bool = False
    """Whether rounds that the head was to draft, and for which it had nothing, are reported as such. No others: what it
    would have drafted costs what drafting costs."""
    feed: Feed | None = None
    """None if its drafter needs no features, or has not asked yet."""
    waits_since: float | None = None
    """Time since which it waits for its next block or run, by the scheduler's clock; None if it does not."""
    usual_wait: UsualWait = field(default_factory=UsualWait)
    """How long it waits for them."""
    queued_at: float = 0.0
    """Time at which it was queued for a step, by the scheduler's clock."""
    masks: MadeMasks | None = None
    """The masks of its current round, if they were made before the step."""

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
        is_reported = self.spec.logprobs.prompt_logprobs is not None
        return min(self.num_unread, REPORTED_CHUNK) if is_reported else self.num_unread

    @property
    def next_head_tokens(self) -> int:
        """Most tokens that the verifier's head is to draft for the current round, with room left for the target's own
        token. The round in which the prompt is read has no draft: there are no hidden states to draft from yet.
        """
        if not self.plain_rounds_left or self.block is not None or self.is_reading or self.masks is not None:
            return 0
        return max(0, min(self.num_head_tokens, self.spec.max_len - len(self.committed) - 1))

    @property
    def num_feedable(self) -> int:
        """Tokens whose features its drafter has asked for, that the target has read, and that were not sent."""
        if self.feed is None:
            return 0
        return max(0, min(self.feed.limit, len(self.committed) - self.num_unread) - self.feed.next_position)

    @property
    def num_rows(self) -> int:
        """Rows of logits that the current round takes at most."""
        return 1 + (len(self.block.token_ids) if self.block else self.next_head_tokens)

    @property
    @override
    def num_reserved(self) -> int:
        return self.spec.max_len + self.spec.max_tree_nodes  # all of a tree is read before its path is kept

    @property
    def most_draft_tokens(self) -> int:
        """Most draft tokens of a round. How many a block has may depend on which they are."""
        return self.spec.max_tree_nodes or self.spec.parameters.max_draft_tokens

    @property
    def can_be_biased(self) -> bool:
        """Whether a drafter that lies could change the law of its text, and the audit would see it."""
        is_greedy = self.spec.parameters.sampling.greedy
        return self.is_audited and self.rule.needs_draft_probs and not is_greedy

    @property
    def has_speculation(self) -> bool:
        """Whether it accepts blocks: from its drafter or, before the first one, from a drafter with a permit."""
        return self.drafter_id is not None or bool(self.permit_number < 0 and self.spec.permit_key)


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step."""

    session: TargetSession
    block: ReceivedBlock | None
    """The block to verify; None is plain decoding."""
    max_read: int
    """Most committed tokens to read. If more are unread, the step only prefills and decides no round."""
    num_head_tokens: int = 0
    """Most tokens that the verifier's head drafts before the round is decided."""
    masks: MadeMasks | None = None
    """The masks of the form at the block's positions, if they were made before the step."""


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
    """How long it took, the head's drafting included."""
    audits: Sequence[AuditSums | None] = ()
    """Audit sums of the draft tokens; None if the item has no distributions to audit."""
    drafted: Sequence[ReceivedBlock | None] = ()
    """Blocks that the verifier's head has drafted, and that were verified; empty if there is no head."""
    has_head_failed: Sequence[bool] = ()
    """Whether the head had no block where it was to draft and had read the text; empty if there is no head."""
    head_s: float = 0.0
    """How long the head drafted, seconds."""
    mask_us: Sequence[int] = ()
    """CPU time of the masks of each session's form; empty if there is no form."""


def mask_us_of(items: Sequence[StepItem]) -> list[int]:
    """Returns the CPU time of the masks of each item's session since its step before. Runs on the torch thread."""
    automata = [item.session.automaton for item in items]
    return [0 if automaton is None else int(automaton.take_cpu_s() * 1e6) for automaton in automata]


class MaskMaker(Protocol):
    """Makes masks outside of steps."""

    def take(self, session: TargetSession) -> bool:
        """Takes a session that is queued, if its masks are slow: `Scheduler.masks_made` is called with it later. Only
        this session waits for them.
        """


Completed = tuple[TargetSession, Verdict | PromptRead | DraftwireError]
"""A session and its event; an error fails the session."""


@dataclass(kw_only=True)
class Scheduler(SessionBook[TargetSession, Step]):
    """Queues prompts, blocks and plain runs and batches them into steps. One step runs at a time."""

    vocab_size: int
    max_tree_nodes: int = 0
    """Most tokens of a token tree that a session may ask for."""
    rules: Mapping[str, VerificationRule] = field(default_factory=lambda: RULES)
    """Rules that sessions may ask for, by name."""
    text_drafters: TextDrafters = field(default_factory=TextDrafters)
    """Strategies that draft runs without a drafter."""
    head: str = ""
    """Name by which the engine's head drafts such runs too; empty if there is none."""
    mask_maker: MaskMaker | None = None
    """Makes masks before the step, for the sessions whose masks are slow. None: all masks are made in the step."""
    is_head_trusted: bool = True
    """Whether the head's drafts are used; runs that it was to draft are plain otherwise."""
    clock: Callable[[], float] = time.perf_counter
    draft_wait_s: float = 0.0
    """Time from verdicts to the next blocks, summed over all sessions. Rounds without a drafter are left out."""
    idle: IdleWatch = field(default_factory=IdleWatch)
    """Sums the time in which no step runs while a session waits for a draft."""
    gathering: Gathering = field(default_factory=Gathering)
    """Decides whether steps wait for sessions that are not ready yet."""
    held: HeldTally = field(default_factory=HeldTally)
    """Blocks of all sessions that were drafted ahead."""
    _step_began_at: float = -math.inf
    """Time at which the latest step began, by the clock."""

    def open(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> TargetSession:
        """Admits a session.

        Args:
            spec: the session.
            lease_id: lease that the session belongs to.
            automaton: of its structured output, if it has one.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            ProtocolViolationError: the session was closed before it was opened.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        rule = self.rules.get(spec.parameters.rule.name)
        if rule is None:
            raise unknown_rule(self.rules)
        self._check(spec)
        check_trees(spec, rule, self.max_tree_nodes)
        assert (automaton is None) is (spec.parameters.sampling.structured_output is None), "a form is followed"
        self._check_new(spec)
        session = TargetSession(
            spec=spec,
            rule=rule,
            lease_id=lease_id,
            automaton=automaton,
            round=spec.first_round,
            plain_rounds_left=spec.plain_rounds,
            held=HeldBlocks(self.held),
        )
        session.watches_head = spec.watched is not None and spec.watched.strategy == self.head
        if spec.watched is not None and not session.watches_head:
            session.local = LocalText.open(spec.watched.strategy, self.text_drafters, spec.parameters)
        self._admit(session)
        if session.plain_rounds_left:
            self._enqueue(session)
        return session

    def take_permit(self, block: ReceivedBlock) -> TargetSession | None:
        """Makes the sender of a block the drafter of its session, if the block has a permit with a higher number.

        To be called before `offer_block`, for stale blocks too: a permit is sent only once.

        Returns:
            The session, if its drafter has changed.

        Raises:
            BlockViolationError: the permit was not made for this session, or for another drafter.
        """
        session, permit = self.sessions.get((block.fence.session_id, block.fence.epoch)), block.permit
        if session is None or permit is None:
            return None
        if not permit.is_made_with(session.spec.permit_key, block.drafter_id):
            raise BlockViolationError(Violation.PEER, "block with a permit for another session or another drafter")
        if permit.number <= session.permit_number:
            return None
        self._seat(session, permit, block.drafter_id)
        return session

    def _seat(self, session: TargetSession, permit: Permit, drafter_id: int) -> None:
        """Makes the holder of a permit the drafter of a session."""
        session.drafter_id, session.permit_number, session.feed = drafter_id, permit.number, None
        session.held.clear()

    def feed(self, request: FeatureRequest, drafter_id: int) -> TargetSession | None:
        """Takes a request of features, which may be the first that a drafter sends of a session.

        Returns:
            The session, if it is open and the permit is its drafter's; other requests are dropped.
        """
        session, permit = self.sessions.get((request.session_id, request.epoch)), request.permit
        if session is None or not permit.is_made_with(session.spec.permit_key, drafter_id):
            self.dropped["unknown_session" if session is None else "no_speculation"] += 1
            return None
        if permit.number > session.permit_number:
            self._seat(session, permit, drafter_id)
        if session.drafter_id != drafter_id:  # it was replaced, or refused
            self.dropped["no_speculation"] += 1
            return None
        limit = min(request.limit, session.spec.max_len)
        if request.first_position is not None:
            is_due = session.feed is not None and session.feed.is_due
            session.feed = Feed(drafter_id, request.first_position, limit, is_due)
        elif session.feed is not None:
            session.feed.limit = limit
        return session

    def end_speculation(self, session: TargetSession) -> None:
        """Refuses further blocks for a session, until another drafter sends a permit with a higher number."""
        session.drafter_id = None
        session.feed = None
        session.held.clear()

    def offer_block(self, block: ReceivedBlock) -> TargetSession | None:
        """Queues a draft block for verification, if it is the first work for the session's current round.

        A stale block is dropped, whatever else is wrong with it; so is one with a permit of a lower number. A session
        that holds blocks keeps one of a coming round, and drops one of another text than the current round's.

        Returns:
            The session, if the block was queued.

        Raises:
            BlockViolationError: the block violates the protocol. The session is unchanged.
        """
        known = self.sessions.get((block.fence.session_id, block.fence.epoch))
        if known is not None and block.permit is not None and block.permit.number < known.permit_number:
            self.dropped["stale"] += 1
            return None
        if known is not None and not known.has_speculation:
            self.dropped["no_speculation"] += 1
            return None
        if known is not None and known.spec.max_held_blocks and self._hold(known, block):
            return None
        session, verdict = self._judge(block.fence)
        if verdict is FenceVerdict.STALE:
            if known is not None and block.is_ahead:
                known.held.count(block, HeldFate.STALE)
            return None
        if known is not None and known.drafter_id != block.drafter_id:
            raise BlockViolationError(Violation.PEER, "block from a drafter that is not the session's")
        if verdict is FenceVerdict.VIOLATION:
            raise BlockViolationError(Violation.PREFIX, "block for another prefix than the session's")
        if session is None:
            return None
        check_block(block, session.spec, session.rule)
        session.block = block
        if block.is_ahead:
            session.held.count(block, HeldFate.LATE)
        if session.waits_since is not None:
            self.draft_wait_s += self.clock() - session.waits_since
            self._end_wait(session)
        self._enqueue(session)
        return session

    def _hold(self, session: TargetSession, block: ReceivedBlock) -> bool:
        """Keeps a block of a coming round, or drops one of another text than the current round's. Which one is dropped
        depends on the order of arrival and on prefixes alone.

        Returns:
            Whether that was done: false for a block of this text and round, or of an earlier round.

        Raises:
            BlockViolationError: the block violates the protocol.
        """
        rounds_ahead = block.fence.round - session.round
        if rounds_ahead < 0 or block.fence == session.fence:
            return False
        if session.drafter_id != block.drafter_id:
            raise BlockViolationError(Violation.PEER, "block from a drafter that is not the session's")
        if rounds_ahead > MAX_ROUNDS_AHEAD:
            raise BlockViolationError(Violation.PREFIX, f"block for a round that is {rounds_ahead} rounds ahead")
        check_block(block, session.spec, session.rule)
        if rounds_ahead == 0:
            session.held.count(block, HeldFate.STALE)
        else:
            session.held.add(block, session.spec.max_held_blocks)
        return True

    def set_aside(self, session: TargetSession) -> None:
        """Has the block that a session has queued audited alone: its round is decided as if the block were empty."""
        assert session.block is not None, "a block was queued"
        session.block = replace(session.block, is_used=False)

    def run_plain(self, run: PlainRun) -> FenceVerdict:
        """Starts plain decoding, if the current round has no work yet.

        Raises:
            InvalidRequestError: `num_rounds` is 0, the session has reached its `max_len`, or the verifier cannot draft
                like that.
        """
        session, verdict = self._judge(run.fence)
        if session is not None:
            if run.num_rounds < 1:
                raise InvalidRequestError("a plain run has at least one round")
            if len(session.committed) >= session.spec.max_len:
                raise InvalidRequestError("plain run beyond the session's max_len")
            if run.draft is not None:
                check_local(run.draft, session.spec, self.text_drafters, self.head)
            session.plain_rounds_left = run.num_rounds
            self._draft_by(session, run.draft)
            self._end_wait(session)
            self._enqueue(session)
        return verdict

    def close(self, session_id: int, epoch: int) -> TargetSession | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = super().close(session_id, epoch)
        if session is not None:
            self._stop_waiting(session)
            session.held.clear()
            session.trust.end()
            if session.local is not None:
                session.local.text.close(session.spec.parameters.prompt_len)
        return session

    def next_step(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do, or a step waits: see `holds_for_s`. Pass it to
        `complete` after.
        """
        now = self.clock()
        if self._holds(now):
            self.idle.set_idle(True, now)
            return None
        items = [
            StepItem(
                session,
                session.block,
                max_read or 1,
                session.next_head_tokens if self.is_head_trusted else 0,
                session.masks,
            )
            for session, max_read in self._take_ready()
        ]
        self.idle.set_idle(not items, now)
        if not items:
            return None
        self._step_began_at = now
        return Step(items, now)

    @property
    def holds_for_s(self) -> float | None:
        """Seconds after which a step that waits is to be asked for again; None if none waits."""
        until = self.gathering.until
        return None if until is None else max(0.0, until - self.clock())

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Commits decided rounds and returns the events to send. Sessions that were closed meanwhile are left out."""
        if not any(item.session.is_reading for item in step.items):
            self.gathering.times.learn(result.num_tokens, result.verify_us / 1e6)
        self._record_costs(step.items, result.num_reused, result.num_tokens, result.verify_us / 1e6)
        deliveries: list[Completed] = []
        drafted = result.drafted or [None] * len(step.items)
        verify_us = result.verify_us - int(result.head_s * 1e6)  # which is told apart
        has_failed = result.has_head_failed or [False] * len(step.items)
        mask_us = result.mask_us or [0] * len(step.items)
        parts = zip(step.items, result.outcomes, result.num_unread, drafted, has_failed, strict=True)
        for index, (item, outcome, num_unread, own, lacks_draft) in enumerate(parts):
            session, block = item.session, own or item.block
            session.num_unread = num_unread
            if not self.is_open(session):
                continue
            if isinstance(outcome, Judgement | StillReading) and outcome.prompt is not None:
                deliveries.append((session, PromptRead(*session.key, outcome.prompt)))
            if isinstance(outcome, Judgement):
                verdict = self._commit(session, block, outcome, step.started_at, verify_us)
                if lacks_draft and session.watches_head:
                    verdict = replace(verdict, watched=WatchedGuess(has_guess=False))
                if mask_us[index]:
                    verdict = replace(verdict, mask_us=min(mask_us[index], MAX_UINT32))
                deliveries.append((session, verdict))
            elif isinstance(outcome, StillReading):
                self._ready.append(session)
            else:
                deliveries.append((session, outcome))
        return deliveries

    def _commit(
        self,
        session: TargetSession,
        block: ReceivedBlock | None,
        judgement: Judgement,
        started_at: float,
        verify_us: int,
    ) -> Verdict:
        fence, watched = session.fence, None
        if session.local is not None and not (block and block.local_strategy):
            watched = session.local.watch(session.committed.ids, judgement.token_ids, session.spec, self.vocab_size)
        session.committed.append(judgement.token_ids)
        session.round += 1
        session.block, session.masks, session.queued = None, None, False
        queue_us = min(int(max(0.0, started_at - session.queued_at) * 1e6), MAX_UINT32)
        has_stopped = not session.spec.parameters.stop_token_ids.isdisjoint(judgement.token_ids)
        is_over = has_stopped or len(session.committed) >= session.spec.max_len
        session.plain_rounds_left = 0 if is_over else max(0, session.plain_rounds_left - 1)
        next_is_held = self._take_held(session, is_over)
        if session.plain_rounds_left or next_is_held:
            self._enqueue(session)
        elif not is_over:
            session.waits_since = self.clock()
            self.idle.wait(1, session.waits_since)
        if block is not None and not block.is_used:  # a plain round, as far as anybody else sees
            block = None
        return Verdict(
            fence=fence,
            token_ids=judgement.token_ids,
            num_draft_tokens=len(block.token_ids) if block else 0,
            num_accepted_tokens=judgement.num_accepted,
            extra=_extra_kind(block, judgement),
            plain_rounds_left=session.plain_rounds_left,
            verify_us=verify_us,
            queue_us=queue_us,
            num_near_ties=judgement.num_near_ties,
            num_cached_tokens=session.num_reused or 0,
            logprobs=judgement.logprobs,
            draft_logprobs=_draft_logprobs(block, judgement) if session.spec.reports_draft_logprobs else [],
            local_strategy=block.local_strategy if block else "",
            watched=watched,
            next_is_held=next_is_held,
            is_ahead=block is not None and block.is_ahead,
            num_wasted_draft_tokens=min(session.held.take_wasted(), MAX_UINT32),
            held_bytes=session.held.num_bytes,
            timings=block.timings if block else DraftTimings(),
            draft_depth=block.depth if block and block.tree is not None else 0,
        )

    def _take_held(self, session: TargetSession, is_over: bool) -> bool:
        """Makes a held block that was drafted for the session's text, unless that is over, the one to verify next;
        returns whether there is one. Blocks for other texts of the round are dropped.
        """
        if not session.held:
            return False
        session.block = session.held.take(session.fence, is_wanted=not (is_over or session.plain_rounds_left))
        return session.block is not None

    def _holds(self, now: float) -> bool:
        """Whether the next step waits for sessions that are not ready yet."""
        deciding = [session for session in self._ready if not session.is_reading]
        if not deciding or not self.idle.num_waiting:
            self.gathering.begin(now)
            return False
        num_rows = sum(session.num_rows for session in deciding)
        share = self.gathering.undisturbed_share
        waiting = [
            session.usual_wait.left_s(session.waits_since, now, share)
            for session in self.sessions.values()
            if session.waits_since is not None
        ]
        expected = [left_s for left_s in waiting if left_s is not None]
        usual_s = sum(session.usual_wait.seconds or 0.0 for session in deciding) / len(deciding)
        return self.gathering.holds(Ready(len(deciding), num_rows, usual_s), expected, now)

    def _end_wait(self, session: TargetSession) -> None:
        """Ends the wait of a session whose next round can be decided."""
        if session.waits_since is not None:
            waited_s = self.clock() - session.waits_since
            session.usual_wait.learn(waited_s)
            self.gathering.usual.learn(waited_s)
            if self._step_began_at <= session.waits_since:
                self.gathering.undisturbed.learn(waited_s)
            self._stop_waiting(session)

    def _stop_waiting(self, session: TargetSession) -> None:
        if session.waits_since is not None:
            session.waits_since = None
            self.idle.wait(-1, self.clock())

    def _draft_by(self, session: TargetSession, draft: LocalDraft | None) -> None:
        """Sets what drafts the rounds of a session's run. What was read of the text is kept through plain runs."""
        if draft is not None and draft.strategy == self.head and not self.is_head_trusted:
            draft = replace(draft, strategy=draft.instead, instead="") if draft.instead else None
        is_head = draft is not None and draft.strategy == self.head
        of_text = None if is_head else draft
        session.num_head_tokens = draft.num_draft_tokens if draft is not None and is_head else 0
        if of_text is not None and (session.local is None or session.local.strategy != of_text.strategy):
            session.local = LocalText.open(of_text.strategy, self.text_drafters, session.spec.parameters)
        if session.local is not None:
            session.local.num_draft_tokens = 0 if of_text is None else of_text.num_draft_tokens

    def _enqueue(self, session: TargetSession) -> None:
        if session.plain_rounds_left and session.local is not None:
            ids = session.committed.ids
            session.block = session.local.block(session.fence, ids, session.spec, self.vocab_size)
        session.queued = True
        session.queued_at = self.clock()
        if self.mask_maker is None or not self.mask_maker.take(session):
            self._ready.append(session)

    def masks_made(self, session: TargetSession, masks: MadeMasks) -> None:
        """Lets a session take part in steps whose masks were made before; see `MaskMaker`."""
        if self.is_open(session):
            session.masks = masks
            self._ready.append(session)

    def _judge(self, fence: Fence) -> tuple[TargetSession | None, FenceVerdict]:
        """Compares a fence; returns the session only if the fence is current and the round has no work yet."""
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
        stops = spec.parameters.stop_token_ids
        are_many = len(stops) >= len(possible)  # else the possible tokens need not be looked through
        if sampling.min_tokens and are_many and stops.issuperset(possible):
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
        if spec.watched is not None:
            check_local(spec.watched, spec, self.text_drafters, self.head)


def _extra_kind(block: ReceivedBlock | None, judgement: Judgement) -> TokenSource:
    if block is None or not block.token_ids:
        return TokenSource.PLAIN
    if block.tree is None:
        is_whole = judgement.num_accepted == len(block.token_ids)
    else:
        is_whole = bool(judgement.path) and judgement.path[-1] not in block.tree.parents
    return TokenSource.BONUS if is_whole else TokenSource.RECOVERED


def _draft_logprobs(block: ReceivedBlock | None, judgement: Judgement) -> list[float]:
    """Returns the drafter's log-probability of each token of a verdict; NaN after the block or if none were sent."""
    token_ids, given = judgement.token_ids, list[float]()
    if block is not None and block.has_distributions:
        assert not isinstance(block.draft, BlockViolationError), "such a block is refused"
        rows = list(range(min(len(block.token_ids), len(token_ids))))
        if block.tree is not None:  # where nothing follows, the drafter has stated nothing for the last token
            rows = block.tree.distributions_along(judgement.path)[: len(token_ids)]
        given = log_probs(block.draft, token_ids[: len(rows)], rows)
    return given + [math.nan] * (len(token_ids) - len(given))
