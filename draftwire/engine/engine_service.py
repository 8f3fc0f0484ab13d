"""Base class of drafter and verifier: sessions under leases, an engine on its own thread, the loop that runs steps."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import structlog

from draftwire.engine.admission import Room
from draftwire.engine.engine_metrics import EngineMetrics
from draftwire.engine.leases import Leases, SessionFailed, SessionKey
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place
from draftwire.engine.ranks.rank_config import ServiceConfig
from draftwire.engine.session_book import SessionBook, Step
from draftwire.engine.step_engine import Result, StepEngine
from draftwire.engine.torch_thread import TorchThread
from draftwire.engine.traced_sessions import TracedSessions
from draftwire.errors import DraftwireError, GroupLostError, UnavailableError
from draftwire.models.card import ModelCard
from draftwire.models.description import ModelDescription, WarmUpStep
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import TextForm
from draftwire.requests.session_parameters import SessionParameters
from draftwire.runtime.call_limits import StreamUse
from draftwire.runtime.outbox import Outbox

log = structlog.get_logger()

Event = TypeVar("Event")


class FormCompilation(Protocol):
    """Compiles forms of texts for one model. Used on the event loop."""

    async def compile(self, form: TextForm, generated_ids: Sequence[int] = (), memory_bytes: int = 0) -> Automaton:
        """Returns the automaton of a form, advanced over the text so far.

        Args:
            form: what the text has to match.
            generated_ids: the text so far.
            memory_bytes: what a peer has measured that compiling the form takes; 0 if none has.

        Raises:
            InvalidRequestError: the form is not supported, or the text so far violates it.
            NoRoomError: too many forms are being compiled, or are open.
        """

    def stop(self) -> None:
        """Ends it. Nothing waits for a form that is being compiled."""


class EngineService(ABC, Generic[Step, Result, Event]):
    """Owns an engine. All methods run on the event loop; tensors are touched on the torch thread only.

    A service adds how sessions are opened, the messages for them, and how the result of a step is committed and sent.
    """

    failure: ClassVar[str]
    """Message that gateways receive when a step fails unexpectedly: a library's own message might quote a prompt."""

    def __init__(
        self,
        config: ServiceConfig,
        metrics: EngineMetrics,
        place: Place | None,
        followers: Followers | None,
        make_forms: Callable[[ModelCard], FormCompilation],
    ) -> None:
        """Prepares; `start` loads the model. `make_forms` returns what compiles the forms of a model's texts, and is
        called on a thread; for `place` and `followers` see `GroupGuard`.
        """
        self.config = config
        self.kv_cache_tokens = 0
        """Size of the KV cache, which is known once the model is loaded, tokens."""
        self.metrics = metrics
        self._make_forms = make_forms
        self.spans: TracedSessions | None = None
        """Records the traced sessions; None records none. Set before the first session."""
        self.card: ModelCard
        self._scheduler: SessionBook[Any, Step]
        self._engine: StepEngine[Step, Result]
        self._forms: FormCompilation | None = None
        self._torch = TorchThread()
        self.group = GroupGuard(config.wanted_group, self._torch, place, followers)
        self._leases = Leases[Event | SessionFailed]()
        self._work = asyncio.Event()

    @abstractmethod
    def _load_engine(self) -> tuple[ModelCard, StepEngine[Step, Result]]:
        """Loads the model, on the torch thread, and sets `kv_cache_tokens`.

        A model that several ranks share is passed to `group.take` as well.
        """

    @abstractmethod
    def _make_scheduler(self, room: Room, pacer: PrefillPacer) -> SessionBook[Any, Step]:
        """Makes the scheduler, once the model is loaded."""

    @abstractmethod
    def _complete(self, step: Step, result: Result) -> Any:
        """Commits the result of a step, sends the events, and returns what `spans` is to record."""

    @property
    def description(self) -> ModelDescription:
        """The loaded model."""
        return self.card.description

    @property
    def instance_id(self) -> int:
        """Random id of this process."""
        return self._leases.instance_id

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._scheduler.sessions)

    async def start(self) -> None:
        """Loads the model and warms it up.

        Raises:
            GroupLostError: another rank exited.
        """
        await self.group.start(self._load())

    async def _load(self) -> None:
        settings = self.config.engine
        self.card, self._engine = await self._torch.run(self._load_engine)
        self._forms = await asyncio.to_thread(self._make_forms, self.card)
        pacer = PrefillPacer(settings.max_added_latency_ms / 1e3)
        self._scheduler = self._make_scheduler(self._engine.room(settings.max_sessions, self.kv_cache_tokens), pacer)
        costs = await self._torch.run(self._engine.warm_up)
        for num_tokens, seconds in costs:
            pacer.learn(num_tokens, 0, seconds)
        steps = tuple(WarmUpStep(num_tokens, max(1, round(seconds * 1e6))) for num_tokens, seconds in costs)
        self.card = replace(self.card, description=replace(self.description, warm_up_steps=steps))
        self.metrics.watch(self._scheduler, self.description.name, self.description.dtype)

    def busy_s(self) -> float:
        """Returns for how many seconds the current call on the torch thread has run; 0 if none runs."""
        return self._torch.busy_s()

    def stop(self) -> None:
        """Stops the torch thread after the running step, and what compiles forms."""
        self._torch.stop()
        if self._forms is not None:
            self._forms.stop()

    async def compile_form(self, parameters: SessionParameters, generated_ids: Sequence[int] = ()) -> Automaton | None:
        """Returns the automaton of a session's structured output, advanced over its text so far; None if it has none.

        Raises:
            InvalidRequestError: the form is not supported, or the text so far violates it.
            NoRoomError: too many forms are being compiled, or are open.
        """
        form = parameters.sampling.structured_output
        if form is None:
            return None
        assert self._forms is not None, "sessions are opened once the model is loaded"
        return await self._forms.compile(form, generated_ids, parameters.form_memory_bytes)

    def open_lease(self) -> tuple[int, Outbox[Event | SessionFailed]]:
        """Returns the id of a new lease and the outbox that receives its sessions' events."""
        return self._leases.open()

    def end_lease(self, lease_id: int) -> None:
        """Ends a lease and all sessions under it."""
        self._leases.end(lease_id)
        for session in self._scheduler.of_lease(lease_id):
            self.close_session(*session.key)

    def use_of(self, lease_id: int) -> StreamUse:
        """Returns what the stream of a lease is used for."""
        if self._scheduler.of_lease(lease_id):
            return StreamUse.PRESENT
        return StreamUse.PAST if self._leases.is_used(lease_id) else StreamUse.NONE

    def is_for(self, lease_id: int, key: SessionKey) -> bool:
        """Whether a stream may command a session: false, and counted, if the session is open under another lease."""
        session = self._scheduler.sessions.get(key)
        if session is None or session.lease_id == lease_id:
            return True
        self._scheduler.dropped["other_lease"] += 1
        return False

    def close_session(self, session_id: int, epoch: int) -> None:
        """Closes a session, if it is open, and frees its KV cache."""
        session = self._scheduler.close(session_id, epoch)
        if session is not None:
            self._torch.post(self._engine.forget, session.key)
            self._work.set()  # a step may wait for it
            if self.spans is not None:
                self.spans.close(session.key)

    async def run(self) -> None:
        """Runs steps until it is cancelled, and then stops the other ranks.

        Raises:
            GroupLostError: another rank exited, hangs, or is out of step with this one. All sessions have been failed.
        """
        await self.group.run(self.run_steps(), self.config.engine.watchdog_s, self._fail_all)

    async def run_steps(self) -> None:
        """Runs steps until it is cancelled."""
        while True:
            step = self._scheduler.next_step()
            if step is None:
                self._work.clear()
                if not (self._engine.is_prepared or self._scheduler.sessions):
                    await self._torch.run(self._engine.prepare)
                    continue
                await self.group.wait(self._work, self._scheduler.holds_for_s)
                continue
            await self._run_step(step)

    async def _run_step(self, step: Step) -> None:
        started_at = time.perf_counter()
        try:
            result = await self._torch.run(self._engine.step, step)
        except GroupLostError:
            raise
        except Exception as error:
            log.exception(f"{self.config.wanted_group.service}.step_failed", num_sessions=len(step.items))
            self._scheduler.abandon(step)
            failure = error if isinstance(error, DraftwireError) else UnavailableError(self.failure)
            for item in step.items:
                if self._scheduler.is_open(item.session):  # not closed meanwhile
                    self._fail(item.session.key, failure)
            return
        ended_at = time.perf_counter()
        completed = self._complete(step, result)
        if self.spans is not None:  # later, so that recording delays neither the events nor the next step
            asyncio.get_running_loop().call_soon(self.spans.add, step, completed, started_at, ended_at)

    def _fail_all(self, error: GroupLostError) -> int:
        """Fails all sessions, so that their gateways move on, and returns how many there were."""
        keys = list(self._scheduler.sessions)
        for key in keys:
            self._fail(key, error)
        return len(keys)

    def _fail(self, key: SessionKey, error: Exception) -> None:
        """Closes a session, if it is open, and sends its gateway the error."""
        session = self._scheduler.sessions.get(key)
        if session is not None:
            self.close_session(*key)
            self._leases.send(session.lease_id, SessionFailed(*key, error))
