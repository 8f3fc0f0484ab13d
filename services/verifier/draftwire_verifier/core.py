"""The verifier without gRPC: sessions, drafters, audit, and delivery of verdicts."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch
from typing_extensions import override

from draftwire.audit import AuditSums, FirstUses
from draftwire.drafting.heads.draft_head import DraftHead, FeatureUser
from draftwire.drafting.heads.head_drafter import HeadDrafter
from draftwire.drafting.heads.head_loading import load_fusion, load_head, read_shape
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.engine.admission import Room
from draftwire.engine.cache_sizing import run_largest, size_while_loading
from draftwire.engine.engine_service import EngineService
from draftwire.engine.leases import SessionFailed, SessionKey
from draftwire.engine.model_loading import LoadedTarget, load_target
from draftwire.engine.model_settings import limited
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.step_engine import StepEngine
from draftwire.errors import (
    BlockViolationError,
    DraftwireError,
    ProtocolViolationError,
    UnavailableError,
    Violation,
)
from draftwire.method.feature_format import FeatureEncoding
from draftwire.method.features import FeatureRequest, SessionFeatures
from draftwire.method.quantization import Quantization
from draftwire.method.rounds import (
    FenceVerdict,
    PlainRun,
    PromptRead,
    ReceivedBlock,
    RoundOutcome,
    TargetSessionSpec,
    Verdict,
)
from draftwire.models.card import ModelCard, path_of
from draftwire.models.decoder import Decoder
from draftwire.models.description import DRAFT_AHEAD, FEATURES, HELD_BLOCKS, ISSUED_IDENTITIES, ModelDescription
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.script import is_scripted
from draftwire.models.sequence_model import FeatureModel
from draftwire.models.taps import check_taps
from draftwire.options.structured_output.form_compiler_pool import FormCompilerPool
from draftwire.requests.automaton import Automaton
from draftwire.verification.deciding import MadeMasks
from draftwire.verification.rule import VerificationRule, facts_of
from draftwire.verification.rule_loading import served_rules
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.drafters import Drafter, Drafters, Greeting
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.feeding import DrafterStream, FeaturePart, Feed
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.progress import LoadProgress
from draftwire_verifier.scheduler import Completed, Scheduler, Step, StepResult, TargetSession
from draftwire_verifier.slow_masks import SlowMasks

log = structlog.get_logger()

LOCAL_ORIGIN = "verifier"
"""Origin of the verifier's own head, in the records of drafters: no connection has such a name."""
HEAD_QUANTIZATION = Quantization(mass=0.99, max_support=512)
"""Quantization of the drafts of a head in the verifier: they travel nowhere, and the mass that is left out costs
acceptance."""


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


TargetEvent = Verdict | PromptRead | BlockRefused | SessionFailed


class VerifierCore(EngineService[Step, StepResult, TargetEvent]):
    """Owns the target model. All methods run on the event loop; tensors are touched on the torch thread only."""

    failure = "the target failed"
    config: VerifierConfig
    metrics: VerifierMetrics
    _scheduler: Scheduler
    _rules: dict[str, VerificationRule]
    _text_drafters: TextDrafters

    def __init__(self, config: VerifierConfig, place: Place | None = None, followers: Followers | None = None) -> None:
        """Prepares; `start` loads the model.

        Args:
            config: of the verifier.
            place: see `GroupGuard`.
            followers: see `GroupGuard`.
        """
        self.drafters = Drafters()
        super().__init__(config, VerifierMetrics(self.drafters), place, followers, FormCompilerPool.of)
        self._head_names: tuple[str, ...] = ()
        """Names of the target's head, if there is one."""
        self._head: Drafter | None = None
        """Its record; None if there is none."""
        self._own_head: DraftHead | None = None
        self._features_of: bytes | None = None
        """Fingerprint of the head whose features are kept; None if none are."""
        self._feature_size = 0
        """Numbers that are kept of a token."""
        self._first_uses = FirstUses()
        self._slow_masks = SlowMasks(self._take_masks)
        self._streams: dict[int | None, DrafterStream] = {}
        """The latest stream to each drafter, by its id."""

    async def _load(self) -> None:
        await super()._load()
        self.metrics.watch_waits(self._scheduler)
        for strategy in self.description.local_strategies:
            self.metrics.local_draft_tokens.labels(strategy)  # at 0 from the start, so that `rate` sees the first
            self.metrics.local_accepted.labels(strategy)
        for name in self._head_names:
            self._head = self.drafters.connect(Greeting(name, LOCAL_ORIGIN, 0))

    def _load_engine(self) -> tuple[ModelCard, StepEngine[Step, StepResult]]:
        self._rules = served_rules(self.config.own_rules)
        card, engine = self._load_vllm() if self.config.target.is_vllm else self._load_own()
        texts = self.config.texts
        fingerprint = card.description.vocabulary_fingerprint
        self._text_drafters = TextDrafters.load(texts.retrieval_store, texts.shared_tokens, fingerprint)
        description = replace(
            card.description,
            capabilities=frozenset({HELD_BLOCKS, ISSUED_IDENTITIES, *([FEATURES] if self._features_of else [])}),
            rules=tuple(map(facts_of, self._rules.values())),
            local_strategies=(*self._head_names, *self._text_drafters.names),
            max_tree_nodes=self._max_tree_nodes,
        )
        return replace(card, description=description), engine

    def _load_own(self) -> tuple[ModelCard, StepEngine[Step, StepResult]]:
        self._check_head()
        target = self._load_target()
        self.kv_cache_tokens = self._size_cache(target)
        card = limited(target.card, self.kv_cache_tokens, self._max_tree_nodes)
        if self._own_head is not None:
            self._own_head.resize(self.kv_cache_tokens)  # a text has fewer pairs than tokens
            self._head_names = (self._own_head.config.kind.value,)
        return card, self._engine_of(target, card)

    def _check_head(self) -> None:
        """Refuses a head that does not fit before the target's weights are loaded, which may take minutes."""
        if self.config.heads.folder is not None and not is_scripted(self.config.loading.model):
            read_shape(*self._head_folders)

    @property
    def _head_folders(self) -> tuple[Path, Path]:
        """Folders of the head whose features are kept, and of its target."""
        assert self.config.heads.folder is not None, "asked for only if there is one"
        loading = self.config.loading
        return Path(self.config.heads.folder).expanduser(), Path(path_of(loading.model, loading.dtype))

    def _make_head(self, card: ModelCard, decoder: Decoder) -> FeatureUser:
        """Loads the head, or only what makes its features, in the target's type and onto its device."""
        dtype = getattr(torch, card.description.dtype)
        user: FeatureUser
        user = fusion = load_fusion(*self._head_folders, dtype, decoder.device)
        self._features_of, self._feature_size = fusion.fingerprint, fusion.config.hidden_size
        if self.config.heads.draft_head is not None:
            cache_tokens = size_while_loading(self.config.engine)
            user = self._own_head = load_head(*self._head_folders, cache_tokens, dtype, str(decoder.device))
        check_taps(user.config.taps, decoder.num_layers)
        return user

    def _engine_of(self, target: LoadedTarget, card: ModelCard) -> TargetEngine:
        head = None
        if self._own_head is not None:
            assert isinstance(target.model, FeatureModel), "it was loaded with a head"
            head = HeadDrafter(self._own_head, target.model, HEAD_QUANTIZATION)
        return TargetEngine(target.model, card.description.context_length, head)

    def _load_vllm(self) -> tuple[ModelCard, StepEngine[Step, StepResult]]:
        from draftwire_verifier.vllm.vllm_engine import load_vllm

        loaded = load_vllm(self.config)
        self.kv_cache_tokens = loaded.engine.num_cached_tokens
        self.group.take(loaded.engine)
        return loaded.card, loaded.engine

    def _size_cache(self, target: LoadedTarget) -> int:
        """Returns the size of the KV cache, which is found if it is not set, tokens."""
        settings, size = self.config.engine, target.model.cache.num_blocks * BLOCK_SIZE
        if target.fit is None:
            return settings.kv_cache_tokens if isinstance(settings.kv_cache_tokens, int) else size
        trial = self._engine_of(target, limited(target.card, size))
        most_rows = max(settings.max_draft_tokens, self._max_tree_nodes)
        run_largest(partial(trial.run_largest, settings.max_sessions, most_rows), settings)
        return target.fit()

    def _load_target(self) -> LoadedTarget:
        make_head = self._make_head if self.config.heads.folder is not None else None
        if self.group.place.size == 1:
            return load_target(self.config.loading, self.config.engine, make_head)
        from draftwire.engine.ranks.group_model import GroupModel, load_target_rank

        progress = LoadProgress(self.config.server.log_format)
        try:
            rank = load_target_rank(RankConfig.of(self.config, self.group.place), progress, make_head)
        finally:
            progress.end()
        model = GroupModel(rank, "verifier")
        self.group.take(model)
        fit = None if rank.count is None else partial(model.fit, rank.count)
        return LoadedTarget(rank.card, model, fit, rank.head)

    def _make_scheduler(self, room: Room, pacer: PrefillPacer) -> Scheduler:
        return Scheduler(
            context_length=self.description.context_length,
            vocab_size=self.description.vocab_size,
            rules=self._rules,
            text_drafters=self._text_drafters,
            head=next(iter(self._head_names), ""),
            max_draft_tokens=self.config.engine.max_draft_tokens,
            max_tree_nodes=self._max_tree_nodes,
            mask_maker=self._slow_masks,
            room=room,
            pacer=pacer,
        )

    def _take_masks(self, session: TargetSession, masks: MadeMasks) -> None:
        self._scheduler.masks_made(session, masks)
        self._work.set()

    @override
    def stop(self) -> None:
        super().stop()
        self._slow_masks.stop()

    @property
    def _max_tree_nodes(self) -> int:
        """Most tokens of a token tree: none on vLLM, which does not read trees."""
        return 0 if self.config.target.is_vllm else self.config.engine.max_tree_nodes

    async def automaton_of(self, spec: TargetSessionSpec) -> Automaton | None:
        """Returns the automaton of a session's structured output, advanced over its text so far; None if it has none.

        Raises:
            InvalidRequestError: the form is not supported, or the text so far violates it.
            NoRoomError: too many forms are being compiled, or are open.
        """
        return await self.compile_form(spec.parameters, spec.token_ids[spec.parameters.prompt_len :])

    def open_session(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> None:
        """Opens a session; its verdicts go to the lease's outbox.

        Args:
            spec: the session.
            lease_id: lease that the session belongs to.
            automaton: from `automaton_of`.

        Raises:
            ProtocolViolationError: the lease is unknown, or the session was closed before it was opened.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open, or the KV cache has no room for this one.
        """
        self._leases.require(lease_id)
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        session.is_audited = self._first_uses.claim(spec.verifying_key, spec.parameters.choice)
        self._begin_round(session)
        if self.spans is not None:
            self.spans.open(spec)
        self._work.set()

    def run_plain(self, run: PlainRun) -> None:
        """Starts a plain run; a message that violates the protocol fails the session."""
        try:
            if self._scheduler.run_plain(run) is FenceVerdict.VIOLATION:
                raise ProtocolViolationError("plain run for another prefix than the session's")
        except DraftwireError as error:
            self._fail((run.fence.session_id, run.fence.epoch), error)
        self._work.set()

    def welcome_drafter(self, greeting: Greeting, model: ModelDescription, features_of: bytes | None = None) -> Drafter:
        """Checks that a drafter has the target's vocabulary, and returns its record with its identity.

        Args:
            greeting: what it says of itself.
            model: of the drafter.
            features_of: fingerprint of the head that it needs features for; None if it needs none.

        Raises:
            ProtocolViolationError: the vocabularies differ, and the drafter then compares them and reports the token;
                or features of another head, or of none, are kept here.
        """
        if features_of is not None and features_of != self._features_of:
            raise ProtocolViolationError(f"no features are kept here for the head of drafter {model.name}")
        if model.vocabulary_fingerprint != self.description.vocabulary_fingerprint:
            raise ProtocolViolationError(f"vocabulary of drafter {model.name} differs from {self.description.name}'s")
        drafter = self.drafters.connect(greeting, {session.drafter_id for session in self._scheduler.sessions.values()})
        log.info(
            "verifier.drafter_connected",
            drafter_id=drafter.id,
            instance_id=greeting.instance_id,
            origin=greeting.origin,
            model_name=greeting.model_name,
        )
        for session in self._scheduler.sessions.values():
            if session.drafter_id is None:
                self._trust(session, (drafter,))
        return drafter

    def push_blocks(self, blocks: Collection[ReceivedBlock]) -> tuple[int, int]:
        """Accepts blocks. Stale ones are dropped; a protocol violation ends the speculation of its session.

        Returns:
            How many were queued to be judged, and how many were for nothing.
        """
        num_queued, num_kept = 0, self._scheduler.held.num_kept
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
                self._set_aside_unless_trusted(session)
        self._work.set()
        return num_queued, len(blocks) - num_queued - (self._scheduler.held.num_kept - num_kept)

    def open_stream(
        self, drafter: Drafter, model: ModelDescription, encoding: FeatureEncoding | None = None
    ) -> DrafterStream:
        """Returns what a drafter is told: how rounds ended whose blocks it sent, and features, as far as it can do
        anything with them. A drafter with several streams is told on the latest, to which features pass over that were
        due on another one.
        """
        stream = DrafterStream(drafter, DRAFT_AHEAD in model.capabilities, encoding)
        self._streams[drafter.id] = stream
        for session in self._scheduler.sessions.values():
            if session.feed is not None and session.feed.drafter_id == drafter.id:
                session.feed.is_due = False
                self._offer_features(session)
        return stream

    def end_stream(self, stream: DrafterStream) -> None:
        """Ends what `open_stream` began."""
        if self._streams.get(stream.drafter.id) is stream:
            del self._streams[stream.drafter.id]

    def request_features(self, stream: DrafterStream, requests: Iterable[FeatureRequest]) -> None:
        """Takes requests of a drafter. Those without a permit, or for sessions that are not here, are dropped. One in
        quarantine is refused: a request may be the first that its session hears of it.
        """
        drafter = stream.drafter
        for request in requests:
            session = self._scheduler.feed(request, drafter.id)
            if session is not None and drafter.is_quarantined:
                self._end_speculation(session, _quarantine_message(drafter), drafter.id)
            elif session is not None:
                self._offer_features(session)

    def _offer_features(self, session: TargetSession) -> None:
        """Has features sent that a session's drafter has asked for and the target has read, if there are any."""
        feed = session.feed
        stream = None if feed is None else self._streams.get(feed.drafter_id)
        if feed is None or stream is None or stream.encoding is None or feed.is_due or not session.num_feedable:
            return
        with suppress(UnavailableError):  # it reads too slowly: the next round offers them again
            stream.outbox.put(session.key)
            feed.is_due = True

    async def take_features(self, stream: DrafterStream, keys: Iterable[SessionKey]) -> list[SessionFeatures]:
        """Returns the next features of sessions that are to be sent, together as many as fit into a message; none of
        sessions that have none any more. What is left is offered again, behind what waits. They are read when the
        stream has room for them, in one call to the engine, which may wait for a step: nothing is kept for a drafter.
        """
        assert stream.encoding is not None, "features are offered to streams that want them"
        assert isinstance(self._engine, TargetEngine), "of the only engine that keeps them"
        parts: list[tuple[TargetSession, Feed, FeaturePart]] = []
        num_left = stream.most_positions(self._feature_size)
        for key in keys:
            session = self._scheduler.sessions.get(key)
            if session is None or session.feed is None or session.feed.drafter_id != stream.drafter.id:
                continue
            session.feed.is_due = False
            count, start = min(session.num_feedable, num_left), session.feed.next_position
            if count:
                parts.append((session, session.feed, FeaturePart(key, start, start + count)))
                num_left -= count
            else:
                self._offer_features(session)
        if not parts:
            return []
        try:
            taken = await self._torch.run(self._engine.features, [part for _, _, part in parts], stream.encoding)
        except Exception:
            log.exception("verifier.features_failed", num_sessions=len(parts))
            return []
        found: list[SessionFeatures] = []
        for (session, feed, part), encoded in zip(parts, taken, strict=True):
            if encoded is None or session.feed is not feed or feed.next_position != part.start:  # closed, or anew
                continue
            feed.next_position = part.stop
            self._offer_features(session)
            self.metrics.feature_bytes.inc(sum(map(len, encoded)))
            found.append(SessionFeatures(*part.key, part.start, part.stop - part.start, *encoded))
        return found

    def _tell(self, session: TargetSession, verdict: Verdict) -> None:
        """Tells the drafter of a round's block how the round ended, if its session holds blocks. One that reads too
        slowly hears of it from the gateway alone.
        """
        is_drafters = bool(verdict.num_draft_tokens) and not verdict.local_strategy
        stream = self._streams.get(session.drafter_id)
        if session.spec.max_held_blocks and is_drafters and stream is not None and stream.takes_outcomes:
            with suppress(UnavailableError):
                stream.outbox.put(RoundOutcome(session.fence, verdict.token_ids))

    def _set_aside_unless_trusted(self, session: TargetSession) -> None:
        """Has a queued block audited alone if its tokens may not enter the text."""
        if session.block is None or session.block.local_strategy:
            return
        if not self._may_use(session, session.block):
            self._scheduler.set_aside(session)
            self.metrics.blocks_set_aside.inc()

    def _may_use(self, session: TargetSession, block: ReceivedBlock) -> bool:
        """Whether the tokens of a queued block may enter the text, as far as their sender is trusted.

        Depends on the sender and on what was known when the round began, never on the block: see docs/exactness.md.
        """
        drafter = self.drafters.get(block.drafter_id)
        return drafter is not None and (not session.can_be_biased or session.trust.covers(drafter))

    def _begin_round(self, session: TargetSession) -> None:
        """Decides whose blocks a session's next round may use: its drafter's or, while it has none, those of any."""
        session.trust.begin(self.drafters.now())
        drafter = self.drafters.get(session.drafter_id) if session.drafter_id is not None else None
        self._trust(session, self.drafters if drafter is None else (drafter,))

    def _trust(self, session: TargetSession, drafters: Iterable[Drafter]) -> None:
        """Trusts drafters in the current round of a session as far as they have proved themselves or have credit."""
        if session.can_be_biased and session.has_speculation:
            for drafter in drafters:
                session.trust.add(drafter, session.most_draft_tokens)

    def _take_permit(self, block: ReceivedBlock) -> None:
        """Admits the sender to its session if the block has a permit; refuses it again if it is in quarantine."""
        session, drafter = self._scheduler.take_permit(block), self.drafters.get(block.drafter_id)
        if session is not None and drafter is not None and drafter.is_quarantined:
            self._end_speculation(session, _quarantine_message(drafter), drafter.id)

    def _refuse_block(self, block: ReceivedBlock, error: BlockViolationError) -> None:
        self.metrics.blocks_refused.labels(error.violation.value).inc()
        session_id, epoch = block.fence.session_id, block.fence.epoch
        if error.violation is not Violation.PEER or self.drafters.may_log_refusal(block.drafter_id):
            session = self._scheduler.sessions.get((session_id, epoch))
            log.warning(
                "verifier.block_refused",
                session_id=session_id,
                request_id=session.request_id if session is not None else "",
                violation=error.violation.value,
                reason=str(error),
                drafter_id=block.drafter_id,
            )
        if error.violation is not Violation.PEER:  # a drafter without a permit must not affect the session
            self._end_speculation(self._scheduler.sessions[session_id, epoch], str(error))

    def _end_speculation(self, session: TargetSession, reason: str, quarantined_id: int | None = None) -> None:
        """Refuses further blocks of a session's drafter, and notifies the gateway. If it is in quarantine, what it has
        queued is not used.
        """
        if session.block is not None and session.block.is_used and session.block.drafter_id == quarantined_id:
            self._scheduler.set_aside(session)
            self.metrics.blocks_set_aside.inc()
        self._scheduler.end_speculation(session)
        refused = BlockRefused(*session.key, session.round, reason, session.permit_number, quarantined_id)
        self._leases.send(session.lease_id, refused)

    def _audit(self, step: Step, result: StepResult) -> None:
        """Adds the audit sums of a step to the drafters' records; quarantines drafters that exceed the bound."""
        sums_of: dict[tuple[int, bool], AuditSums] = {}
        drafted = result.drafted or [None] * len(step.items)
        for item, own, sums in zip(step.items, drafted, result.audits, strict=True):
            block = own or item.block
            if block is not None and item.session.is_audited and sums is not None:
                sender = (block.drafter_id, block.is_used)
                if own is not None and self._head is not None:
                    sender = (self._head.id, False)  # it needs no credit
                sums_of[sender] = sums_of.get(sender, AuditSums()) + sums
        for (drafter_id, is_used), sums in sums_of.items():
            drafter = self.drafters.get(drafter_id)
            if drafter is not None:
                self._add(drafter, sums, is_used=is_used)

    def _add(self, drafter: Drafter, sums: AuditSums, *, is_used: bool) -> None:
        origin = drafter.origin
        suspicion = origin.suspicion
        is_newly_quarantined = drafter.add(sums, is_used=is_used)
        if origin.suspicion is not None and suspicion is None:
            log.warning("verifier.origin_suspected", origin=origin.name, reason=origin.suspicion.message)
        if is_newly_quarantined:
            self._quarantine(drafter)

    def _quarantine(self, drafter: Drafter) -> None:
        reason = _quarantine_message(drafter)
        sessions = [session for session in self._scheduler.sessions.values() if session.drafter_id == drafter.id]
        log.error(
            "verifier.drafter_quarantined",
            drafter_id=drafter.id,
            model_name=drafter.model_name,
            reason=reason,
            num_draft_tokens=drafter.audit.total.num_positions,
            num_sessions=len(sessions),
        )
        if drafter is self._head:
            self._scheduler.is_head_trusted = False
        for session in sessions:
            self._end_speculation(session, reason, drafter.id)

    def _complete(self, step: Step, result: StepResult) -> list[Completed]:
        self.metrics.count_step(len(step.items), result.verify_us / 1e6)
        self.metrics.count_head(result.head_s)
        deliveries = self._scheduler.complete(step, result)
        for session, event in deliveries:
            if isinstance(event, DraftwireError):
                self._fail(session.key, event)
                continue
            self._leases.send(session.lease_id, event)
            if isinstance(event, Verdict):
                self.metrics.count(event, is_first=event.fence.round == session.spec.first_round)
                self._tell(session, event)
        for item in step.items:
            self._offer_features(item.session)
        self._audit(step, result)
        for session, event in deliveries:
            if isinstance(event, Verdict):
                self._begin_round(session)
                self._set_aside_unless_trusted(session)
        return deliveries


def _quarantine_message(drafter: Drafter) -> str:
    alarm = drafter.audit.alarm
    assert alarm is not None, "asked of drafters in quarantine alone"
    return f"the drafter does not draw from the distributions that it sends: {alarm.message}"
