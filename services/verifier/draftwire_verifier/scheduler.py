"""The verifier's scheduler: continuous batching into steps. Pure: no tensors, no transport, no clock but the given one.

A step takes all work that is ready when it begins: draft blocks, plain rounds, and as large a chunk of waiting prompts
as the latency target of decoding sessions allows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import SessionBook
from draftwire.engine.target_session import (
    FindSources,
    LocalSource,
    PushedBlocks,
    SessionReport,
    Step,
    StepItem,
    StepResult,
    TargetSession,
)
from draftwire.errors import BlockViolationError, DraftwireError, InvalidRequestError, Violation
from draftwire.method.round_parts import StepSize
from draftwire.method.rounds import (
    Fence,
    FenceVerdict,
    LocalDraft,
    Permit,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
    judge_fence,
)
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import unknown_rule
from draftwire.verification import RULES, VerificationRule
from draftwire.verification.deciding import Judgement, MadeMasks, StillReading
from draftwire_verifier.block_check import check_block, check_sampling, check_sender
from draftwire_verifier.draft_waits import DraftWaits
from draftwire_verifier.judged_round import JudgedRound

MAX_FIRST_ROUND = 2**31
"""Largest `first_round`; leaves room to count rounds in uint32."""

Completed = tuple[TargetSession, Verdict | PromptRead | DraftwireError]
"""A session and its event; an error fails the session."""


@dataclass(kw_only=True)
class Scheduler(SessionBook[TargetSession, Step]):
    """Queues prompts, blocks and plain runs and batches them into steps. One step runs at a time."""

    vocab_size: int
    max_tree_nodes: int = 0
    """Most tokens of a token tree that a session may ask for."""
    tree_rule_for: Callable[[VerificationRule, SamplingParams], object] | None = None
    """Finds what decides about trees, or raises InvalidRequestError; None where there are none."""
    rules: Mapping[str, VerificationRule] = field(default_factory=lambda: RULES)
    """Rules that sessions may ask for, by name."""
    local: FindSources | None = None
    """Finds the sources that draft runs without a drafter; None if there are none."""
    report_of: Callable[[TargetSessionSpec], SessionReport | None] | None = None
    """Returns what a session asks to have reported of its tokens; None if nothing is reported."""
    hold: Callable[[int], PushedBlocks] | None = None
    """Makes the source of a session that holds so many blocks of coming rounds; None if no session may."""
    take_slow: Callable[[TargetSession], bool] | None = None
    """Takes a session that is queued if its masks are slow, makes them before the step, and calls `masks_made`: only
    this session waits for them. None: all masks are made in the step."""
    num_kept: int = 0
    """Blocks of coming rounds that were kept at some time."""
    waits: DraftWaits = field(default_factory=DraftWaits)
    """Sessions that wait for their next drafts."""

    def open(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> TargetSession:
        """Admits a session.

        Raises:
            InvalidRequestError: ids or parameters are out of range.
            ProtocolViolationError: the session was closed before it was opened.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        rule = self.rules.get(spec.parameters.rule.name)
        if rule is None:
            raise unknown_rule(self.rules)
        self._check(spec)
        watching = self._local_of(spec.watched, spec)
        if spec.max_tree_nodes:
            self._check_trees(spec, rule)
        assert (automaton is None) is (spec.parameters.sampling.structured_output is None), "a form is followed"
        self._check_new(spec)
        session = TargetSession(
            spec=spec,
            rule=rule,
            lease_id=lease_id,
            automaton=automaton,
            round=spec.first_round,
            plain_rounds_left=spec.plain_rounds,
            pushed=self.hold(spec.max_held_blocks) if self.hold and spec.max_held_blocks else PushedBlocks(),
            report=self.report_of(spec) if self.report_of is not None else None,
        )
        if watching:
            session.local[type(watching[0])] = watching[0]
        self._admit(session)
        if session.plain_rounds_left:
            self._begin(session)
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
        session.seat(permit, block.drafter_id)
        return session

    def admit(self, key: SessionKey, permit: Permit, drafter_id: int) -> TargetSession | None:
        """Makes whoever shows a permit the drafter of a session, if the permit has a higher number. For messages other
        than blocks, which may be the first that a drafter sends of a session.

        Returns:
            The session, if it is open and the drafter is its own; otherwise the message is to be dropped, and counted.
        """
        session = self.sessions.get(key)
        is_genuine = session is not None and permit.is_made_with(session.spec.permit_key, drafter_id)
        if session is not None and is_genuine and permit.number > session.permit_number:
            session.seat(permit, drafter_id)
        if session is None or not is_genuine or session.drafter_id != drafter_id:  # it was replaced, or refused
            self.dropped["unknown_session" if session is None else "no_speculation"] += 1
            return None
        return session

    def end_speculation(self, session: TargetSession) -> None:
        """Refuses further blocks for a session, until another drafter sends a permit with a higher number."""
        session.drafter_id = None
        session.pushed.clear()

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
        if known is not None and known.pushed.keeps(known, block):
            check_sender(block, known)
            check_block(block, known.spec, known.rule)
            self.num_kept += known.pushed.keep(known, block)
            return None
        session, verdict = self._judge(block.fence)
        if known is None or verdict is FenceVerdict.STALE:
            return None
        check_sender(block, known)
        if session is None:
            raise BlockViolationError(Violation.PREFIX, "block for another prefix than the session's")
        check_block(block, session.spec, session.rule)
        session.block = block
        self.waits.end(session, has_block=True)
        self._enqueue(session)
        return session

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
            sources = self._local_of(run.draft, session.spec, session.local.values())
            source = session.run_source = next((one for one in sources if one.may_draft()), None)
            if run.draft is not None and source is not None:
                session.local[type(source)] = source
                source.num_draft_tokens = run.draft.num_draft_tokens
            session.plain_rounds_left = run.num_rounds
            self.waits.end(session)
            self._begin(session)
        return verdict

    def close(self, session_id: int, epoch: int) -> TargetSession | None:
        """Removes a session and its queued work; returns the session, or None if it was not open."""
        session = super().close(session_id, epoch)
        if session is not None:
            self.waits.close(session)
            for source in session.sources:
                source.close(session)
        return session

    def next_step(self) -> Step | None:
        """Returns the next step, or None if there is nothing to do, or a step waits: see `holds_for_s`. Pass it to
        `complete` after.
        """
        now = self.waits.clock()
        if self.waits.hold(self._ready, now):
            self.waits.begin_step(now, is_empty=True)
            return None
        items = [StepItem(each, each.block, max_read or 1, each.order) for each, max_read in self._take_ready()]
        self.waits.begin_step(now, is_empty=not items)
        return Step(items, now) if items else None

    @property
    @override
    def holds_for_s(self) -> float | None:
        return self.waits.holds_for_s

    def complete(self, step: Step, result: StepResult) -> list[Completed]:
        """Commits decided rounds and returns the events to send. Sessions that were closed meanwhile are left out."""
        if not any(item.session.is_reading for item in step.items):
            self.waits.gathering.times.learn(result.num_tokens, result.verify_us / 1e6)
        self._record_costs(step.items, result.num_reused, result.num_tokens, result.verify_us / 1e6)
        size = StepSize(result.num_tokens, len(step.items), sum(len(item.session.committed) for item in step.items))
        deliveries: list[Completed] = []
        parts = zip(step.items, result.outcomes, result.num_unread, strict=True)
        for index, (item, outcome, num_unread) in enumerate(parts):
            session = item.session
            session.num_unread = num_unread
            if not self.is_open(session):
                continue
            if isinstance(outcome, Judgement | StillReading) and outcome.prompt is not None:
                deliveries.append((session, PromptRead(*session.key, outcome.prompt)))
            if isinstance(outcome, Judgement):
                deliveries.append((session, self._commit(JudgedRound(step, result, index, outcome, size))))
            elif isinstance(outcome, StillReading):
                self._ready.append(session)
            else:
                deliveries.append((session, outcome))
        return deliveries

    def _commit(self, judged: JudgedRound) -> Verdict:
        """Commits a round, begins the next one, and returns the verdict."""
        session, fence = judged.session, judged.session.fence
        session.commit(judged.judgement.token_ids)
        verdict, block = judged.verdict(fence), judged.block
        for source in session.sources:
            verdict = source.report(session, verdict, block, has_failed=judged.has_failed)
        self._begin(session)
        return verdict

    def _begin(self, session: TargetSession) -> None:
        """Begins a round, whose source is fixed: takes its block if there is one at once. Queues the session if the
        round can be decided; otherwise it waits for what decides it.
        """
        source = session.source
        session.block = None if source is None else source.block(session)
        if session.plain_rounds_left or session.block is not None:
            self._enqueue(session)
        elif not session.is_over:
            self.waits.begin(session)

    def _enqueue(self, session: TargetSession) -> None:
        session.queued = True
        session.queued_at = self.waits.clock()
        if self.take_slow is None or not self.take_slow(session):
            self._ready.append(session)

    def masks_made(self, session: TargetSession, masks: MadeMasks) -> None:
        """Lets a session take part in steps whose masks were made before; see `take_slow`."""
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
        check_sampling(spec, self.vocab_size)
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
        wanted = spec.parameters.max_draft_tokens
        if wanted > self.max_draft_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {wanted} is above the verifier's limit {self.max_draft_tokens}"
            )
        if spec.max_held_blocks and self.hold is None:
            raise InvalidRequestError("no blocks of coming rounds are held here")

    def _check_trees(self, spec: TargetSessionSpec, rule: VerificationRule) -> None:
        if spec.max_tree_nodes > self.max_tree_nodes:
            wanted, most = spec.max_tree_nodes, self.max_tree_nodes
            raise InvalidRequestError(f"num_draft_nodes {wanted} is above the verifier's limit {most}")
        if spec.max_held_blocks:
            raise InvalidRequestError("a session that holds blocks has no token trees")
        assert self.tree_rule_for is not None, "where trees are judged"
        self.tree_rule_for(rule, spec.parameters.sampling)

    def _local_of(
        self, draft: LocalDraft | None, spec: TargetSessionSpec, known: Iterable[LocalSource] = ()
    ) -> list[LocalSource]:
        """Returns the sources that a draft names, as `FindSources`; none if there is no draft."""
        if draft is None:
            return []
        if self.local is None:
            raise InvalidRequestError(f"nothing drafts by the name {draft.strategy!r}")
        return self.local(draft, spec, known)
