"""The drafters of a verifier: their streams, what they send, and what comes of that."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from draftwire.audit import AuditSums
from draftwire.engine.leases import SessionKey
from draftwire.engine.target_session import Step, StepResult, TargetSession
from draftwire.errors import BlockViolationError, ProtocolViolationError, UnavailableError, Violation
from draftwire.method.rounds import ReceivedBlock, RoundOutcome, Verdict
from draftwire.models.description import DRAFT_AHEAD, DRAFTS_ON_OUTCOMES, ModelDescription
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.runtime.call_limits import StreamUse
from draftwire.runtime.outbox import Outbox
from draftwire_verifier.drafters import Drafter, Greeting
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.scheduler import Scheduler
from draftwire_verifier.trust import Trust

log = structlog.get_logger()

MAX_TOLD = 4096
"""Outcomes, and sessions with features to send, that wait for a drafter's stream at most; further outcomes are left
out, and features wait for the next round."""


@dataclass(frozen=True, slots=True)
class BlockRefused:
    """Event for a gateway: a session accepts no more blocks from a drafter. The round is still open."""

    session_id: int
    epoch: int
    round: int
    reason: str
    permit_number: int
    """Permit of the drafter whose blocks are refused."""
    quarantined_drafter_id: int | None = None
    """The drafter, if it is in quarantine: no session accepts its blocks."""


@dataclass(slots=True, eq=False)
class DrafterStream:
    """Messages that wait for a drafter's stream."""

    drafter: Drafter
    takes_outcomes: bool = False
    """Whether it is told how rounds of its blocks ended."""
    drafts_ahead: bool = False
    """Whether it is told of sessions that hold blocks."""
    encoding: FeatureEncoding | None = None
    """Encoding of features; None if it needs none."""
    use: StreamUse = StreamUse.NONE
    """None before a block of it is judged."""
    outbox: Outbox[RoundOutcome | SessionKey] = field(default_factory=lambda: Outbox(MAX_TOLD))
    """Outcomes, and sessions that have features for it; see `FeatureFeeds.take`."""


class DrafterPeers:
    """Hands on what drafters send, as far as they are trusted. Used on the event loop.

    Attributes:
        metrics: of the verifier.
        streams: the latest stream to each drafter, by its id.
        features_of: fingerprint of the head whose features are kept; None if none are.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trust: Trust,
        metrics: VerifierMetrics,
        description: ModelDescription,
        refuse: Callable[[int, BlockRefused], None],
    ) -> None:
        self.streams: dict[int | None, DrafterStream] = {}
        self.features_of: bytes | None = None
        self._scheduler = scheduler
        self._trust = trust
        self.metrics = metrics
        self._description = description
        self._refuse = refuse

    def welcome(self, greeting: Greeting, model: ModelDescription, features_of: bytes | None = None) -> Drafter:
        """Checks that a drafter has the target's vocabulary, and returns its record with its identity.

        Args:
            greeting: what it says of itself.
            model: of the drafter.
            features_of: fingerprint of the head that it needs features for; None if it needs none.

        Raises:
            ProtocolViolationError: the vocabularies differ, and the drafter then compares them and reports the token;
                or features of another head, or of none, are kept here.
        """
        if features_of is not None and features_of != self.features_of:
            raise ProtocolViolationError(f"no features are kept here for the head of drafter {model.name}")
        if model.vocabulary_fingerprint != self._description.vocabulary_fingerprint:
            raise ProtocolViolationError(f"vocabulary of drafter {model.name} differs from {self._description.name}'s")
        sessions = self._scheduler.sessions.values()
        drafter = self._trust.drafters.connect(greeting, {session.drafter_id for session in sessions})
        log.info(
            "verifier.drafter_connected",
            drafter_id=drafter.id,
            instance_id=greeting.instance_id,
            origin=greeting.origin,
            model_name=greeting.model_name,
        )
        self._trust.welcome(drafter, sessions)
        return drafter

    def open_stream(
        self, drafter: Drafter, model: ModelDescription, encoding: FeatureEncoding | None = None
    ) -> DrafterStream:
        """Returns what a drafter is told: how rounds ended whose blocks it sent, and features, as far as it can do
        anything with them. A drafter with several streams is told on the latest.
        """
        stream = DrafterStream(
            drafter, DRAFTS_ON_OUTCOMES in model.capabilities, DRAFT_AHEAD in model.capabilities, encoding
        )
        self.streams[drafter.id] = stream
        return stream

    def end_stream(self, stream: DrafterStream) -> None:
        """Ends what `open_stream` began."""
        if self.streams.get(stream.drafter.id) is stream:
            del self.streams[stream.drafter.id]

    def push(self, blocks: Collection[ReceivedBlock]) -> tuple[int, int]:
        """Accepts blocks. Stale ones are dropped; a protocol violation ends the speculation of its session.

        Returns:
            How many were queued to be judged, and how many were for nothing.
        """
        num_queued, num_kept = 0, self._scheduler.num_kept
        for block in blocks:
            self.metrics.blocks_received.inc()
            try:
                self._take_permit(block)
                session = self._scheduler.offer_block(block)
            except BlockViolationError as error:
                self._refuse_block(block, error)
                continue
            if session is not None:
                num_queued += 1
                self.gate(session)
        return num_queued, len(blocks) - num_queued - (self._scheduler.num_kept - num_kept)

    def gate(self, session: TargetSession) -> None:
        """Has a queued block audited alone if its tokens may not enter the text."""
        block = session.block
        if block is not None and not block.local_strategy and not self._trust.may_use(session, block.drafter_id):
            self._set_aside(session)

    def tell(self, session: TargetSession, verdict: Verdict) -> None:
        """Tells the drafter of a round's block how the round ended, if another one follows. One that reads too slowly
        hears of it from the gateway alone.
        """
        has_block = verdict.num_draft_tokens or verdict.confidence_buckets
        if session.is_over or not has_block or verdict.is_of_verifier:
            return
        stream = self.streams.get(session.drafter_id) if session.drafter_id is not None else None
        if stream is not None and (stream.takes_outcomes or (session.spec.max_held_blocks and stream.drafts_ahead)):
            with suppress(UnavailableError):
                stream.outbox.put(RoundOutcome(session.fence, verdict.token_ids))

    def learn(self, step: Step, result: StepResult, audits: Sequence[AuditSums | None]) -> None:
        """Records the audit of what a step has judged, and refuses whoever is found out."""
        for drafter in self._trust.audit(step, result, audits):
            sessions = [one for one in self._scheduler.sessions.values() if one.drafter_id == drafter.id]
            log.error(
                "verifier.drafter_quarantined",
                drafter_id=drafter.id,
                model_name=drafter.model_name,
                reason=_quarantine_message(drafter),
                num_draft_tokens=drafter.audit.total.num_positions,
                num_sessions=len(sessions),
            )
            for session in sessions:
                self.refuses(session, drafter)

    def refuses(self, session: TargetSession, drafter: Drafter) -> bool:
        """Ends the speculation of a session whose drafter is in quarantine; returns whether it is."""
        if drafter.is_quarantined:
            self._end_speculation(session, _quarantine_message(drafter), drafter.id)
        return drafter.is_quarantined

    def _take_permit(self, block: ReceivedBlock) -> None:
        """Admits the sender to its session if the block has a permit; refuses it again if it is in quarantine."""
        session, drafter = self._scheduler.take_permit(block), self._trust.drafters.get(block.drafter_id)
        if session is not None and drafter is not None:
            self.refuses(session, drafter)

    def _refuse_block(self, block: ReceivedBlock, error: BlockViolationError) -> None:
        self.metrics.blocks_refused.labels(error.violation.value).inc()
        session = self._scheduler.sessions.get((block.fence.session_id, block.fence.epoch))
        is_peer = error.violation is Violation.PEER
        if not is_peer or self._trust.drafters.may_log_refusal(block.drafter_id):
            log.warning(
                "verifier.block_refused",
                session_id=block.fence.session_id,
                request_id=session.request_id if session is not None else "",
                violation=error.violation.value,
                reason=str(error),
                drafter_id=block.drafter_id,
            )
        if session is not None and not is_peer:  # a drafter without a permit must not affect the session
            self._end_speculation(session, str(error))

    def _end_speculation(self, session: TargetSession, reason: str, quarantined_id: int | None = None) -> None:
        """Refuses further blocks of a session's drafter, and notifies the gateway. If it is in quarantine, what it has
        queued is not used.
        """
        if session.block is not None and session.block.is_used and session.block.drafter_id == quarantined_id:
            self._set_aside(session)
        self._scheduler.end_speculation(session)
        refused = BlockRefused(*session.key, session.round, reason, session.permit_number, quarantined_id)
        self._refuse(session.lease_id, refused)

    def _set_aside(self, session: TargetSession) -> None:
        self._scheduler.set_aside(session)
        self.metrics.blocks_set_aside.inc()


def _quarantine_message(drafter: Drafter) -> str:
    alarm = drafter.audit.alarm
    assert alarm is not None, "asked of drafters in quarantine alone"
    return f"the drafter does not draw from the distributions that it sends: {alarm.message}"
