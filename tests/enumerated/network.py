"""A gateway, verifiers and drafters, which are the services' own code, joined by links in virtual time.

What is real: the gateway's loop, its seats and what they choose by; the cores of drafter and verifier with their
schedulers, engines and rules; the messages, as bytes. What is not: gRPC, the clock, the thread of a model, and the
models, which are tables. Time passes only where a link or a pass takes time, so that a run depends on random numbers
alone, and all of them can be enumerated: see `tests.enumerated.intervals`.
"""

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest import mock

from enumeration import FAILED
from torch import Tensor
from virtual_time import VirtualTimeLoop

from draftwire.engine import engine_service
from draftwire.engine.leases import SessionFailed
from draftwire.engine.own_sources import own_sources
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.step_drafts import OrderedSource
from draftwire.engine.target_session import TargetSession
from draftwire.errors import CompletionInterruptedError, UnavailableError
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftBlock,
    DraftSessionSpec,
    PlainRun,
    PromptRead,
    RoundOutcome,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.models.card import ModelCard
from draftwire.models.description import ModelDescription
from draftwire.options.model_free.local_texts import LocalText
from draftwire.options.model_free.registry import TextDrafters
from draftwire.options.structured_output.grammar_automaton import FormCompiler
from draftwire.options.trees.tree_model_drafter import TreeModelDrafter
from draftwire.runtime import messages
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.v1 import drafter_pb2, session_pb2, verifier_pb2
from draftwire.verification import RULES
from draftwire.verification.rule import facts_of
from draftwire_drafter import core as drafter_core
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_drafter.strategy_options import StrategyOptions
from draftwire_gateway.options.mask_allowance import MaskAllowance
from draftwire_gateway.session.committed_text import Delta, Finish
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost, Inbox, SessionEvent, TargetLost
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate
from draftwire_gateway.session.session_option import SessionOption
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.session_plugs import options_of, plugs_of
from draftwire_gateway.speculation.pairs import Pairs
from draftwire_gateway.text.text import TextStream
from draftwire_verifier import core as verifier_core
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.drafter_peers import BlockRefused
from draftwire_verifier.drafters import Greeting
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.local_sources import LocalSources
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.target_loader import LoadedEngine
from tests.enumerated.tables import CACHE_TOKENS, POSITIONS, PlacedTable, Speed

LETTERS = "abcd"
SETTINGS = EngineSettings(kv_cache_tokens=CACHE_TOKENS, max_draft_tokens=8, max_tree_nodes=8)
SMALLEST_STEP_S = 1e-9
"""Between messages of a link, which stay in order."""

Ids = tuple[int, ...]


class StepThread:
    """Stands for a `TorchThread`: what it runs may let virtual time pass, during which the event loop goes on."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = deque()
        self._is_running = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._seconds = 0.0
        self._is_over = False
        self.until: Callable[[float], float] = lambda now: now
        """Returns until when the process is frozen; now if it is not."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(lambda: function(*args, **kwargs), future)
        return await future

    def post(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._put(lambda: function(*args, **kwargs), None)

    def wait(self, seconds: float) -> None:
        """Lets time pass; on the thread."""
        self._seconds = seconds
        self._paused.release()
        self._go.acquire()
        if self._is_over:
            raise SystemExit

    def stop(self) -> None:
        """Ends the function that lets time pass, if one does."""
        self._is_over = True
        self._go.release()

    def busy_s(self) -> float:
        return 0.0

    def _put(self, function: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        self._queue.append((function, future))
        if not self._is_running:
            self._is_running = True
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._is_running = False
            return
        function, future = self._queue.popleft()
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)
                outcome.append(error)
            self._paused.release()

        threading.Thread(target=work, daemon=True).start()
        self._go_on(outcome, future)

    def _go_on(self, outcome: list[Any], future: asyncio.Future[Any] | None) -> None:
        """Waits for the function to end, or to let time pass."""
        self._paused.acquire()
        loop = asyncio.get_running_loop()
        if not outcome:
            now = loop.time()
            at = self.until(now + self._seconds)
            loop.call_at(max(now, at), self._resume, outcome, future)
            return
        if future is None:
            assert len(outcome) == 1, outcome[0]
        elif not future.done():
            if len(outcome) == 2:
                future.set_exception(outcome[0])
            else:
                future.set_result(outcome[0])
        loop.call_soon(self._next)

    def _resume(self, outcome: list[Any], future: asyncio.Future[Any] | None) -> None:
        self._go.release()
        self._go_on(outcome, future)


class Link:
    """One direction of a connection: delivers messages in order, after a delay, once its receiver is not frozen."""

    def __init__(self, seen: Counter[str], delay_s: float, until: Callable[[float], float]) -> None:
        self._seen, self._delay_s, self._until = seen, delay_s, until
        self._last_at = 0.0
        self._cut_at = math.inf

    def send(self, name: str, message: Any, decode: Callable[[bytes], Any], deliver: Callable[[Any], Any]) -> None:
        """Sends a message as bytes; it is decoded where it is delivered."""
        loop = asyncio.get_running_loop()
        arrives_at = loop.time() + self._delay_s
        self._last_at = max(self._until(arrives_at), self._last_at + SMALLEST_STEP_S)
        self._seen[name] += self._cut_at == math.inf
        data = message.SerializeToString()
        loop.call_at(self._last_at, lambda: deliver(decode(data)) if arrives_at <= self._cut_at else None)

    def cut(self) -> None:
        """Loses what is on the way, and all that is sent from now on. What a frozen receiver has got stays."""
        self._cut_at = asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Times:
    """What takes time, seconds."""

    target: Speed = field(default_factory=lambda: Speed(0.010))
    drafter: Speed = field(default_factory=lambda: Speed(0.001))
    to_gateway_s: float = 0.002
    """Between the gateway and any service, one way."""
    to_verifier_s: float = 0.001
    """Between drafter and verifier, one way."""
    from_drafter_s: float = 0.002
    """From drafter to gateway."""


class TextTokenizer:
    """One letter for each token."""

    all_special_ids = ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - as in transformers

    def get_vocab(self) -> dict[str, int]:
        return {letter: token for token, letter in enumerate(LETTERS)}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in ids)


@cache
def _metrics(kind: type[Any]) -> Any:
    """Making metrics takes longer than a run."""
    return kind()


def describe(name: str, vocab_size: int, context_length: int = POSITIONS - 1) -> ModelDescription:
    return ModelDescription(name, "", "float64", b"", vocab_size, context_length, ())


class _VirtualService:
    """What both cores do otherwise than the services: they load no weights and start no processes, and the gateway
    reaches them by links.
    """

    compiler: FormCompiler | None = None

    async def _load(self: Any) -> None:
        self.card, self._engine = self._load_engine()
        self.kv_cache_tokens = CACHE_TOKENS
        pacer = PrefillPacer(10.0)
        pacer.learn(64, 0, 0.001)
        self._scheduler = self._make_scheduler(self._engine.room(8, CACHE_TOKENS), pacer)

    async def compile_form(self: Any, parameters: Any, generated_ids: Sequence[int] = ()) -> Any:
        form = parameters.sampling.structured_output
        if form is None or self.compiler is None:
            return None
        automaton = self.compiler.compile(form)
        assert not generated_ids, "no text with a form is moved here"
        return automaton

    def close(self: Any, session_id: int, epoch: int) -> None:
        self.inboxes.pop((session_id, epoch), None)
        message = session_pb2.CloseSession(session_id=session_id, epoch=epoch)
        self.from_gateway.send("close", message, session_pb2.CloseSession.FromString, self._close)

    def _close(self: Any, message: session_pb2.CloseSession) -> None:
        self.close_session(message.session_id, message.epoch)

    def _deliver(self: Any, key: tuple[int, int], event: SessionEvent) -> None:
        inbox = self.inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(event)
        if isinstance(event, TargetLost | DrafterLost):
            self.inboxes.pop(key, None)


class VirtualVerifier(_VirtualService, VerifierCore):
    """A verifier's core with a table, and its side of the links."""

    def __init__(self, network: "Network", address: str) -> None:
        self.network, self.address = network, address
        self.zone: str | None = None
        self.connected = True
        super().__init__(VerifierConfig(ModelSettings("table"), engine=SETTINGS))
        self.inboxes: dict[tuple[int, int], Inbox] = {}

    def _load_engine(self) -> Any:
        network = self.network
        self._rules = dict(RULES)
        model = PlacedTable(network.target, network.times.target, self._torch.wait, network.bad_targets)
        drafters = network.head(model)
        engine = TargetEngine(model, POSITIONS - 1, drafters)  # type: ignore[arg-type]
        texts = network.make_texts()
        own = own_sources(network.sources, model.vocab_size, ())
        kinds = [
            *own.values(),
            *(partial(OrderedSource.open, name, partial(self.trust.may_draft, name)) for name in drafters),
            partial(LocalText.open, texts, model.vocab_size),
        ]
        self._local = LocalSources(kinds, (*drafters, *texts.names, *own))
        if network.mask_us is not None:
            engine.step = partial(_step_with_masks, engine.step, network.mask_us)  # type: ignore[method-assign]
        described = describe("target", model.vocab_size)
        facts = {
            "capabilities": verifier_core.CAPABILITIES,
            "rules": tuple(map(facts_of, RULES.values())),
            "local_strategies": self._local.names,
            "max_tree_nodes": SETTINGS.max_tree_nodes,
        }
        engine.warm_up = lambda: list(network.warm_up)  # type: ignore[method-assign]
        card = ModelCard(replace(described, **facts), [], None)  # type: ignore[arg-type]
        self._loaded = LoadedEngine(card, engine, CACHE_TOKENS, drafts_by=tuple(drafters))
        return card, engine

    def _make_scheduler(self, room: Any, pacer: PrefillPacer) -> Any:
        scheduler = super()._make_scheduler(room, pacer)
        scheduler.waits.clock = lambda: time.perf_counter()
        if self.network.mask_us is not None and self.network.masks_are_apart:
            scheduler.take_slow = SlowMasks(self, self.network.mask_us).take
        return scheduler

    async def begin(self) -> None:
        await self.start()
        self.lease_id, self.outbox = self.open_lease()
        self.to_gateway = self.network.link(self.network.times.to_gateway_s)
        self.from_gateway = self.network.link(self.network.times.to_gateway_s)
        self.network.spawn(self.run_steps())
        self.network.spawn(self._tell_gateway())

    async def _tell_gateway(self) -> None:
        while events := await self.outbox.take_all():
            for event in events:
                self._tell_event(event)

    def _tell_event(self, event: Any) -> None:
        key = (
            (event.fence.session_id, event.fence.epoch)
            if isinstance(event, Verdict)
            else (event.session_id, event.epoch)
        )
        if isinstance(event, Verdict):
            name, message, decode = "verdict", messages.verdict_to_proto(event), _verdict
        elif isinstance(event, PromptRead):
            raise AssertionError("no case reports prompts")
        elif isinstance(event, BlockRefused):
            refusal = verifier_pb2.BlockRefusal(message=event.reason, permit_number=event.permit_number)
            name, message, decode = "refusal", refusal, _refusal
        else:
            name, message, decode = "failure", messages.failure_to_proto(*key, event.error), _target_failure
        self.to_gateway.send(name, message, decode, lambda event: self._deliver(key, event))

    # As the gateway sees it

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return True

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        key = (spec.session_id, spec.epoch)
        self.inboxes[key] = inbox
        data = messages.target_spec_to_proto(spec, self.lease_id).SerializeToString()
        await asyncio.sleep(self.network.times.to_gateway_s)
        if not self.connected:
            raise UnavailableError("lost")
        received = messages.target_spec_from_proto(verifier_pb2.OpenTargetSessionRequest.FromString(data))
        self.open_session(received, self.lease_id, await self.automaton_of(received))
        await asyncio.sleep(self.network.times.to_gateway_s)

    def run_plain(self, run: PlainRun) -> None:  # type: ignore[override]
        self.network.runs.append(run.num_rounds)
        self.from_gateway.send("run", messages.plain_run_to_proto(run), _plain_run, super().run_plain)

    def lose(self) -> None:
        """Ends it for all its peers."""
        self.connected = False
        self.to_gateway.cut()
        self.from_gateway.cut()
        inboxes, self.inboxes = self.inboxes, {}
        for inbox in inboxes.values():
            inbox.put_nowait(TargetLost(UnavailableError("lost")))
        for drafter in self.network.drafters:
            drafter.lose_verifier(self.address)


class VirtualOptions(StrategyOptions):
    """Options whose clock is the network's."""

    def __init__(self, network: "Network") -> None:
        super().__init__()
        self._network = network

    def draft_ahead(self, *arguments: Any) -> None:
        is_new = self.ahead is None
        super().draft_ahead(*arguments)
        if is_new and self.ahead is not None:
            self.ahead.lookahead.clock = lambda: time.perf_counter()
            self.ahead.lookahead.endings.acceptance = self._network.acceptance


class VirtualDrafter(_VirtualService, DrafterCore):
    """A drafter's core with a table, and its side of the links."""

    def __init__(self, network: "Network", rows: Tensor, number: int) -> None:
        self.network, self.rows, self.number = network, rows, number
        self.round_trip = RoundTripEstimate()
        self.connected = True
        self._blocks: dict[str, VirtualBlockLink] = {}
        settings = replace(SETTINGS, max_tree_nodes=network.max_tree_nodes)
        super().__init__(DrafterConfig(ModelSettings("table"), engine=settings), self._connect_to)
        self._options = VirtualOptions(network)
        self._torch.until = self.awake_at  # type: ignore[attr-defined]
        self.inboxes: dict[tuple[int, int], Inbox] = {}
        self._known_as: dict[str, int] = {}

    def awake_at(self, now: float) -> float:
        """Returns when it goes on that would do something now."""
        start, end = self.network.frozen
        return end if self.number == 0 and start <= now < end else now

    def _load_engine(self) -> Any:
        network = self.network
        model = PlacedTable(self.rows.float(), network.times.drafter, self._torch.wait, network.bad_drafts)
        strategy = network.strategy(model)
        engine, max_tree_nodes = DraftEngine(strategy, self._options.added), self.config.engine.max_tree_nodes
        capabilities = self._options.add(engine, max_tree_nodes)
        description = replace(describe("drafter", model.vocab_size, network.draft_context), capabilities=capabilities)
        description = replace(description, max_tree_nodes=max_tree_nodes)
        engine.warm_up = lambda: list(network.warm_up)  # type: ignore[method-assign]
        return ModelCard(description, [], None), engine  # type: ignore[arg-type]

    async def begin(self) -> None:
        await self.start()
        self.lease_id, self.outbox = self.open_lease()
        times = self.network.times
        self.to_gateway = self.network.link(times.from_drafter_s)
        self.from_gateway = self.network.link(times.to_gateway_s, self.awake_at)
        self.network.spawn(self.run_steps())
        self.network.spawn(self._tell_gateway())

    async def _tell_gateway(self) -> None:
        while events := await self.outbox.take_all():
            for event in events:
                key = (event.session_id, event.epoch)
                if isinstance(event, BlockSent):
                    sent = messages.block_sent_to_proto(event)
                    self.to_gateway.send("sent", sent, _block_sent, lambda event, key=key: self._deliver(key, event))
                else:
                    assert isinstance(event, SessionFailed)
                    failure = messages.failure_to_proto(*key, event.error)
                    deliver = lambda event, key=key: self._deliver(key, event)  # noqa: E731
                    self.to_gateway.send("lost", failure, _draft_failure, deliver)

    async def _connect_to(self, address: str, card: Any, on_lost: Callable[[], None]) -> "VirtualBlockLink":
        await asyncio.sleep(2 * self.network.times.to_verifier_s)
        link = self._blocks[address] = VirtualBlockLink(self, self.network.verifier_at(address), on_lost)
        return link

    def lose_verifier(self, address: str) -> None:
        link = self._blocks.pop(address, None)
        if link is not None:
            link.end()

    # As the gateway sees it

    def known_as(self, address: str) -> int:
        return self._known_as[address]

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        self.inboxes[spec.session_id, spec.epoch] = inbox
        data = messages.draft_spec_to_proto(spec, self.lease_id).SerializeToString()
        await asyncio.sleep(self.network.times.to_gateway_s)
        received = messages.draft_spec_from_proto(drafter_pb2.OpenDraftSessionRequest.FromString(data))
        drafter_id = await self.open_session(received, self.lease_id)
        await asyncio.sleep(self.network.times.to_gateway_s)
        self._known_as[spec.verifier_address] = drafter_id

    def calibrate(self, calibration: Calibration) -> None:
        self.network.asked.append(calibration)
        message = messages.calibration_to_proto(calibration)
        self.from_gateway.send("calibration", message, _calibration, super().calibrate)

    def send_drafted(self, command: SendDrafted) -> None:
        self.from_gateway.send("flush", messages.send_drafted_to_proto(command), _send_drafted, super().send_drafted)

    def lose(self) -> None:
        """Ends it for the gateway. It does not hear of that, and goes on with what it was asked for."""
        self.connected = False
        self.to_gateway.cut()
        self.from_gateway.cut()
        inboxes, self.inboxes = self.inboxes, {}
        for inbox in inboxes.values():
            inbox.put_nowait(DrafterLost(UnavailableError("lost")))


class VirtualBlockLink:
    """A `BlockLink`: a drafter's stream to a verifier, and what that tells it."""

    def __init__(self, drafter: VirtualDrafter, verifier: VirtualVerifier, on_lost: Callable[[], None]) -> None:
        network = drafter.network
        self.broken = False
        self._drafter, self._verifier, self._on_lost = drafter, verifier, on_lost
        self._to_verifier = network.link(network.times.to_verifier_s)
        self._to_drafter = network.link(network.times.to_verifier_s, drafter.awake_at)
        greeting = Greeting("drafter", "host", drafter.instance_id)
        self._record = verifier.peers.welcome(greeting, drafter.description)
        self._stream = verifier.peers.open_stream(self._record, drafter.description)
        network.spawn(self._tell())

    @property
    def drafter_id(self) -> int:
        return self._record.id

    def push(self, block: DraftBlock) -> None:
        name = "block ahead" if block.is_ahead else "block"
        self._to_verifier.send(name, messages.block_to_proto(block), self._decode, self._verifier.push_blocks)

    def _decode(self, data: bytes) -> Any:
        block = session_pb2.DraftBlock.FromString(data)
        vocab_size = self._verifier.description.vocab_size
        limits = (vocab_size, SETTINGS.max_draft_tokens, SETTINGS.max_tree_nodes)
        return messages.blocks_from_proto([block], self._record.id, *limits)

    async def _tell(self) -> None:
        while told := await self._stream.outbox.take_all():
            outcomes = [each for each in told if isinstance(each, RoundOutcome)]
            self._to_drafter.send("outcome", _outcomes_to_proto(outcomes), _outcomes, self._learn)

    def _learn(self, outcomes: Any) -> None:
        self._drafter.learn(self._verifier.address, outcomes)

    def end(self) -> None:
        self.broken = True
        self._to_verifier.cut()
        self._to_drafter.cut()
        self._on_lost()


@dataclass(frozen=True, slots=True)
class SlowMasks:
    """Has the sessions of a verifier wait for masks outside of steps, for as long as their blocks' masks take."""

    core: VirtualVerifier
    mask_us: Callable[[Sequence[int]], int]

    def take(self, session: TargetSession) -> bool:
        seconds = self.mask_us(session.block.token_ids if session.block else ()) / 1e6
        if seconds:
            self.core.network.after(seconds, lambda: self.core._take_masks(session, None))  # type: ignore[arg-type]
        return bool(seconds)


@dataclass(eq=False)
class Network:
    """The services of one run."""

    target: Tensor
    """Table of the verifiers."""
    drafts: Sequence[Tensor]
    """Tables of the drafters, one each."""
    times: Times = field(default_factory=Times)
    warm_up: Sequence[tuple[int, float]] = ()
    """Rows and seconds that the services report."""
    num_verifiers: int = 1
    settings: LoopSettings = field(default_factory=LoopSettings)
    bad_targets: frozenset[tuple[int, int]] = frozenset()
    bad_drafts: frozenset[tuple[int, int]] = frozenset()
    """Positions and tokens after which there are no finite logits."""
    frozen: tuple[float, float] = (-1.0, -1.0)
    """From when to when the first drafter does nothing."""
    acceptance: float = 0.7
    """Of each draft token, as far as the drafters know when they start."""
    sources: tuple[str, ...] = ()
    """Import paths of what else they draft with by themselves."""
    make_texts: Callable[[], TextDrafters] = TextDrafters
    """Makes what the verifiers draft with by themselves."""
    head: Callable[[PlacedTable], Any] = lambda _: {}
    """Makes what drafts inside the verifier, by name."""
    max_tree_nodes: int = SETTINGS.max_tree_nodes
    """Of the drafters."""
    draft_context: int = POSITIONS - 1
    """Of the drafters."""
    strategy: Callable[[PlacedTable], Any] = lambda model: TreeModelDrafter(model, POSITIONS - 1)
    compiler: FormCompiler | None = None
    """Of structured output."""
    mask_us: Callable[[Sequence[int]], int] | None = None
    """Returns how long the masks take for the draft tokens of a round, as the verifiers report; None: as it is."""
    masks_are_apart: bool = False
    """Whether rounds wait so long, outside of steps."""
    pairs: Any = None
    """Chooses lengths; None is the shipped chooser."""
    seen: Counter[str] = field(default_factory=Counter)
    """Messages that were sent, by what they are."""
    runs: list[int] = field(default_factory=list)
    """Rounds of the plain runs that were requested."""
    asked: list[Calibration] = field(default_factory=list)
    """The calibrations."""
    rounds: list[Any] = field(default_factory=list)
    """What the gateway observed of each round."""
    verifiers: list[VirtualVerifier] = field(default_factory=list)
    drafters: list[VirtualDrafter] = field(default_factory=list)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Network"]:
        """Starts the services, and ends them."""
        self.verifiers = [VirtualVerifier(self, f"verifier{number}:1") for number in range(self.num_verifiers)]
        self.drafters = [VirtualDrafter(self, rows, number) for number, rows in enumerate(self.drafts)]
        for service in (*self.verifiers, *self.drafters):
            service.compiler = self.compiler
            await service.begin()
        self.pairs = self.pairs if self.pairs is not None else Pairs(8, 2)
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for service in (*self.verifiers, *self.drafters):
                service.stop()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def link(self, delay_s: float, until: Callable[[float], float] = lambda now: now) -> Link:
        return Link(self.seen, delay_s, until)

    def after(self, seconds: float, act: Callable[[], Any]) -> None:
        """Has something happen after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, act)

    def verifier_at(self, address: str) -> VirtualVerifier:
        return next(verifier for verifier in self.verifiers if verifier.address == address)

    # As the gateway sees it

    def targets(self) -> Sequence[VirtualVerifier]:
        return [verifier for verifier in self.verifiers if verifier.connected]

    def why_no_target(self) -> str:
        return "" if self.targets() else "no verifier can be reached"

    def last_usable_at(self) -> float:
        return asyncio.get_running_loop().time()

    def draft_models(self) -> Collection[str]:
        return {"drafter"} if self.drafters else ()

    def drafters_for(self, target: Any, but: Collection[int]) -> Sequence[VirtualDrafter]:
        return [drafter for drafter in self.drafters if drafter.connected and drafter.instance_id not in but]

    async def generate(self, generation: Generation) -> tuple[Ids, Statistics]:
        """Returns the tokens of a text, ended by `FAILED` if the target cannot go on, and the statistics."""
        text = TextStream(TextTokenizer(), generation.prompt_ids, generation.stop)  # type: ignore[arg-type]
        plugs = plugs_of(generation, self.pairs, [self.rounds.append])
        if self.mask_us is not None:
            plugs = replace(plugs, make_options=_options_with_masks)
        loop = GenerationLoop(generation, self, text, self.settings, plugs)
        ids: list[int] = []
        try:
            async for event in loop.run():
                if isinstance(event, Delta):
                    ids += event.token_ids
                else:
                    assert isinstance(event, Finish)
        except CompletionInterruptedError:
            ids.append(FAILED)
        return tuple(ids), loop.statistics


def run_virtually(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs some work in virtual time, and all clocks with it."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=VirtualTimeLoop))
        clock = runner.get_loop().time
        for name in ("perf_counter", "monotonic"):
            stack.enter_context(mock.patch.object(time, name, clock))
        stack.enter_context(mock.patch.object(engine_service, "TorchThread", StepThread))
        stack.enter_context(mock.patch.object(verifier_core, "VerifierMetrics", return_value=_metrics(VerifierMetrics)))
        stack.enter_context(mock.patch.object(drafter_core, "DrafterMetrics", return_value=_metrics(DrafterMetrics)))
        return runner.run(work())


def _options_with_masks(session: SessionState) -> Sequence[SessionOption]:
    """Makes the options of a session, and that of a form, which it has not, but masks that take long."""
    masks = MaskAllowance(session)
    masks.flush_s = 0.0
    return masks, *options_of(session)


def _step_with_masks(run: Callable[[Any], Any], mask_us: Callable[[Sequence[int]], int], step: Any) -> Any:
    """Runs a step of a verifier, and has it report what masks take."""
    drafted = [item.block.token_ids if item.block else () for item in step.items]
    return replace(run(step), mask_us=list(map(mask_us, drafted)))


# What a peer makes of bytes


def _verdict(data: bytes) -> Verdict:
    return messages.verdict_from_proto(session_pb2.Verdict.FromString(data))


def _refusal(data: bytes) -> BlocksRefused:
    message = verifier_pb2.BlockRefusal.FromString(data)
    return BlocksRefused(UnavailableError(message.message), message.permit_number)


def _target_failure(data: bytes) -> TargetLost:
    return TargetLost(UnavailableError(session_pb2.SessionFailure.FromString(data).message))


def _draft_failure(data: bytes) -> DrafterLost:
    return DrafterLost(UnavailableError(session_pb2.SessionFailure.FromString(data).message))


def _plain_run(data: bytes) -> PlainRun:
    return messages.plain_run_from_proto(verifier_pb2.PlainRun.FromString(data))


def _block_sent(data: bytes) -> BlockSent:
    return messages.block_sent_from_proto(drafter_pb2.BlockSent.FromString(data))


def _calibration(data: bytes) -> Calibration:
    return messages.calibration_from_proto(drafter_pb2.Calibration.FromString(data))


def _send_drafted(data: bytes) -> SendDrafted:
    return messages.send_drafted_from_proto(drafter_pb2.SendDrafted.FromString(data))


def _outcomes_to_proto(outcomes: list[RoundOutcome]) -> verifier_pb2.RoundOutcomes:
    return verifier_pb2.RoundOutcomes(outcomes=map(messages.outcome_to_proto, outcomes))


def _outcomes(data: bytes) -> Any:
    return list(map(messages.outcome_from_proto, verifier_pb2.RoundOutcomes.FromString(data).outcomes))
