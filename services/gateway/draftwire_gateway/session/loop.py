"""The outer loop of speculative decoding, for one session. Knows neither gRPC nor models.

    open a session on a verifier, and beside it one on a drafter; the verifier decodes the first token by itself
    repeat:
        take the verdict of the round: commit its tokens, show their text, stop if it is time to
        ask for the next round: a block of the drafter, or a plain run where there is no drafter

The loop owns what is committed (`session_state`, `committed_text`), so it survives its peers. A drafter that is lost is
replaced by another one, and until then by plain runs (`drafter_seat`). A verifier that is lost is replaced too
(`verifier_seat`): the session is opened elsewhere with all committed ids, under the next epoch, and goes on with the
round that was open. Whatever the lost ones still say is fenced off.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from draftwire.errors import DraftwireError, ProtocolViolationError, UnavailableError
from draftwire.method.rounds import PromptRead, Verdict
from draftwire.requests.logprobs import PromptPart
from draftwire_gateway.config import LoopSettings
from draftwire_gateway.session.committed_text import CommittedText, Delta, Finish
from draftwire_gateway.session.drafter_seat import DrafterSeat
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.ports import (
    BlocksRefused,
    DrafterLost,
    DrafterReady,
    Peers,
    Said,
    TargetLost,
    TargetPort,
)
from draftwire_gateway.session.round_times import RoundObserver, RoundWatch, WhyPlain
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session.spans import ChoiceSpans
from draftwire_gateway.session.verifier_seat import VerifierSeat
from draftwire_gateway.text.text import TextStream


class GenerationLoop:
    """Carries out one generation. Use once."""

    def __init__(
        self,
        generation: Generation,
        peers: Peers,
        text: TextStream,
        settings: LoopSettings,
        observer: RoundObserver | None = None,
        spans: ChoiceSpans | None = None,
    ) -> None:
        """Prepares; `run` does the work.

        Args:
            generation: what is wanted.
            peers: who can do it.
            text: has taken what was generated before, if something was.
            settings: how long to wait.
            observer: hears of each committed round.
            spans: records what becomes of the session; None records nothing.
        """
        self._settings = settings
        # Peers never wait here, but there is a bound to what they say unasked: the verdicts of a block and a plain run,
        # and of a prompt that is reported, MAX_LOGPROBS + 1 entries for each of its tokens.
        self._queue: asyncio.Queue[Said] = asyncio.Queue()
        self._session = SessionState(generation, spans)
        self._text = CommittedText(self._session, text)
        self._verifier = VerifierSeat(self._session, peers, self._queue, settings)
        self._drafter = DrafterSeat(self._session, peers, self._queue)
        self._watch = RoundWatch(observer)
        self._due = 0.0
        self.statistics = self._session.statistics

    @property
    def verifier_address(self) -> str:
        """Where the session is open; empty if it is not."""
        return self._verifier.address

    async def run(
        self,
        *,
        arrived_at: float | None = None,
        verifier: str = "",
        waits_for_room: bool = False,
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Delta | PromptPart | Finish]:
        """Yields what is reported of the prompt, then deltas as their tokens are committed, then one finish.

        Args:
            arrived_at: when the request came, by `time.perf_counter`; without it, now.
            verifier: address of the one that holds the prompt already, and is tried first.
            waits_for_room: whether full verifiers are tried for `failover_timeout_s`.
            on_open: called when the session is open for the first time, long before the first token may come; not if
                all was generated before.

        Raises:
            InvalidRequestError: the verifier refused the session.
            NoRoomError: no verifier has room for it. Nothing was yielded.
            CompletionInterruptedError: no verifier is left.
        """
        started = time.perf_counter() if arrived_at is None else arrived_at
        self._verifier.preferred_address = verifier
        reason = self._text.reason_before()
        try:
            if reason is None:
                await self._verifier.open(self._prepare, waits_for_room=waits_for_room)
                self._begin()
                on_open()
            while reason is None:
                verdict = await self._next_verdict()
                if isinstance(verdict, PromptPart):
                    yield verdict
                    continue
                self._drafter.end_round()
                self._verifier.end_round()
                self._expect(self._settings.verdict_timeout_s)  # of a plain run, the verifier goes on
                token_ids, reason = self._text.commit(verdict)
                asks = verdict.plain_rounds_left == 0
                if asks and reason is None and not self._text.may_stop:
                    self._ask_for_round()
                    asks = False
                    await asyncio.sleep(0)  # lets the request leave before we turn to the text
                delta, reason = self._text.show(verdict, token_ids, reason)
                if asks and reason is None:
                    self._ask_for_round()
                if reason is not None:
                    self._watch.end()
                self.statistics.count_time(time.perf_counter() - started)
                if delta.token_ids or delta.text:
                    yield delta
            yield Finish(reason, self.statistics, self._drafter.error)
        finally:
            self._drafter.drop()
            self._verifier.drop()
            self._session.end(reason.value if reason is not None else "")

    async def _next_verdict(self) -> Verdict | PromptPart:
        """Returns the verdict of the current round, or more of the prompt, and deals with all else that arrives."""
        while True:
            try:
                async with asyncio.timeout_at(self._due):
                    said = await self._queue.get()
            except TimeoutError:
                await self._deal_with_silence()
                continue
            if said.epoch != self._session.epoch or said.permit_number not in (None, self._drafter.permit_number):
                continue  # of a peer that was given up
            match said.event:
                case Verdict() as verdict if verdict.fence == self._session.fence:
                    if self._session.has_all_of(verdict):
                        self._watch.take(verdict, said.at)
                        return verdict
                    await self._move(UnavailableError("the verifier left out log-probabilities"))
                case PromptRead(part=part):
                    new = await self._take_prompt(part)
                    if new is not None:
                        return new
                case TargetLost(error):
                    await self._move(error)
                case BlocksRefused(error, permit_number):
                    if permit_number == self._drafter.permit_number:
                        self._give_up_drafter(error)
                case DrafterLost(error):
                    self._give_up_drafter(error)
                case DrafterReady():
                    self._drafter.take_ready()

    async def _take_prompt(self, part: PromptPart) -> PromptPart | None:
        """Returns what is new in a part of the prompt, if anything is."""
        try:
            new = self._session.prompt.take(part)
        except ProtocolViolationError as error:
            await self._move(UnavailableError(str(error)))
            return None
        if new is not None:
            self._expect(self._settings.prompt_timeout_s)
        return new

    async def _deal_with_silence(self) -> None:
        """Does what is to be done when the current round takes too long."""
        if not self._drafter.is_awaited:
            await self._move(UnavailableError("the verifier was silent for too long"))
        elif not self._drafter.can_flush:
            self._give_up_drafter(UnavailableError("no block in time, not even a part of one"))
        else:
            self._expect(self._settings.block_timeout_s)
            try:
                self._drafter.request_flush()
            except DraftwireError as error:
                self._give_up_drafter(error)

    def _expect(self, seconds: float) -> None:
        """Says how long the current round may take from now on."""
        self._due = asyncio.get_running_loop().time() + seconds

    def _ask_for_round(self) -> None:
        """Asks for the next round: a block if a drafter can make one, else plain rounds."""
        self._drafter.seek(self._verifier.target)
        num_draft_tokens = self._num_draft_tokens()
        if num_draft_tokens >= 1:
            self._ask_for_block(num_draft_tokens)
            return
        bridging = self._drafter.is_warming_up
        rounds = self._settings.bridge_rounds if bridging else self._settings.plain_run_rounds
        self._watch.ask(WhyPlain.NO_ROOM if self._drafter.is_ready else self._why_no_block(bridging))
        self._expect(self._settings.verdict_timeout_s)
        self._verifier.run_plain(min(rounds, self._session.num_left))

    def _num_draft_tokens(self) -> int:
        """Returns how many tokens are to be drafted for the next round, if any.

        Depends on lengths alone, never on what is drafted: see docs/exactness.md. The verifier's own token is the last.
        """
        wanted = self._session.generation.num_speculative_tokens
        return min(wanted, self._session.num_left - 1, self._drafter.room)

    def _ask_for_block(self, num_draft_tokens: int) -> None:
        self._watch.ask(WhyPlain.EMPTY_BLOCK)
        self._expect(self._drafter.timeout_s(self._settings.block_timeout_s))
        try:
            self._drafter.ask_for_block(num_draft_tokens)
        except DraftwireError as error:
            self._give_up_drafter(error)

    def _why_no_block(self, has_drafter: bool) -> WhyPlain:
        """Returns why a round is plain, which it need not be once a drafter is ready."""
        if not self._session.generation.num_speculative_tokens:
            return WhyPlain.NOT_ASKED_FOR
        return WhyPlain.WARMING_UP if has_drafter else WhyPlain.NO_DRAFTER

    def _prepare(self, target: TargetPort) -> int:
        """Makes ready for a verifier that is to be asked to take the session; a `Prepare`."""
        has_drafter = self._drafter.restart(target)
        self._watch.ask(self._why_no_block(has_drafter), opens=True)
        return 1 if has_drafter else self._settings.plain_run_rounds

    def _begin(self) -> None:
        """Goes on with the open round on the verifier that took the session."""
        self._expect(self._settings.prompt_timeout_s)
        self._drafter.seek(self._verifier.target)

    async def _move(self, error: Exception) -> None:
        """Opens the session elsewhere; see `VerifierSeat.move`. The drafter's blocks went to the one that is lost."""
        self._drafter.drop()
        await self._verifier.move(error, self._prepare)
        self._begin()

    def _give_up_drafter(self, error: Exception) -> None:
        """Goes on without this drafter; a block that was asked for becomes a plain round, whichever comes first."""
        if self._drafter.give_up(error):
            self._ask_for_round()
