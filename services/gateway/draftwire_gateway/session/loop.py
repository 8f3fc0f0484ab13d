"""The outer loop of speculative decoding, for one session. Independent of gRPC and models.

    open a session on a verifier and, concurrently, on a drafter; the verifier decodes the first token by itself
    repeat:
        receive the verdict of the round: commit its tokens, emit their text, finish at a stop condition
        request the next round: a block of the drafter, or a plain run without a drafter

The loop owns the committed tokens (`session_state`, `committed_text`), so it survives its peers. A lost drafter is
replaced by another one, and until then by plain runs (`drafter_seat`). One that does not reply in time is asleep until
it does. A lost verifier is replaced too (`verifier_seat`): the session is opened elsewhere with all committed ids,
under the next epoch, and goes on with the round that was open. Late events of lost peers are fenced off.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from draftwire.errors import DraftwireError, ProtocolViolationError, UnavailableError
from draftwire.method.rounds import BlockSent, PromptRead, Verdict
from draftwire.requests.logprobs import PromptPart
from draftwire_gateway.session.committed_text import CommittedText, Delta, Finish
from draftwire_gateway.session.drafter_seat import DrafterSeat
from draftwire_gateway.session.event_queue import EventQueue, PeerEvent
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.policy import Policy
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost, DrafterReady, Peers, TargetLost, TargetPort
from draftwire_gateway.session.round_planner import RoundPlanner
from draftwire_gateway.session.round_times import RoundObserver, RoundWatch, WhyPlain
from draftwire_gateway.session.session_option import MakeOptions, RunRequest
from draftwire_gateway.session.session_state import SessionState, SessionTrace
from draftwire_gateway.session.verifier_seat import VerifierSeat
from draftwire_gateway.text.text import TextStream


@dataclass(frozen=True, slots=True)
class SessionPlugs:
    """Parts of one session that its loop knows by their interfaces alone."""

    policy: Policy
    """Chooses what is drafted."""
    make_options: MakeOptions = lambda _: ()
    """Makes the session's options."""
    observers: Sequence[RoundObserver] = ()
    """Called for each committed round."""
    trace: SessionTrace | None = None
    """Traces the session; None traces nothing."""


class GenerationLoop:
    """Runs one generation. Use once."""

    def __init__(
        self,
        generation: Generation,
        peers: Peers,
        text: TextStream,
        settings: LoopSettings,
        plugs: SessionPlugs,
    ) -> None:
        """Opens no session before `run`. `text` is that of a resumed completion so far, else empty."""
        self._settings = settings
        self._queue = EventQueue()
        self._session = SessionState(generation, plugs.trace)
        self._text = CommittedText(self._session, text)
        policy, options = plugs.policy, plugs.make_options(self._session)
        self.verifier = VerifierSeat(self._session, peers, self._queue, settings, options)
        self._seat = DrafterSeat(self._session, peers, self._queue, policy, options)
        self._planner = RoundPlanner(self._session, self._seat, policy, options)
        self._policy = policy
        self._watch = RoundWatch([*plugs.observers, policy.observe])
        self.statistics = self._session.statistics

    async def run(
        self,
        *,
        arrived_at: float | None = None,
        verifier: str = "",
        waits_for_room: bool = False,
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta | PromptPart | Finish]:
        """Yields the prompt's log-probabilities if requested, then deltas as their tokens are committed, then one
        finish.

        Args:
            arrived_at: when the request arrived, by `time.perf_counter`; by default now.
            verifier: address of a verifier with the prompt in its KV cache, which is tried first.
            waits_for_room: whether full verifiers are retried for `failover_timeout_s`.
            on_open: called when the session is opened for the first time, before the prefill; not if the completion
                was already complete.

        Raises:
            InvalidRequestError: the verifier refused the session.
            NoRoomError: no verifier has room for the session. Nothing was yielded.
            CompletionInterruptedError: no verifier is left.
        """
        started = time.perf_counter() if arrived_at is None else arrived_at
        self.verifier.preferred_address = verifier
        reason = self._text.reason_before()
        try:
            if reason is None:
                await self.verifier.open(self._prepare, self._policy.leave, waits_for_room=waits_for_room)
                self._begin()
                on_open()
            while reason is None:
                verdict = await self._next_verdict()
                if isinstance(verdict, PromptPart):
                    yield verdict
                    continue
                self.verifier.end_round()
                token_ids, reason = self._text.commit(verdict)
                asks = verdict.plain_rounds_left == 0
                if not asks:
                    self._queue.set_timeout(self._settings.verdict_timeout_s)
                if asks and reason is None and not self._session.generation.stop:  # else the text is checked first
                    self._ask_for_round()
                    asks = False
                    await asyncio.sleep(0)  # lets the request be sent before the text is decoded
                goes_on = reason is None
                delta, reason = self._text.show(verdict, token_ids, reason)
                if asks and reason is None:
                    self._ask_for_round()
                if goes_on and reason is not None:
                    self._planner.end_at_string()
                if reason is not None:
                    self._watch.end()
                self._watch.report()
                self.statistics.count_time(time.perf_counter() - started)
                if delta.token_ids or delta.text:
                    yield delta
            yield Finish(reason, self.statistics, self._seat.error)
        finally:
            self._seat.end()
            self.verifier.drop()
            self._queue.close()
            self._session.end(reason.value if reason is not None else "")

    async def _next_verdict(self) -> Verdict | PromptPart:
        """Returns the verdict of the current round, or prompt log-probabilities, and handles all other events."""
        while True:
            try:
                event = await self._queue.get()
            except TimeoutError:
                await self._handle_timeout()
                continue
            if event.epoch != self._session.epoch or event.permit_number not in (None, self._seat.permit_number):
                continue  # of a peer that was dropped
            match event.event:
                case Verdict() | PromptRead():
                    new = await self._take(event)
                    if new is not None:
                        return new
                case TargetLost(error):
                    await self._move(error)
                case BlocksRefused(error, permit_number) if permit_number == self._seat.permit_number:
                    self._give_up_drafter(error)
                case DrafterLost(error):
                    self._give_up_drafter(error)
                case DrafterReady():
                    self._seat.mark_ready()
                case BlockSent() as sent if self._seat.note_sent(sent, event.arrived_at):
                    self._queue.set_timeout(self._seat.drafter.sent_timeout_s(self._settings.block_timeout_s))

    async def _take(self, event: PeerEvent) -> Verdict | PromptPart | None:
        """Returns what is new in a verifier's event, if anything is. A verifier that sends something else is lost."""
        vocab_size = self.verifier.target.description.vocab_size
        try:
            match event.event:
                case Verdict() as verdict if verdict.fence == self._session.fence:
                    self._session.check(verdict, vocab_size)
                    self._watch.take(verdict, event.at)
                    self._seat.end_round(verdict, event.arrived_at)
                    return verdict
                case PromptRead(part=part) if (new := self._session.take_prompt(part, vocab_size)) is not None:
                    self._queue.set_timeout(self._settings.prompt_timeout_s)
                    return new
        except ProtocolViolationError as error:
            await self._move(UnavailableError(str(error)))
        return None

    async def _handle_timeout(self) -> None:
        """Moves the session, flushes the block or requests a plain round, when the current round takes too long.

        Depends on times alone, never on the drafted tokens: see docs/exactness.md.
        """
        if not self._seat.is_awaited:
            await self._move(UnavailableError("the verifier was silent for too long"))
        elif not self._seat.drafter.can_flush:
            self._seat.drafter.fall_asleep()
            self._run(RunRequest(WhyPlain.LATE, self._settings.bridge_rounds))
        else:
            self._queue.set_timeout(self._seat.drafter.flush_timeout_s(self._settings.block_timeout_s))
            try:
                self._seat.drafter.request_flush()
            except DraftwireError as error:
                self._give_up_drafter(error)

    def _ask_for_round(self) -> None:
        """Requests the next round: a block if a drafter is ready and has room, else plain rounds."""
        self._seat.seek(self.verifier.target, self._settings.block_timeout_s)
        arm = self._planner.next_draft()
        if arm.length:
            self._watch.ask(WhyPlain.EMPTY_BLOCK)
            try:
                self._queue.set_timeout(self._seat.drafter.request_block(arm, self._settings.block_timeout_s))
            except DraftwireError as error:
                self._give_up_drafter(error)
            return
        self._run(self._planner.run(self._settings.plain_run_rounds, self._settings.bridge_rounds))

    def _run(self, request: RunRequest) -> None:
        """Requests rounds without a drafter, as many as may be left. A block of the open round that is judged first
        counts as well.
        """
        self._watch.ask(request.why)
        self._queue.set_timeout(self._settings.verdict_timeout_s)
        num_rounds = max(request.num_rounds, self._planner.num_begun)
        self.verifier.run_plain(min(num_rounds, self._session.num_left), request.draft)

    def _prepare(self, target: TargetPort) -> int:
        """Prepares an attempt to open the session on a verifier, and returns its plain rounds; a `Prepare`."""
        request = self._planner.first_run(target, self._settings.plain_run_rounds)
        self._watch.ask(request.why, opens=True)
        return request.num_rounds

    def _begin(self) -> None:
        """Continues the open round on a verifier that accepted the session."""
        self._queue.set_timeout(self._settings.prompt_timeout_s)
        self._seat.seek(self.verifier.target)

    async def _move(self, error: Exception) -> None:
        """Moves the session to another verifier. The drafter is dropped, since it sends its blocks to the lost one."""
        self._seat.drop()
        await self.verifier.move(error, self._prepare, self._policy.leave)
        self._begin()

    def _give_up_drafter(self, error: Exception) -> None:
        """Drops the drafter. If a block was awaited, requests the round again; the first verdict of either counts."""
        if self._seat.give_up(error):
            self._ask_for_round()
