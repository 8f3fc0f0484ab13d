"""The verifier without its edge: leases, sessions, and the loop that runs steps."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from draftwire.audit import AuditSums, FirstUses
from draftwire.engine.admission import Room
from draftwire.engine.leases import Leases, SessionFailed, SessionKey
from draftwire.engine.model_loading import Target, limited, load_target
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import (
    BlockViolationError,
    DraftwireError,
    GroupLostError,
    InvalidRequestError,
    ProtocolViolationError,
    UnavailableError,
    Violation,
)
from draftwire.method.rounds import FenceVerdict, PlainRun, PromptRead, ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.models.description import ModelDescription, check_protocol
from draftwire.models.loading import ModelCard
from draftwire.requests.automaton import Automaton
from draftwire.runtime.forms import Forms
from draftwire.runtime.outbox import Outbox
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.drafters import Drafter, Drafters
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.progress import LoadProgress
from draftwire_verifier.scheduler import Scheduler, Step, StepResult, TargetSession
from draftwire_verifier.spans import VerifierSpans

log = structlog.get_logger()

MAX_NAME_LENGTH = 256
"""Characters of a drafter's model name, at most."""


@dataclass(frozen=True, slots=True)
class BlockRefused:
    """Tells a gateway that a session takes no more blocks from a drafter; the round is still open."""

    session_id: int
    epoch: int
    round: int
    reason: str
    permit_number: int
    """Of the drafter whose blocks are refused."""
    quarantined_drafter_id: int | None = None
    """The drafter, if no session takes its blocks any more."""


TargetEvent = Verdict | PromptRead | BlockRefused | SessionFailed


class VerifierCore:
    """Owns the target model. All methods run on the event loop; tensors are touched on the torch thread only."""

    def __init__(self, config: VerifierConfig, place: Place | None = None, followers: Followers | None = None) -> None:
        """Prepares; `start` loads the model.

        Args:
            config: what can be set.
            place: as `GroupGuard`.
            followers: as `GroupGuard`.
        """
        self.config = config
        self.drafters = Drafters()
        self._first_uses = FirstUses()
        self.metrics = VerifierMetrics(self.drafters)
        self.spans: VerifierSpans | None = None
        """Records the traced sessions; None records none. Set before the first session."""
        self.card: ModelCard
        self._scheduler: Scheduler
        self._engine: TargetEngine
        self._forms: Forms
        self._torch = TorchThread()
        self.group = GroupGuard(config.wanted_group, self._torch, place, followers)
        self._leases = Leases[TargetEvent]()
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
        target = await self._torch.run(self._load_target)
        self.card = target.card
        self._engine = TargetEngine(target.model, target.card.description.context_length)
        self._forms = Forms(await asyncio.to_thread(self.card.form_compiler))
        self._scheduler = Scheduler(
            context_length=self.description.context_length,
            vocab_size=self.description.vocab_size,
            max_draft_tokens=settings.max_draft_tokens,
            room=Room(settings.max_sessions, settings.kv_cache_tokens),
            pacer=PrefillPacer(settings.max_added_latency_ms / 1e3),
        )
        for num_tokens, seconds in await self._torch.run(self._engine.warm_up):
            self._scheduler.pacer.learn(num_tokens, 0, seconds)
        self.metrics.watch(self._scheduler, self.description.name)
        self.metrics.watch_waits(self._scheduler)

    def _load_target(self) -> Target:
        if self.group.place.size == 1:
            return load_target(self.config.loading, self.config.engine)
        from draftwire.engine.ranks.group_model import GroupModel
        from draftwire.engine.ranks.target_rank import load_rank

        progress = LoadProgress(self.config.server.log_format)
        try:
            rank = load_rank(RankConfig.of(self.config, self.group.place), progress)
        finally:
            progress.end()
        model = GroupModel(rank, "verifier")
        self.group.take(model)
        return Target(limited(rank.card, self.config.engine), model)

    def busy_s(self) -> float:
        """Returns for how many seconds the model's current call has run; 0 where none runs."""
        return self._torch.busy_s()

    def stop(self) -> None:
        """Stops the torch thread after the running step."""
        self._torch.stop()

    def open_lease(self) -> tuple[int, Outbox[TargetEvent]]:
        """Returns a new lease and the outbox that its sessions' events go to."""
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

    async def automaton_of(self, spec: TargetSessionSpec) -> Automaton | None:
        """Returns what follows the form of a session's text, from where the text is; None if it has no form.

        Raises:
            InvalidRequestError: the form cannot be followed, or the text does not have it.
            NoRoomError: too many forms are read.
        """
        if spec.sampling.structured_output is None:
            return None
        return await self._forms.compile(spec.sampling.structured_output, spec.token_ids[spec.prompt_len :])

    def open_session(self, spec: TargetSessionSpec, lease_id: int, automaton: Automaton | None = None) -> None:
        """Opens a session; its verdicts go to the lease's outbox.

        Args:
            spec: the session.
            lease_id: whose it is.
            automaton: of `automaton_of`.

        Raises:
            ProtocolViolationError: unknown lease.
            InvalidRequestError: ids or parameters are out of range.
            NoRoomError: too many sessions are open.
        """
        self._leases.require(lease_id)
        with self.metrics.counting_refusals():
            session = self._scheduler.open(spec, lease_id, automaton)
        session.is_audited = self._first_uses.claim(spec.verifying_key, spec.choice)
        if self.spans is not None:
            self.spans.open(spec)
        self._work.set()

    def close_session(self, session_id: int, epoch: int) -> None:
        """Ends a session, if it is open, and frees its cache."""
        session = self._scheduler.close(session_id, epoch)
        if session is not None:
            self._torch.post(self._engine.forget, session.key)
            if self.spans is not None:
                self.spans.close(session.key)

    def run_plain(self, run: PlainRun) -> None:
        """Starts a plain run; a message out of place ends the session."""
        try:
            if self._scheduler.run_plain(run) is FenceVerdict.VIOLATION:
                raise ProtocolViolationError("plain run for another prefix than the session's")
        except DraftwireError as error:
            self._fail((run.fence.session_id, run.fence.epoch), error)
        self._work.set()

    def welcome_drafter(self, drafter_id: int, model: ModelDescription) -> Drafter:
        """Checks that a drafter's tokens mean the same as the target's, and returns its record.

        Raises:
            ModelMismatchError: another protocol version.
            InvalidRequestError: a name that is too long.
            ProtocolViolationError: another vocabulary. (The drafter then compares the two and names the token.)
        """
        check_protocol(model)
        if len(model.name) > MAX_NAME_LENGTH:  # it is kept, logged, and stands in every line of the audit's metrics
            raise InvalidRequestError(f"a model's name has at most {MAX_NAME_LENGTH} characters")
        if model.vocabulary_fingerprint != self.description.vocabulary_fingerprint:
            raise ProtocolViolationError(f"vocabulary of drafter {model.name} differs from {self.description.name}'s")
        return self.drafters.connect(drafter_id, model.name)

    def push_blocks(self, blocks: Iterable[ReceivedBlock]) -> None:
        """Takes blocks. Stale ones are dropped; one that breaks the protocol ends its session's speculation."""
        for block in blocks:
            self.metrics.blocks_received.inc()
            try:
                self._take_permit(block)
                self._scheduler.offer_block(block)
            except BlockViolationError as error:
                self._refuse_block(block, error)
        self._work.set()

    def _take_permit(self, block: ReceivedBlock) -> None:
        """Lets a drafter into a session, and out again at once if it is in quarantine."""
        session, drafter = self._scheduler.take_permit(block), self.drafters.get(block.drafter_id)
        if session is not None and drafter is not None and drafter.is_quarantined:
            self._end_speculation(session, _quarantine_message(drafter), drafter.id)

    def _refuse_block(self, block: ReceivedBlock, error: BlockViolationError) -> None:
        self.metrics.blocks_refused.labels(error.violation.value).inc()
        session_id, epoch = block.fence.session_id, block.fence.epoch
        log.warning(
            "verifier.block_refused",
            session_id=session_id,
            violation=error.violation.value,
            reason=str(error),
            drafter_id=block.drafter_id,
        )
        if error.violation is not Violation.PEER:  # who has no part in a session cannot end anything in it
            self._end_speculation(self._scheduler.sessions[session_id, epoch], str(error))

    def _end_speculation(self, session: TargetSession, reason: str, quarantined_id: int | None = None) -> None:
        """Takes no more blocks of a session's drafter, and tells its gateway."""
        self._scheduler.end_speculation(session)
        refused = BlockRefused(*session.key, session.round, reason, session.permit_number, quarantined_id)
        self._leases.send(session.lease_id, refused)

    def _audit(self, step: Step, result: StepResult) -> None:
        """Adds what a step shows to the drafters' records; quarantines those that are past the bound."""
        sums_of: dict[int, AuditSums] = {}
        for item, sums in zip(step.items, result.audits, strict=True):
            if item.block is not None and item.session.is_audited and sums is not None:
                sums_of[item.block.drafter_id] = sums_of.get(item.block.drafter_id, AuditSums()) + sums
        for drafter_id, sums in sums_of.items():
            drafter = self.drafters.get(drafter_id)
            if drafter is not None and drafter.add(sums):
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
        for session in sessions:
            self._end_speculation(session, reason, drafter.id)

    async def run(self) -> None:
        """Runs steps until it is cancelled, and then lets the other ranks go.

        Raises:
            GroupLostError: another rank ended, hangs, or is out of step with this one. All sessions have been told.
        """
        await self.group.run(self.run_steps(), self.config.engine.watchdog_s, self._fail_all)

    async def run_steps(self) -> None:
        """Runs steps for ever."""
        while True:
            step = self._scheduler.next_step()
            if step is None:
                self._work.clear()
                await self.group.wait(self._work)
                continue
            await self._run_step(step)

    async def _run_step(self, step: Step) -> None:
        try:
            result = await self._torch.run(self._engine.step, step)
        except GroupLostError:
            raise
        except Exception as error:
            log.exception("verifier.step_failed", num_sessions=len(step.items))
            failure = error if isinstance(error, DraftwireError) else UnavailableError("the target failed")
            for item in step.items:
                if self._scheduler.sessions.get(item.session.key) is item.session:  # not closed meanwhile
                    self._fail(item.session.key, failure)
            return
        ended_at = time.perf_counter()
        self.metrics.count_step(len(step.items), result.verify_us / 1e6)
        told = self._scheduler.complete(step, result)
        for session, event in told:
            if isinstance(event, DraftwireError):
                self._fail(session.key, event)
                continue
            self._leases.send(session.lease_id, event)
            if isinstance(event, Verdict):
                self.metrics.count(event, is_first=event.fence.round == session.spec.first_round)
        if self.spans is not None:  # after the verdicts have left and the next step has begun
            asyncio.get_running_loop().call_soon(self.spans.add, step, told, ended_at)
        self._audit(step, result)

    def _fail_all(self, error: GroupLostError) -> int:
        """Tells all sessions, so that their gateways move them, and returns how many there were."""
        keys = list(self._scheduler.sessions)
        for key in keys:
            self._fail(key, error)
        return len(keys)

    def _fail(self, key: SessionKey, error: Exception) -> None:
        session = self._scheduler.sessions.get(key)
        if session is not None:
            self.close_session(*key)
            self._leases.send(session.lease_id, SessionFailed(*key, error))


def _quarantine_message(drafter: Drafter) -> str:
    alarm = drafter.audit.alarm
    assert alarm is not None, "asked of drafters in quarantine alone"
    return f"the drafter does not draw from the distributions that it sends: {alarm.message}"
