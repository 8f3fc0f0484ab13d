"""The drafter without its edge: leases, sessions, links to verifiers, and the loop that drafts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog
import torch

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import DraftRequest
from draftwire.errors import DraftwireError, ProtocolViolationError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire.models.loading import LoadedModel, load_model
from draftwire.randomness import KEY_BYTES, DrawKey
from draftwire.rounds import Calibration, DraftBlock, DraftSessionSpec
from draftwire.sampling import SamplingParams
from draftwire.services.drafter.config import DrafterConfig
from draftwire.services.drafter.engine import DraftEngine
from draftwire.services.drafter.scheduler import DraftSession, Scheduler, Step
from draftwire.services.leases import Leases, SessionFailed, SessionKey
from draftwire.services.metrics import DrafterMetrics
from draftwire.services.outbox import Outbox
from draftwire.services.torch_thread import TorchThread

log = structlog.get_logger()


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


Connect = Callable[[str, LoadedModel], Awaitable[BlockLink]]
"""Opens a link to the verifier at an address, or raises why it cannot be used."""


class DrafterCore:
    """Owns the draft model. All methods run on the event loop; tensors are touched on the torch thread only."""

    def __init__(self, config: DrafterConfig, connect: Connect) -> None:
        """Prepares; `start` loads the model."""
        self.config = config
        self.metrics = DrafterMetrics()
        self.loaded: LoadedModel
        self._connect = connect
        self._scheduler: Scheduler
        self._engine: DraftEngine
        self._torch = TorchThread()
        self._leases = Leases[SessionFailed]()
        self._links: dict[str, BlockLink] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._opening: dict[SessionKey, asyncio.Future[None]] = {}
        self._work = asyncio.Event()

    @property
    def description(self) -> ModelDescription:
        """The loaded model."""
        return self.loaded.description

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._scheduler.sessions)

    async def start(self) -> None:
        """Loads and warms the model."""
        self.loaded, self._engine = await self._torch.run(self._load)
        self._scheduler = Scheduler(
            context_length=self.description.context_length,
            max_sessions=self.config.max_sessions,
            max_draft_tokens=self.config.max_draft_tokens,
        )
        self.metrics.watch(lambda: self.num_sessions, self._scheduler.dropped)

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

    async def open_session(self, spec: DraftSessionSpec, lease_id: int) -> None:
        """Opens a session and returns when its prompt is read and its verifier is reached.

        Raises:
            ProtocolViolationError: unknown lease, or closed while opening.
            ModelMismatchError: the verifier's vocabulary is another one.
            UnavailableError: the verifier was not reached in time.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open, or the prompt leaves no room to draft in.
        """
        self._leases.require(lease_id)
        session = self._scheduler.open(spec, lease_id)
        opened = self._opening[session.key] = asyncio.get_running_loop().create_future()
        self._work.set()
        try:
            await self._link(spec.verifier_address)
            await opened
        except BaseException:
            del self._opening[session.key]
            self.close_session(*session.key)
            raise
        del self._opening[session.key]

    def close_session(self, session_id: int, epoch: int) -> None:
        """Ends a session, if it is open, and frees its sequence."""
        session = self._scheduler.close(session_id, epoch)
        if session is not None:
            self._torch.post(self._engine.forget, session.key)
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

    async def run_steps(self) -> None:
        """Drafts for ever."""
        while True:
            step = self._scheduler.next_step()
            if step is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                await self._run_step(step)
            except Exception as error:
                if not isinstance(error, DraftwireError):
                    log.exception("drafter.step_failed", session_id=step.session.spec.session_id)
                failure = error if isinstance(error, DraftwireError) else UnavailableError("the drafter failed")
                self._fail(step.session.key, failure)

    async def _run_step(self, step: Step) -> None:
        session = step.session
        if step.calibration is None:
            await self._torch.run(self._engine.read_prompt, step)
            opening = self._opening.get(session.key)
            if opening is not None and not opening.done():
                opening.set_result(None)
        else:
            block = await self._torch.run(self._engine.draft, step)
            if self._scheduler.is_open(session):
                self._push(session, block)
        if not self._scheduler.is_open(session):  # closed during the step: what the step made goes too
            self._torch.post(self._engine.forget, session.key)

    def _push(self, session: DraftSession, block: DraftBlock) -> None:
        self._links[session.spec.verifier_address].push(block)
        self.metrics.blocks_sent.inc()
        self.metrics.draft_tokens.inc(len(block.token_ids))

    def _fail(self, key: SessionKey, error: Exception) -> None:
        session = self._scheduler.sessions.get(key)
        if session is not None:
            log.warning("drafter.session_failed", session_id=key[0], reason=str(error))
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
                link = self._links[address] = await self._connect(address, self.loaded)
            return link

    def _load(self) -> tuple[LoadedModel, DraftEngine]:
        settings = self.config.loading
        torch.set_num_threads(settings.threads)
        loaded = load_model(settings.model, settings.dtype, settings.device, settings.revision)
        substitute = loaded.description.stop_token_ids[0] if loaded.description.stop_token_ids else 0
        strategy = LanguageModelDrafter(loaded.model, loaded.description.context_length, substitute)
        warm_up = strategy.new_sequence()
        warm_up.calibrate(0, [0] * 4)
        warm_up.draft(DraftRequest(2, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), strategy.vocab_size))
        return loaded, DraftEngine(strategy)
