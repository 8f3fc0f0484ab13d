"""The verifier without gRPC: sessions of gateways, and delivery of verdicts."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
from typing_extensions import override

from draftwire.audit import AuditSums
from draftwire.engine.admission import Room
from draftwire.engine.engine_service import EngineService
from draftwire.engine.leases import SessionFailed
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import Step, StepResult, TargetSession
from draftwire.errors import DraftwireError, ProtocolViolationError
from draftwire.method.rounds import FenceVerdict, PlainRun, PromptRead, ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.models.card import ModelCard
from draftwire.models.description import CONFIDENCE, DRAFTS_ON_OUTCOMES, FEATURES, HELD_BLOCKS, ISSUED_IDENTITIES
from draftwire.options.ahead.held_blocks import HeldBlocks, HeldTally
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.options.structured_output.form_compiler_pool import FormCompilerPool
from draftwire.requests.automaton import Automaton
from draftwire.verification.deciding import MadeMasks
from draftwire.verification.rule import VerificationRule, facts_of
from draftwire.verification.rule_loading import served_rules
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.drafter_peers import BlockRefused, DrafterPeers
from draftwire_verifier.drafters import Drafters
from draftwire_verifier.local_sources import LocalSources
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.scheduler import Completed, Scheduler
from draftwire_verifier.slow_masks import SlowMasks
from draftwire_verifier.target_loader import LoadedEngine, TargetLoader
from draftwire_verifier.trust import Trust

if TYPE_CHECKING:
    from draftwire_verifier.feature_feeds import FeatureFeeds

log = structlog.get_logger()

CAPABILITIES = frozenset({CONFIDENCE, DRAFTS_ON_OUTCOMES, HELD_BLOCKS, ISSUED_IDENTITIES})
TargetEvent = Verdict | PromptRead | BlockRefused | SessionFailed


class VerifierCore(EngineService[Step, StepResult, TargetEvent]):
    """Owns the target model. All methods run on the event loop; tensors are touched on the torch thread only.

    Attributes:
        drafters: records of the drafters that have connected.
        trust: says whose blocks may be used.
        peers: takes what drafters send.
        feeds: sends drafters features; None if none are kept.
    """

    failure = "the target failed"
    config: VerifierConfig
    metrics: VerifierMetrics
    peers: DrafterPeers
    _scheduler: Scheduler
    _loaded: LoadedEngine
    _rules: dict[str, VerificationRule]
    _local: LocalSources

    def __init__(self, config: VerifierConfig, place: Place | None = None, followers: Followers | None = None) -> None:
        self.drafters = Drafters()
        self.trust = Trust(self.drafters)
        super().__init__(config, VerifierMetrics(self.drafters), place, followers, FormCompilerPool.of)
        self._held = HeldTally()
        self.feeds: FeatureFeeds | None = None
        self._slow_masks = SlowMasks(self._take_masks)

    @override
    async def _load(self) -> None:
        await super()._load()
        self.metrics.watch_waits(self._scheduler.waits, self._held)
        self.metrics.watch_local(self.description.local_strategies)

    @override
    def _load_engine(self) -> tuple[ModelCard, StepEngine[Step, StepResult]]:
        self._rules = served_rules(self.config.own_rules)
        self._loaded = loaded = TargetLoader(self.config, self.group).load()
        self.kv_cache_tokens = loaded.kv_cache_tokens
        self._local = LocalSources.load(self.config, loaded, self.trust.may_draft)
        description = replace(
            loaded.card.description,
            capabilities=CAPABILITIES | ({FEATURES} if loaded.head else set()),
            rules=tuple(map(facts_of, self._rules.values())),
            local_strategies=self._local.names,
            max_tree_nodes=loaded.max_tree_nodes,
        )
        return replace(loaded.card, description=description), loaded.engine

    @override
    def _make_scheduler(self, room: Room, pacer: PrefillPacer) -> Scheduler:
        scheduler = Scheduler(
            context_length=self.description.context_length,
            vocab_size=self.description.vocab_size,
            rules=self._rules,
            local=self._local.find,
            report_of=LogprobsReport.of,
            hold=partial(HeldBlocks, self._held),
            max_draft_tokens=self.config.engine.max_draft_tokens,
            max_tree_nodes=self.description.max_tree_nodes,
            take_slow=self._slow_masks.take,
            room=room,
            pacer=pacer,
        )
        if scheduler.max_tree_nodes:
            from draftwire.options.trees.tree_choice import tree_rule_for

            scheduler.tree_rule_for = tree_rule_for
        for strategy in self._loaded.drafts_by:
            self.trust.adopt(strategy)
        self.peers = DrafterPeers(scheduler, self.trust, self.metrics, self.description, self._leases.send)
        if self._loaded.head is not None:
            from draftwire_verifier.feature_feeds import FeatureFeeds

            self.feeds = FeatureFeeds(self._loaded, self._torch, scheduler, self.peers)
        return scheduler

    def _take_masks(self, session: TargetSession, masks: MadeMasks) -> None:
        self._scheduler.masks_made(session, masks)
        self._work.set()

    @override
    def stop(self) -> None:
        super().stop()
        self._slow_masks.stop()

    async def automaton_of(self, spec: TargetSessionSpec) -> Automaton | None:
        """Returns the automaton of a session's structured output, advanced over its text so far; None if it has none.

        Raises:
            InvalidRequestError: the form is not supported, or the text so far violates it.
            NoRoomError: too many forms are being compiled, or are open.
        """
        return await self.compile_form(spec.parameters, spec.token_ids[spec.parameters.prompt_len :])

    def open_session(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> None:
        """Opens a session; its verdicts go to the lease's outbox.

        Raises:
            ProtocolViolationError: the lease is unknown, or the session was closed before it was opened.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        self._leases.require(lease_id)
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        self.trust.open(session)
        if self.spans is not None:
            self.spans.open(spec)
        self._work.set()

    @override
    def close_session(self, session_id: int, epoch: int) -> None:
        session = self._scheduler.sessions.get((session_id, epoch))
        super().close_session(session_id, epoch)
        if session is not None:
            self.trust.close(session)
            if self.feeds is not None:
                self.feeds.close(session.key)

    def run_plain(self, run: PlainRun) -> None:
        """Starts a plain run; a message that violates the protocol fails the session."""
        try:
            if self._scheduler.run_plain(run) is FenceVerdict.VIOLATION:
                raise ProtocolViolationError("plain run for another prefix than the session's")
        except DraftwireError as error:
            self._fail((run.fence.session_id, run.fence.epoch), error)
        self._work.set()

    def push_blocks(self, blocks: Collection[ReceivedBlock]) -> tuple[int, int]:
        """Accepts blocks of a drafter; see `DrafterPeers.push`."""
        counts = self.peers.push(blocks)
        self._work.set()
        return counts

    @override
    def _complete(self, step: Step, result: StepResult) -> list[Completed]:
        deliveries = self._scheduler.complete(step, result)
        for session, event in deliveries:
            if isinstance(event, DraftwireError):
                self._fail(session.key, event)
                continue
            if isinstance(event, Verdict):
                self.trust.begin(session)
                self.peers.gate(session)
                self.peers.tell(session, event)
            self._leases.send(session.lease_id, event)
        if self.feeds is not None:
            self.feeds.observe(step)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._count, step, result, deliveries)  # when the verdicts are on their way
        if result.drafted or any(item.block is not None for item in step.items):
            self._torch.post(self._audit, loop, step, result)  # before the next step, whose pass needs the memory
        else:
            self.peers.learn(step, result, [None] * len(step.items))
        return deliveries

    def _audit(self, loop: asyncio.AbstractEventLoop, step: Step, result: StepResult) -> None:
        """Audits what a step has judged, on the torch thread."""
        audits: Sequence[AuditSums | None] = [None] * len(step.items)
        try:
            audits = result.audit()
        except Exception:  # the verdicts are sent
            log.exception("verifier.audit_failed", num_sessions=len(step.items))
        result = replace(result, audit=tuple)  # what was audited must not live until the event loop has time
        loop.call_soon_threadsafe(self.peers.learn, step, result, audits)

    def _count(self, step: Step, result: StepResult, deliveries: Sequence[Completed]) -> None:
        self.metrics.count_step(len(step.items), result.verify_us / 1e6)
        self.metrics.count_head(result.draft_s)
        for session, event in deliveries:
            if isinstance(event, Verdict):
                self.metrics.count(event, is_first=event.fence.round == session.spec.first_round)
