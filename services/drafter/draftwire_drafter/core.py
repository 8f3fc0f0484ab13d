"""The drafter without its edge: leases, sessions, links to verifiers, and the loop that drafts."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from draftwire.engine.admission import Room
from draftwire.engine.leases import Leases, SessionFailed, SessionKey
from draftwire.engine.model_loading import Drafter, drafter_of, load_drafter
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import (
    DraftwireError,
    GroupLostError,
    InvalidRequestError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.rounds import Calibration, DraftBlock, DraftSessionSpec, SendDrafted
from draftwire.models.description import ModelDescription
from draftwire.models.loading import ModelCard
from draftwire.requests.automaton import Automaton
from draftwire.runtime.forms import Forms
from draftwire.runtime.outbox import Outbox
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_drafter.scheduler import DraftSession, Scheduler, Step
from draftwire_drafter.spans import DrafterSpans

log = structlog.get_logger()

_ADDRESS = re.compile(r"[!-~]{1,250}:[0-9]{1,5}")


class BlockLink(Protocol):
    """The way to one verifier."""

    @property
    def broken(self) -> bool:
        """Whether the verifier was lost; a broken link stays broken."""

    def push(self, block: DraftBlock) -> None:
        """Sends a block without waiting.

        Raises:
            UnavailableError: the link is broken.
        """


Connect = Callable[[str, ModelCard, Callable[[], None]], Awaitable[BlockLink]]
"""Opens a link to the verifier at an address, or raises why it cannot be used. What it is given last is called once, on
the event loop, when the link breaks."""


class DrafterCore:
    """Owns the draft model. All methods run on the event loop; tensors are touched on the torch thread only."""

    def __init__(
        self, config: DrafterConfig, connect: Connect, place: Place | None = None, followers: Followers | None = None
    ) -> None:
        """Prepares; `start` loads the model.

        Args:
            config: what can be set.
            connect: opens links to verifiers.
            place: as `GroupGuard`.
            followers: as `GroupGuard`.
        """
        self.config = config
        self.metrics = DrafterMetrics()
        self.spans: DrafterSpans | None = None
        """Records the traced sessions; None records none. Set before the first session."""
        self.card: ModelCard
        self._connect = connect
        self._scheduler: Scheduler
        self._engine: DraftEngine
        self._forms: Forms
        self._torch = TorchThread()
        self.group = GroupGuard(config.wanted_group, self._torch, place, followers)
        self._leases = Leases[SessionFailed]()
        self._links: dict[str, BlockLink] = {}
        self._connecting = WeakValueDictionary[str, asyncio.Lock]()
        self._opening: dict[SessionKey, asyncio.Future[None]] = {}
        self._work = asyncio.Event()

    @property
    def description(self) -> ModelDescription:
        """The loaded model."""
        return self.card.description

    @property
    def instance_id(self) -> int:
        """Names this process."""
        return self._leases.instance_id

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._scheduler.sessions)

    async def start(self) -> None:
        """Loads and warms the model.

        Raises:
            GroupLostError: another rank ended.
        """
        await self.group.start(self._load())

    async def _load(self) -> None:
        settings = self.config.engine
        drafter = await self._torch.run(self._load_drafter)
        self.card = drafter.card
        self._engine = DraftEngine(drafter.strategy)
        self._forms = Forms(await asyncio.to_thread(self.card.form_compiler))
        self._scheduler = Scheduler(
            context_length=self.description.context_length,
            max_draft_tokens=settings.max_draft_tokens,
            room=Room(settings.max_sessions, settings.kv_cache_tokens),
            pacer=PrefillPacer(settings.max_added_latency_ms / 1e3),
        )
        for num_tokens, seconds in await self._torch.run(self._engine.warm_up):
            self._scheduler.pacer.learn(num_tokens, 0, seconds)
        self.metrics.watch(self._scheduler, self.description.name)

    def _load_drafter(self) -> Drafter:
        config, quantization = self.config, self.config.drafts.quantization
        if self.group.place.size == 1:
            return load_drafter(config.loading, config.engine, quantization, config.layers)
        from draftwire.engine.ranks.draft_rank import load_rank
        from draftwire.engine.ranks.group_model import GroupModel

        rank = load_rank(RankConfig.of(config, self.group.place))
        model = GroupModel(rank, "drafter")
        self.group.take(model)
        return drafter_of(rank.card, model, config.engine, quantization, config.layers.bonus_calibration)

    def busy_s(self) -> float:
        """Returns for how many seconds the model's current call has run; 0 where none runs."""
        return self._torch.busy_s()

    def stop(self) -> None:
        """Stops the torch thread after the running step."""
        self._torch.stop()

    def open_lease(self) -> tuple[int, Outbox[SessionFailed]]:
        """Returns a new lease and the outbox that its sessions' failures go to."""
        return self._leases.open()

    def end_lease(self, lease_id: int) -> None:
        """Ends a lease and all sessions under it."""
        self._leases.end(lease_id)
        for session in self._scheduler.of_lease(lease_id):
            self.close_session(*session.key)

    def is_for(self, lease_id: int, key: SessionKey) -> bool:
        """Whether a command of a stream is carried out: not if it is for an open session of another stream."""
        session = self._scheduler.sessions.get(key)
        if session is None or session.lease_id == lease_id:
            return True
        self._scheduler.dropped["other_lease"] += 1
        return False

    async def open_session(self, spec: DraftSessionSpec, lease_id: int) -> None:
        """Opens a session and returns when its prompt is read and its verifier is reached.

        Raises:
            ProtocolViolationError: unknown lease, or closed while opening.
            ModelMismatchError: the verifier's vocabulary is another one.
            UnavailableError: the verifier was not reached in time.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open or forms are read, or the prompt leaves no room to draft in.
        """
        automaton = await self._automaton(spec)
        self._leases.require(lease_id)
        if not _ADDRESS.fullmatch(spec.verifier_address):
            raise InvalidRequestError("verifier_address must be host:port, at most 256 letters, digits and signs")
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        if self.spans is not None:
            self.spans.open(spec)
        opened = self._opening[session.key] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(_retrieve)
        self._work.set()
        try:
            await self._link(spec.verifier_address)
            await opened
            if self._scheduler.sessions.get(session.key) is not session:
                raise ProtocolViolationError("session was closed while it opened")
        except BaseException:
            if self._scheduler.sessions.get(session.key) is session:
                self.close_session(*session.key)
            raise
        finally:
            if self._opening.get(session.key) is opened:
                del self._opening[session.key]

    async def _automaton(self, spec: DraftSessionSpec) -> Automaton | None:
        """Returns what follows the form of a session's text; None if there is none.

        None also if this model cannot follow it: then drafts break it here and there, and are rejected.
        """
        if spec.sampling.structured_output is None:
            return None
        try:
            return await self._forms.compile(spec.sampling.structured_output)
        except InvalidRequestError as error:
            log.warning("drafter.form_refused", session_id=spec.session_id, reason=str(error))
            return None

    def close_session(self, session_id: int, epoch: int) -> None:
        """Ends a session, if it is open, and frees its sequence."""
        session = self._scheduler.close(session_id, epoch)
        if session is not None:
            self._torch.post(self._engine.forget, session.key)
            if self.spans is not None:
                self.spans.close(session.key)
            opening = self._opening.get(session.key)
            if opening is not None and not opening.done():
                opening.set_exception(ProtocolViolationError("session was closed while it opened"))

    def calibrate(self, calibration: Calibration) -> None:
        """Schedules a session's next block; a message that does not fit ends the session."""
        try:
            self._scheduler.calibrate(calibration)
        except DraftwireError as error:
            self._fail((calibration.fence.session_id, calibration.fence.epoch), error)
        self._work.set()

    def send_drafted(self, command: SendDrafted) -> None:
        """Has a block under way sent as far as it is drawn."""
        self._scheduler.send_drafted(command)

    async def run(self) -> None:
        """Drafts until it is cancelled, and then lets the other ranks go.

        Raises:
            GroupLostError: another rank ended, hangs, or is out of step with this one. All sessions have been told.
        """
        await self.group.run(self.run_steps(), self.config.engine.watchdog_s, self._fail_all)

    async def run_steps(self) -> None:
        """Drafts for ever."""
        while True:
            step = self._scheduler.next_step()
            if step is None:
                self._work.clear()
                await self.group.wait(self._work)
                continue
            await self._run_step(step)

    async def _run_step(self, step: Step) -> None:
        started_at = time.perf_counter()
        try:
            result = await self._torch.run(self._engine.step, step)
        except GroupLostError:
            raise
        except Exception as error:
            log.exception("drafter.step_failed", num_sessions=len(step.items))
            failure = error if isinstance(error, DraftwireError) else UnavailableError("the drafter failed")
            for item in step.items:
                if self._scheduler.sessions.get(item.session.key) is item.session:  # not closed meanwhile
                    self._fail(item.session.key, failure)
            return
        ended_at = time.perf_counter()
        self.metrics.count_step(len(step.items), result.calibration_s + result.draft_s)
        self.metrics.time(result, step.reads_prompts)
        all_completed = self._scheduler.complete(step, result)
        for completed in all_completed:
            if completed.is_opened:
                opening = self._opening.get(completed.session.key)
                if opening is not None and not opening.done():
                    opening.set_result(None)
            outcome = completed.outcome
            if isinstance(outcome, DraftBlock):
                try:
                    self._push(completed.session, outcome)
                except UnavailableError as error:
                    outcome = error
            if isinstance(outcome, DraftwireError):
                self._fail(completed.session.key, outcome)
        if self.spans is not None:  # after the blocks have left and the next step has begun
            asyncio.get_running_loop().call_soon(self.spans.add, step, all_completed, started_at, ended_at)

    def _push(self, session: DraftSession, block: DraftBlock) -> None:
        link = self._links.get(session.spec.verifier_address)
        if link is None:  # calibrated before the session was open
            raise UnavailableError(f"verifier at {session.spec.verifier_address} is not reached yet")
        link.push(block)
        self.metrics.blocks_sent.inc()
        self.metrics.draft_tokens.inc(len(block.token_ids))

    def _fail_all(self, error: GroupLostError) -> int:
        """Tells all sessions, so that their gateways go on without them, and returns how many there were."""
        keys = list(self._scheduler.sessions)
        for key in keys:
            self._fail(key, error)
        return len(keys)

    def _fail(self, key: SessionKey, error: Exception) -> None:
        session = self._scheduler.sessions.get(key)
        if session is not None:
            reason = str(error) if isinstance(error, DraftwireError) else type(error).__name__
            log.warning("drafter.session_failed", session_id=key[0], reason=reason)
            opening = self._opening.get(key)
            if opening is not None and not opening.done():
                opening.set_exception(error)
            self.close_session(*key)
            self._leases.send(session.lease_id, SessionFailed(*key, error))

    async def _link(self, address: str) -> BlockLink:
        """Returns the link to a verifier, opened once and again after it broke."""
        async with self._connecting.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or link.broken:
                link = self._links[address] = await self._connect(address, self.card, lambda: self._lose(address))
            return link

    def _lose(self, address: str) -> None:
        """Fails the sessions of a verifier that was lost, at once: nobody waits for their blocks in vain."""
        self._links.pop(address, None)
        for key in [session.key for session in self._scheduler.sessions.values()]:
            if self._scheduler.sessions[key].spec.verifier_address == address:
                self._fail(key, UnavailableError(f"verifier at {address} was lost"))


def _retrieve(opened: asyncio.Future[None]) -> None:
    """Looks at why an opening failed, which nobody else does if it failed for two reasons."""
    if not opened.cancelled():
        opened.exception()
