"""The drafter without gRPC: sessions, links to verifiers, and delivery of drafted blocks."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from draftwire.drafting.strategies import load_strategy
from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftOption, DraftSession, Step, StepResult
from draftwire.engine.engine_service import EngineService
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place
from draftwire.errors import (
    DraftwireError,
    InvalidRequestError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    RoundOutcome,
    SendDrafted,
)
from draftwire.models.card import ModelCard
from draftwire.models.description import (
    DRAFT_AHEAD,
    FLUSH_REPLIES,
    ISSUED_IDENTITIES,
    NEEDS_FEATURES,
    PARTIAL_BLOCKS,
)
from draftwire.options.heads.feature_feeding import FeatureFeeding, FedStrategy
from draftwire.options.heads.features import FeatureNeed, FeatureRequest, SessionFeatures
from draftwire.options.structured_output.form_compiler_pool import FormCompilerPool
from draftwire.options.trees.session_trees import SessionTrees, TreeStrategy
from draftwire.requests.automaton import Automaton
from draftwire.runtime.settings import require
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_drafter.scheduler import Completed, Scheduler
from draftwire_drafter.strategy_context import ConfiguredContext

if TYPE_CHECKING:
    from draftwire.options.ahead.ahead_drafting import AheadDrafting

log = structlog.get_logger()

MAX_IDLE_LINKS = 64
"""Links to verifiers that are kept without a session, for the next one. Gateways may name any verifiers."""

_ADDRESS = re.compile(r"[!-~]{1,250}:[0-9]{1,5}")


class BlockLink(Protocol):
    """Connection to one verifier, for draft blocks."""

    @property
    def broken(self) -> bool:
        """Whether the connection was lost; a broken link stays broken."""

    @property
    def drafter_id(self) -> int:
        """Number of this drafter at the verifier: of the identity that it issued or, if it issues none, the instance
        id.
        """

    def push(self, block: DraftBlock) -> None:
        """Queues a block to be sent.

        Raises:
            UnavailableError: the link is broken.
        """

    def request_features(self, request: FeatureRequest) -> None:
        """Queues a request of features, which then come as long as the link is not broken. Raises as `push`."""

    async def close(self) -> None:
        """Closes the connection. The link is broken then, and nobody is told that it was lost."""


Connect = Callable[[str, ModelCard, Callable[[], None]], Awaitable[BlockLink]]
"""Opens a link to the verifier at an address, or raises a `DraftwireError`. The last argument is called once, on the
event loop, when the link breaks."""


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
        self._connect = connect
        self._links: dict[str, BlockLink] = {}
        self._connecting: dict[str, asyncio.Task[BlockLink]] = {}
        self._opening: dict[SessionKey, asyncio.Future[None]] = {}
        self._options: list[DraftOption] = []
        self._feeding: FeatureFeeding | None = None
        self._ahead: AheadDrafting | None = None

    def _load_engine(self) -> tuple[ModelCard, DraftEngine]:
        context = ConfiguredContext(self.config, self.group)
        loaded = load_strategy(self.config.drafts.strategy, context)
        self.kv_cache_tokens = context.kv_cache_tokens
        engine = DraftEngine(loaded.strategy, self._options)
        description = replace(loaded.card.description, capabilities=self._add_options(engine))
        description = replace(description, max_tree_nodes=self.config.engine.max_tree_nodes)
        return replace(loaded.card, description=description), engine

    def _add_options(self, engine: DraftEngine) -> frozenset[str]:
        """Adds the options of a strategy, and returns the drafter's capabilities."""
        strategy, max_tree_nodes = engine.strategy, self.config.engine.max_tree_nodes
        can_do = isinstance(strategy, TreeStrategy) or max_tree_nodes == 0
        require(can_do, "max_tree_nodes: the drafter's strategy drafts no token trees")
        can_draw = isinstance(strategy, TreeStrategy) and strategy.draws_trees
        self._options.append(SessionTrees(max_tree_nodes, can_draw=can_draw))
        capabilities = {FLUSH_REPLIES, ISSUED_IDENTITIES, PARTIAL_BLOCKS}
        if getattr(strategy, "can_fork", False):
            capabilities.add(DRAFT_AHEAD)
        if isinstance(strategy, FedStrategy):
            self._feeding = FeatureFeeding(strategy, engine.sequences)
            self._options.append(self._feeding)
            capabilities.add(NEEDS_FEATURES)
        return frozenset(capabilities)

    def _draft_ahead(self) -> "AheadDrafting | None":
        """Returns the option of drafting ahead, which is added when the first session asks for it; None if the strategy
        cannot.
        """
        strategy = self._engine.strategy
        if self._ahead is None and DRAFT_AHEAD in self.description.capabilities:
            from draftwire.options.ahead.ahead_drafting import AheadDrafting
            from draftwire.options.ahead.branch_drafter import ForkingStrategy

            assert isinstance(strategy, ForkingStrategy), "it says that it can fork"
            scheduler, count = self._scheduler, self.metrics.count_branches
            self._ahead = AheadDrafting(strategy, self._engine.sequences, scheduler, self._torch.post, count)
            self._options.append(self._ahead)
            scheduler.ahead = self._ahead
        return self._ahead

    def _make_scheduler(self, room: Room, pacer: PrefillPacer) -> Scheduler:
        return Scheduler(
            context_length=self.description.context_length,
            max_draft_tokens=self.config.engine.max_draft_tokens,
            room=room,
            pacer=pacer,
            options=self._options,
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
            self._draft_ahead()
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        if self.spans is not None:
            self.spans.open(spec)
        opened = self._opening[session.key] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(_retrieve)
        self._work.set()
        try:
            link = await self._link(spec.verifier_address)
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
        return None if self._feeding is None else self._feeding.need

    def _request_features(self, key: SessionKey) -> None:
        """Asks a session's verifier for features that are needed, now or soon."""
        session = self._scheduler.sessions.get(key)
        request = None if self._feeding is None or session is None else self._feeding.wanted(session)
        if session is None or request is None:
            return
        try:
            self._link_of(session).request_features(request)
        except UnavailableError as error:
            self._fail(key, error)

    def feed(self, address: str, features: SessionFeatures) -> None:
        """Takes features of a session of the verifier at an address; a message that was not asked for fails it."""
        session = self._scheduler.sessions.get((features.session_id, features.epoch))
        if session is None or session.spec.verifier_address != address:
            return
        try:
            if self._feeding is None:
                raise ProtocolViolationError("features that were not asked for, or of another size")
            if self._feeding.take(session, features):
                self._torch.post(self._feed, asyncio.get_running_loop(), self._feeding, session, features)
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
            if self._ahead is not None and (session is None or session.spec.verifier_address == address):
                self._ahead.learn(outcome)
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
        self._link_of(session).push(block)
        self.metrics.blocks_sent.inc()
        self.metrics.draft_tokens.inc(len(block.token_ids))

    def _link_of(self, session: DraftSession) -> BlockLink:
        """Returns the link to a session's verifier.

        Raises:
            UnavailableError: the gateway sent a calibration before the session was open.
        """
        link = self._links.get(session.spec.verifier_address)
        if link is None:
            raise UnavailableError(f"verifier at {session.spec.verifier_address} is not reached yet")
        return link

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

    async def _link(self, address: str) -> BlockLink:
        """Returns the link to a verifier; opens it if there is none or it is broken.

        Whoever asks while it is being opened awaits the same attempt, and fails with it: one after the other, each
        would wait for the timeouts of all before it.
        """
        link = self._links.get(address)
        if link is not None and not link.broken:
            return link
        connecting = self._connecting.get(address)
        if connecting is None:
            connecting = self._connecting[address] = asyncio.create_task(self._open_link(address))
            connecting.add_done_callback(_retrieve)
        return await asyncio.shield(connecting)  # the others still await it when one gives up

    async def _open_link(self, address: str) -> BlockLink:
        try:
            link = self._links[address] = await self._connect(address, self.card, lambda: self._on_link_lost(address))
        finally:
            del self._connecting[address]
        await self._close_idle_links()
        return link

    async def _close_idle_links(self) -> None:
        """Closes the oldest of the links that no session uses, if there are too many."""
        used = {session.spec.verifier_address for session in self._scheduler.sessions.values()}
        idle = [address for address in self._links if address not in used]
        for link in [self._links.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_LINKS)]]:
            await link.close()

    def _on_link_lost(self, address: str) -> None:
        """Fails the sessions of a lost verifier at once, so that no gateway waits for their blocks."""
        self._links.pop(address, None)
        for key in [session.key for session in self._scheduler.sessions.values()]:
            if self._scheduler.sessions[key].spec.verifier_address == address:
                self._fail(key, UnavailableError(f"verifier at {address} was lost"))


def _retrieve(opened: asyncio.Future[Any]) -> None:
    """Retrieves the exception, which nothing else awaits if the opening was given up, or failed for a second reason."""
    if not opened.cancelled():
        opened.exception()
