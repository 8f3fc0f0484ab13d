"""The drafter without gRPC: sessions, links to verifiers, and delivery of drafted blocks."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import replace

import structlog

from draftwire.drafting.strategies import load_strategy
from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftSession, Step, StepResult
from draftwire.engine.engine_service import EngineService
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place
from draftwire.errors import DraftwireError, InvalidRequestError, ProtocolViolationError, UnavailableError
from draftwire.method.rounds import BlockSent, Calibration, DraftBlock, DraftSessionSpec, RoundOutcome, SendDrafted
from draftwire.models.card import ModelCard
from draftwire.options.heads.feature_feeding import FeatureFeeding
from draftwire.options.heads.features import FeatureNeed, SessionFeatures
from draftwire.options.structured_output.form_compiler_pool import FormCompilerPool
from draftwire.requests.automaton import Automaton
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_drafter.scheduler import Completed, Scheduler
from draftwire_drafter.strategy_context import ConfiguredContext
from draftwire_drafter.strategy_options import StrategyOptions
from draftwire_drafter.verifier_links import Connect, VerifierLinks, retrieve

log = structlog.get_logger()

_ADDRESS = re.compile(r"[!-~]{1,250}:[0-9]{1,5}")


class DrafterCore(EngineService[Step, StepResult, BlockSent]):
    """Owns the draft model. All methods run on the event loop; tensors are touched on the torch thread only."""

    failure = "the drafter failed"
    config: DrafterConfig
    metrics: DrafterMetrics
    _scheduler: Scheduler
    _engine: DraftEngine

    def __init__(
        self, config: DrafterConfig, connect: Connect, place: Place | None = None, followers: Followers | None = None
    ) -> None:
        super().__init__(config, DrafterMetrics(), place, followers, FormCompilerPool.of)
        self._links = VerifierLinks(connect, self._used_verifiers, self._on_link_lost)
        self._opening: dict[SessionKey, asyncio.Future[None]] = {}
        self._options = StrategyOptions()

    def _load_engine(self) -> tuple[ModelCard, DraftEngine]:
        context = ConfiguredContext(self.config, self.group)
        loaded = load_strategy(self.config.drafts.strategy, context)
        self.kv_cache_tokens = context.kv_cache_tokens
        engine, max_tree_nodes = DraftEngine(loaded.strategy, self._options.added), self.config.engine.max_tree_nodes
        capabilities = self._options.add(engine, max_tree_nodes)
        description = replace(loaded.card.description, capabilities=capabilities, max_tree_nodes=max_tree_nodes)
        return replace(loaded.card, description=description), engine

    def _make_scheduler(self, room: Room, pacer: PrefillPacer) -> Scheduler:
        return Scheduler(
            context_length=self.description.context_length,
            max_draft_tokens=self.config.engine.max_draft_tokens,
            room=room,
            pacer=pacer,
            options=self._options.added,
        )

    async def open_session(self, spec: DraftSessionSpec, lease_id: int) -> int:
        """Opens a session and returns when its prefill is done and the link to its verifier is open.

        Returns:
            What the verifier knows this drafter by.

        Raises:
            ProtocolViolationError: the lease is unknown, or the session was closed while it opened.
            ModelMismatchError: the verifier has a different vocabulary.
            UnavailableError: the verifier could not be reached before the timeout.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open, too many forms are being compiled, or the KV cache is reserved.
        """
        automaton = await self._automaton(spec)
        self._leases.require(lease_id)
        if not _ADDRESS.fullmatch(spec.verifier_address):
            raise InvalidRequestError("verifier_address must be host:port, at most 256 letters, digits and signs")
        if spec.ahead is not None:
            self._options.draft_ahead(self._scheduler, self._torch.post, self.metrics.count_branches)
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        if self.spans is not None:
            self.spans.open(spec)
        opened = self._opening[session.key] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(retrieve)
        self._work.set()
        try:
            link = await self._links.reach(spec.verifier_address, self.card)
            await opened
            if not self._scheduler.is_open(session):
                raise ProtocolViolationError("session was closed while it opened")
            return link.drafter_id
        except BaseException:
            if self._scheduler.is_open(session):
                self.close_session(*session.key)
            raise
        finally:
            if self._opening.get(session.key) is opened:
                del self._opening[session.key]

    async def _automaton(self, spec: DraftSessionSpec) -> Automaton | None:
        """Returns the automaton of a session's structured output; None if the session has none.

        None also if the form cannot be compiled for this model: drafts that violate the form are then rejected.
        """
        try:
            return await self.compile_form(spec.parameters)
        except InvalidRequestError as error:
            log.warning("drafter.form_refused", session_id=spec.session_id, reason=str(error))
            return None

    def close_session(self, session_id: int, epoch: int) -> None:
        """Closes a session, if it is open, and frees its KV cache. If it is still opening, that call fails."""
        super().close_session(session_id, epoch)
        self._end_opening((session_id, epoch), ProtocolViolationError("session was closed while it opened"))

    def calibrate(self, calibration: Calibration) -> None:
        """Schedules a session's next block; a calibration that violates the protocol fails the session."""
        key = (calibration.fence.session_id, calibration.fence.epoch)
        try:
            self._scheduler.calibrate(calibration)
        except DraftwireError as error:
            self._fail(key, error)
        self._request_features(key)
        self._work.set()

    @property
    def need(self) -> FeatureNeed | None:
        """The features that verifiers have to send; None if none are needed. The model is loaded."""
        return None if self._options.feeding is None else self._options.feeding.need

    def _request_features(self, key: SessionKey) -> None:
        """Asks a session's verifier for features that are needed, now or soon."""
        session = self._scheduler.sessions.get(key)
        request = None if self._options.feeding is None or session is None else self._options.feeding.wanted(session)
        if session is None or request is None:
            return
        try:
            self._links.get(session.spec.verifier_address).request_features(request)
        except UnavailableError as error:
            self._fail(key, error)

    def feed(self, address: str, features: SessionFeatures) -> None:
        """Takes features of a session of the verifier at an address; a message that was not asked for fails it."""
        session = self._scheduler.sessions.get((features.session_id, features.epoch))
        if session is None or session.spec.verifier_address != address:
            return
        try:
            if self._options.feeding is None:
                raise ProtocolViolationError("features that were not asked for, or of another size")
            if self._options.feeding.take(session, features):
                self._torch.post(self._feed, asyncio.get_running_loop(), self._options.feeding, session, features)
                self._scheduler.resume(session)
            else:
                self._scheduler.dropped["stale"] += 1
        except ProtocolViolationError as error:
            self._fail(session.key, error)
        self._work.set()

    def _feed(
        self,
        loop: asyncio.AbstractEventLoop,
        feeding: FeatureFeeding,
        session: DraftSession,
        features: SessionFeatures,
    ) -> None:
        """Passes features to the strategy, on the torch thread. The session fails if that does: its blocks would wait
        for what is taken to be there.
        """
        try:
            feeding.feed(session.key, features)
        except Exception:
            log.exception("drafter.feed_failed", session_id=session.key[0])
            loop.call_soon_threadsafe(self._fail_session, session)

    def _fail_session(self, session: DraftSession) -> None:
        """Fails a session that the engine could not serve, unless it was closed meanwhile."""
        if self._scheduler.is_open(session):
            self._fail(session.key, UnavailableError(self.failure))

    def learn(self, address: str, outcomes: Iterable[RoundOutcome]) -> None:
        """Takes note of how rounds ended, of sessions of the verifier at an address, which tells it."""
        for outcome in outcomes:
            session = self._scheduler.sessions.get((outcome.fence.session_id, outcome.fence.epoch))
            if session is None or session.spec.verifier_address == address:
                self._scheduler.learn(outcome)
            if session is not None:
                self._request_features(session.key)
        self._work.set()

    def send_drafted(self, command: SendDrafted) -> None:
        """Ends the block that is being drafted and sends it as far as it is drawn, with a reply to the gateway."""
        if self._scheduler.send_drafted(command):
            self._reply(self._scheduler.sessions[command.session_id, command.epoch], command.round)

    def _complete(self, step: Step, result: StepResult) -> list[Completed]:
        self.metrics.count_step(len(step.items), result.calibration_s + result.draft_s)
        self.metrics.time(result, step.reads_prompts)
        all_completed = self._scheduler.complete(step, result)
        for completed in all_completed:
            if completed.is_opened:
                self._end_opening(completed.session.key)
                if completed.session.calibration is not None:  # it came early
                    self._request_features(completed.session.key)
            outcome = completed.outcome
            if isinstance(outcome, DraftBlock):
                try:
                    self._push(completed.session, outcome)
                    if completed.is_flushed:
                        self._reply(completed.session, outcome.fence.round)
                except UnavailableError as error:
                    outcome = error
            if isinstance(outcome, DraftwireError):
                self._fail(completed.session.key, outcome)
        return all_completed

    def _push(self, session: DraftSession, block: DraftBlock) -> None:
        self._links.get(session.spec.verifier_address).push(block)
        self.metrics.blocks_sent.inc()
        self.metrics.draft_tokens.inc(len(block.token_ids))

    def _reply(self, session: DraftSession, number: int) -> None:
        """Tells the gateway that the block of a round is on its way."""
        self._leases.send(session.lease_id, BlockSent(*session.key, number))

    def _fail(self, key: SessionKey, error: Exception) -> None:
        session = self._scheduler.sessions.get(key)
        if session is not None:
            reason = str(error) if isinstance(error, DraftwireError) else type(error).__name__
            log.warning("drafter.session_failed", session_id=key[0], request_id=session.request_id, reason=reason)
            self._end_opening(key, error)
        super()._fail(key, error)

    def _end_opening(self, key: SessionKey, error: Exception | None = None) -> None:
        """Completes a pending `open_session`, with an error if one is given."""
        opening = self._opening.get(key)
        if opening is None or opening.done():
            return
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    def _used_verifiers(self) -> set[str]:
        """Returns the addresses of the verifiers that open sessions have."""
        return {session.spec.verifier_address for session in self._scheduler.sessions.values()}

    def _on_link_lost(self, address: str) -> None:
        """Fails the sessions of a lost verifier at once, so that no gateway waits for their blocks."""
        for key in [session.key for session in self._scheduler.sessions.values()]:
            if self._scheduler.sessions[key].spec.verifier_address == address:
                self._fail(key, UnavailableError(f"verifier at {address} was lost"))
