"""The outer loop of speculative decoding, for one session. Knows neither gRPC nor models.

    open a session on a verifier, and beside it one on a drafter; the verifier decodes the first token by itself
    repeat:
        take the verdict of the round: commit its tokens, show their text, stop if it is time to
        ask for the next round: a block of the drafter, or a plain run where there is no drafter

The loop owns what is committed, so it survives its peers. A drafter that is lost is replaced by another one, and until
then by plain runs. A verifier that is lost is replaced too: the session is opened elsewhere with all committed ids,
under the next epoch, and goes on with the round that was open. Whatever the lost ones still say is fenced off.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

import structlog

from draftwire.errors import (
    CompletionInterruptedError,
    DraftwireError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.keys import KEY_BYTES, Role, derive_key
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftSessionSpec,
    Fence,
    Permit,
    PlainRun,
    PromptRead,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.models.description import ModelDescription
from draftwire.requests.logprobs import PromptPart, TokenLogprob
from draftwire.requests.rules import facts_of
from draftwire_gateway.config import LoopSettings
from draftwire_gateway.session.ports import (
    BlocksRefused,
    DrafterLost,
    DrafterPort,
    DrafterReady,
    Peers,
    SessionEvent,
    TargetLost,
    TargetPort,
)
from draftwire_gateway.session.request import Generation
from draftwire_gateway.session.round_times import RoundObserver, RoundWatch, WhyPlain
from draftwire_gateway.session.spans import ChoiceSpans
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.text.prompt import PromptReport
from draftwire_gateway.text.text import TextStream

log = structlog.get_logger()

FIRST_WAIT_SECONDS = 5.0
"""How long a new completion waits for a verifier where none is ready: they may be restarted, one after the other."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between attempts to open a session elsewhere; doubled from one to the next."""

MAX_FUTILE_MOVES = 3
"""A session that was lost so often without committing a token in between is given up: it may be what its verifiers die
of."""


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text of a round that became final."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each of the tokens, if they are asked for."""
    sources: list[TokenSource] = field(default_factory=list)
    """Where each of the tokens came from."""
    num_draft_tokens: int = 0
    """Draft tokens that the round judged."""
    draft_logprobs: list[float] = field(default_factory=list)
    """What the drafter gave each of the tokens, if it is asked for; see `Verdict.draft_logprobs`."""
    text_lengths: list[int] = field(default_factory=list)
    """Characters of the text that became certain with each of the tokens, if they are asked for."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion."""

    reason: FinishReason
    statistics: Statistics
    drafter_error: str
    """Why the last drafter that was given up was; empty if none was."""


@dataclass(frozen=True, slots=True)
class Said:
    """An event, and which of the session's peers, one after the other, it comes from."""

    epoch: int
    permit_number: int | None
    """None of a verifier."""
    event: SessionEvent
    at: float = field(default_factory=time.perf_counter)
    """When it arrived."""


@dataclass(frozen=True, slots=True)
class TaggedInbox:
    """An `Inbox` that remembers who speaks."""

    queue: "asyncio.Queue[Said]"
    epoch: int
    permit_number: int | None = None

    def put_nowait(self, item: SessionEvent) -> None:
        """See `Inbox.put_nowait`."""
        self.queue.put_nowait(Said(self.epoch, self.permit_number, item))


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
        self._generation = generation
        self._peers = peers
        self._text = text
        self._settings = settings
        # Peers never wait here, but there is a bound to what they say unasked: the verdicts of a block and a plain run,
        # and of a prompt that is reported, MAX_LOGPROBS + 1 entries for each of its tokens.
        self._queue: asyncio.Queue[Said] = asyncio.Queue()
        self._committed = CommittedTokens([*generation.prompt_ids, *generation.generated_ids])
        self._num_generated = len(generation.generated_ids)
        self._prompt = PromptReport(generation.prompt_ids, generation.logprobs.prompt_logprobs is not None)
        self._session_id = secrets.randbits(64)
        self._permit_key = secrets.token_bytes(KEY_BYTES)
        # A resumed completion must not draw with the numbers of the rounds that made its first tokens. There were at
        # most as many rounds as tokens.
        self._round = len(generation.generated_ids)
        self._target: TargetPort | None = None
        self._preferred_verifier = ""
        self._epoch = -1
        self._lost_by: list[str] = []
        self._futile_moves = 0
        self._drafter: DrafterPort | None = None
        self._drafter_ready = False
        self._drafter_knows = 0
        self._drafter_error = ""
        self._opening: asyncio.Task[None] | None = None
        self._permit_number = -1
        self._tried: set[int] = set()
        self._asked_at = 0.0
        self._due = 0.0
        self._waits_for_block = False
        self._is_hurried = False
        self._watch = RoundWatch(observer)
        self._spans = spans
        self.statistics = Statistics(num_prompt_tokens=len(generation.prompt_ids))

    @property
    def verifier_address(self) -> str:
        """Where the session is open; empty if it is not."""
        return "" if self._target is None else self._target.address

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
        self._preferred_verifier = verifier
        reason = self._reason_before()
        try:
            if reason is None:
                wait_s = self._settings.failover_timeout_s if waits_for_room else FIRST_WAIT_SECONDS
                await self._open_target(wait_s, waits_for_room=waits_for_room)
                on_open()
            while reason is None:
                verdict = await self._next_verdict()
                if isinstance(verdict, PromptPart):
                    yield verdict
                    continue
                token_ids, reason = self._commit(verdict)
                asks = verdict.plain_rounds_left == 0
                if asks and reason is None and not self._text.may_stop:
                    self._ask_for_round()
                    asks = False
                    await asyncio.sleep(0)  # lets the request leave before we turn to the text
                text, lengths, reason = self._show(token_ids, reason)
                if asks and reason is None:
                    self._ask_for_round()
                if reason is not None:
                    self._watch.end()
                elapsed_us = int((time.perf_counter() - started) * 1e6)
                self.statistics.time_to_first_token_us = self.statistics.time_to_first_token_us or elapsed_us
                self.statistics.duration_us = elapsed_us
                if token_ids or text:
                    yield self._delta(verdict, token_ids, text, lengths)
            yield Finish(reason, self.statistics, self._drafter_error)
        finally:
            self._drop_drafter()
            self._drop_target()
            if self._spans is not None:
                self._spans.end(self._session_id, self.statistics, reason.value if reason is not None else "")

    # Verifiers

    async def _open_target(self, wait_s: float, *, waits_for_room: bool) -> None:
        """Opens the session on the best verifier that takes it, and seeks a drafter.

        Args:
            wait_s: for how long all verifiers are tried again and again.
            waits_for_room: whether also those that are full are.

        Raises:
            DraftwireError: none takes it.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        pause_s = FIRST_PAUSE_S
        while True:
            refusals: list[DraftwireError] = []
            # Those that lost the session come last: one that hangs has few sessions, and so would be chosen again.
            for target in sorted(self._peers.targets(), key=self._rank):
                self._epoch += 1  # also after a refusal, which may have come too late to be one
                self._tried = set()
                has_drafter = self._next_drafter(target) is not None
                inbox = TaggedInbox(self._queue, self._epoch)
                self._watch.ask(self._why_no_block(has_drafter), opens=True)
                try:
                    await target.open(self._target_spec(has_drafter), inbox)
                except (UnavailableError, NoRoomError, ProtocolViolationError) as error:
                    # It does not know its lease, say, because it was restarted a moment ago.
                    is_violation = isinstance(error, ProtocolViolationError)
                    refusals.append(UnavailableError(f"{target.address}: {error}") if is_violation else error)
                    self._close(target)
                    continue
                except BaseException:
                    self._close(target)
                    raise
                self._target = target
                self._note("verifier opened", address=target.address, epoch=self._epoch)
                self._expect(self._settings.prompt_timeout_s)
                self._seek_drafter()
                return
            full = [error for error in refusals if isinstance(error, NoRoomError)]  # trying again helps
            if clock() >= deadline or (full and not waits_for_room):
                raise [*full, *refusals, UnavailableError("no verifier can be reached")][0]
            if full:
                pause_s = max(pause_s, full[0].retry_after_s)
            # Many sessions may have been lost at once: they must not all come back at once, again and again.
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, deadline - clock())))
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    def _rank(self, target: TargetPort) -> tuple[int, bool]:
        """Returns how well a verifier suits, the least the best."""
        return self._lost_by.count(target.address), target.address != self._preferred_verifier

    async def _move(self, error: Exception) -> None:
        """Opens the session elsewhere.

        Raises:
            DraftwireError: it was not the verifier's fault, or no verifier is left.
        """
        if isinstance(error, NoRoomError):  # what has begun is moved; only what has not may be tried again as a whole
            error = UnavailableError(str(error))
        if not isinstance(error, UnavailableError):
            raise error
        log.warning("gateway.verifier_lost", session_id=self._session_id, epoch=self._epoch, reason=str(error))
        self._note("verifier lost", epoch=self._epoch, reason=str(error))
        assert self._target is not None, "only an open session can be lost"
        self._lost_by.append(self._target.address)
        self.statistics.num_verifiers_lost += 1
        self._futile_moves += 1
        self._waits_for_block = False
        self._drop_drafter()
        self._drop_target()
        try:
            if self._futile_moves > MAX_FUTILE_MOVES:
                raise error
            await self._open_target(self._settings.failover_timeout_s, waits_for_room=True)
        except (UnavailableError, NoRoomError) as refusal:
            raise CompletionInterruptedError(str(refusal), self._num_generated) from error

    def _drop_target(self) -> None:
        if self._target is not None:
            self._close(self._target)
            self._target = None

    # Verdicts

    async def _next_verdict(self) -> Verdict | PromptPart:
        """Returns the verdict of the current round, or more of the prompt, and deals with all else that arrives."""
        while True:
            try:
                async with asyncio.timeout_at(self._due):
                    said = await self._queue.get()
            except TimeoutError:
                await self._deal_with_silence()
                continue
            if said.epoch != self._epoch or said.permit_number not in (None, self._permit_number):
                continue  # of a peer that was given up
            match said.event:
                case Verdict() as verdict if verdict.fence == self._fence:
                    if self._reports(verdict):
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
                    if permit_number == self._permit_number:
                        self._give_up_drafter(error)
                case DrafterLost(error):
                    self._give_up_drafter(error)
                case DrafterReady():
                    self._drafter_ready = True
                    self._note("drafter ready", epoch=self._epoch)

    def _reports(self, verdict: Verdict) -> bool:
        """Whether a verdict, and what came before it, says all that is to be reported."""
        is_wanted = self._generation.logprobs.logprobs is not None
        has_draft = len(verdict.draft_logprobs) == len(verdict.token_ids) * self._generation.token_details
        has_all = len(verdict.logprobs) == len(verdict.token_ids) * is_wanted
        return not self._prompt.is_missing and has_all and has_draft

    async def _take_prompt(self, part: PromptPart) -> PromptPart | None:
        """Returns what is new in a part of the prompt, if anything is."""
        try:
            new = self._prompt.take(part)
        except ProtocolViolationError as error:
            await self._move(UnavailableError(str(error)))
            return None
        if new is not None:
            self._expect(self._settings.prompt_timeout_s)
        return new

    async def _deal_with_silence(self) -> None:
        """Does what is to be done when the current round takes too long."""
        if not self._waits_for_block:
            await self._move(UnavailableError("the verifier was silent for too long"))
        elif self._is_hurried or self._drafter is None:
            self._give_up_drafter(UnavailableError("no block in time, not even a part of one"))
        else:
            self._is_hurried = True
            self._expect(self._settings.block_timeout_s)
            try:
                self._drafter.send_drafted(SendDrafted(self._session_id, self._epoch, self._round))
            except DraftwireError as error:
                self._give_up_drafter(error)

    def _commit(self, verdict: Verdict) -> tuple[list[int], FinishReason | None]:
        """Commits a round and returns its tokens up to a stop token or the limit, and whether one of these ends it."""
        if self._waits_for_block and self._drafter is not None:
            self._drafter.pace.learn(asyncio.get_running_loop().time() - self._asked_at)
        self._waits_for_block = False
        self._futile_moves = 0
        self._round += 1
        self._committed.append(verdict.token_ids)
        self.statistics.count(verdict)
        shown = verdict.token_ids[: self._generation.max_tokens - self._num_generated]
        stops = [index for index, token in enumerate(shown) if token in self._generation.stop_token_ids]
        if stops:
            shown = shown[: stops[0] + 1]
        self._count(len(shown))
        self._expect(self._settings.verdict_timeout_s)
        if stops:
            return shown, FinishReason.STOP
        return shown, FinishReason.LENGTH if self._num_generated == self._generation.max_tokens else None

    def _delta(self, verdict: Verdict, token_ids: list[int], text: str, lengths: list[int]) -> Delta:
        """Returns what is told of a round, of whose tokens the first may be part of the completion alone."""
        num_tokens = len(token_ids)
        lengths = lengths + [0] * (num_tokens - len(lengths)) if self._generation.token_details else []
        if lengths:  # what was held back until the end became certain with the last token
            lengths[-1] += len(text) - sum(lengths)
        return Delta(
            token_ids,
            text,
            verdict.logprobs[:num_tokens],
            verdict.sources[:num_tokens],
            verdict.num_draft_tokens,
            verdict.draft_logprobs[:num_tokens],
            lengths,
        )

    def _show(self, token_ids: list[int], reason: FinishReason | None) -> tuple[str, list[int], FinishReason | None]:
        """Returns the text that a round's tokens make certain, what of it each does, and why all ends, if so.

        Tokens after one that completes a stop string are taken out of `token_ids`.
        """
        visible = token_ids[:-1] if reason is FinishReason.STOP else token_ids  # a stop token has no text
        text, num_used, lengths = self._text.push(visible)
        if self._text.stopped:
            self._count(num_used - len(token_ids))
            del token_ids[num_used:]
            reason = FinishReason.STOP
        if reason is not None:
            text += self._text.finish()
            if self._text.stopped:  # the held-back rest completed a stop string
                reason = FinishReason.STOP
        return text, lengths, reason

    def _count(self, num_tokens: int) -> None:
        self._num_generated += num_tokens
        self.statistics.num_generated_tokens += num_tokens

    def _reason_before(self) -> FinishReason | None:
        """Returns why what was generated before is complete already, if it is. All of its text was shown, then."""
        generated = self._generation.generated_ids
        stops = bool(generated) and generated[-1] in self._generation.stop_token_ids
        if len(generated) == self._generation.max_tokens:
            self._text.finish()  # may complete a stop string
        if stops or self._text.stopped:
            return FinishReason.STOP
        if self._prompt.is_missing:  # which a verifier tells along with a token, also where none is to be shown
            return None
        return FinishReason.LENGTH if len(generated) == self._generation.max_tokens else None

    # Rounds

    def _ask_for_round(self) -> None:
        """Asks for the next round: a block if a drafter can make one, else plain rounds."""
        left = self._generation.max_tokens - self._num_generated
        if self._drafter is None:
            self._seek_drafter()
        elif self._drafter_ready:
            # How many tokens are drafted depends on lengths alone, never on what is drafted: see docs/exactness.md.
            room = self._drafter.description.context_length - len(self._committed)
            num_draft_tokens = min(self._generation.num_speculative_tokens, left - 1, room)
            if num_draft_tokens >= 1:
                self._ask_for_block(self._drafter, num_draft_tokens)
                return
        bridging = self._drafter is not None and not self._drafter_ready
        rounds = self._settings.bridge_rounds if bridging else self._settings.plain_run_rounds
        assert self._target is not None, "rounds follow verdicts"
        self._watch.ask(WhyPlain.NO_ROOM if self._drafter_ready else self._why_no_block(bridging))
        self._expect(self._settings.verdict_timeout_s)
        with suppress(DraftwireError):  # if it is lost, we hear of it
            self._target.run_plain(PlainRun(self._fence, min(rounds, left)))

    def _why_no_block(self, has_drafter: bool) -> WhyPlain:
        """Returns why a round is plain, which it need not be once a drafter is ready."""
        if not self._generation.num_speculative_tokens:
            return WhyPlain.NOT_ASKED_FOR
        return WhyPlain.WARMING_UP if has_drafter else WhyPlain.NO_DRAFTER

    def _ask_for_block(self, drafter: DrafterPort, num_draft_tokens: int) -> None:
        base_len = self._drafter_knows
        self._drafter_knows = len(self._committed)
        self._waits_for_block, self._is_hurried = True, False
        self._asked_at = asyncio.get_running_loop().time()
        self._watch.ask(WhyPlain.EMPTY_BLOCK)
        self._expect(drafter.pace.patience_s(self._settings.block_timeout_s))
        try:
            drafter.calibrate(Calibration(self._fence, base_len, self._committed.ids[base_len:], num_draft_tokens))
        except DraftwireError as error:
            self._give_up_drafter(error)

    def _expect(self, seconds: float) -> None:
        """Says how long the current round may take from now on."""
        self._due = asyncio.get_running_loop().time() + seconds

    # Drafters

    def _next_drafter(self, target: TargetPort) -> DrafterPort | None:
        """Returns the drafter to ask next, if there is one that was not asked yet and could draft something."""
        unwanted = set(self._tried)
        longest = 0
        while self._generation.num_speculative_tokens:
            drafter = self._peers.drafter_for(target, unwanted)
            if drafter is None:
                break
            if len(self._committed) < drafter.description.context_length:
                return drafter
            longest = max(longest, drafter.description.context_length)
            unwanted.add(drafter.instance_id)
        if longest and self._permit_number < 0:  # else one has drafted as far as it could
            self._drafter_error = f"the text is longer than the drafter's context of {longest}"
        return None

    def _seek_drafter(self) -> None:
        """Opens the session on the next drafter, beside everything else; the queue learns how it went."""
        assert self._target is not None, "a drafter needs to know where its blocks go"
        drafter = self._next_drafter(self._target)
        if drafter is None:
            return
        self._tried.add(drafter.instance_id)
        self._drafter, self._drafter_ready = drafter, False
        self._drafter_knows = len(self._committed)
        self._permit_number += 1
        inbox = TaggedInbox(self._queue, self._epoch, self._permit_number)
        spec = self._draft_spec(drafter.description, self._target)
        self._opening = asyncio.create_task(self._open_drafter(drafter, spec, inbox))

    async def _open_drafter(self, drafter: DrafterPort, spec: DraftSessionSpec, inbox: TaggedInbox) -> None:
        try:
            await drafter.open(spec, inbox)
        except Exception as error:
            inbox.put_nowait(DrafterLost(error))
        else:
            inbox.put_nowait(DrafterReady())

    def _give_up_drafter(self, error: Exception) -> None:
        """Goes on without this drafter; a block that was asked for becomes a plain round, whichever comes first."""
        if self._drafter is None:
            return  # the loss was told in several ways
        # What is not one of our own errors may quote the prompt.
        reason = str(error) if isinstance(error, DraftwireError) else f"internal error: {type(error).__name__}"
        log.warning("gateway.drafter_lost", session_id=self._session_id, reason=reason)
        self._note("drafter lost", epoch=self._epoch, reason=reason)
        self._drafter_error = reason
        self.statistics.num_drafters_lost += 1
        self._drop_drafter()
        if self._waits_for_block:
            self._waits_for_block = False
            self._ask_for_round()

    def _drop_drafter(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._drafter is not None:
            self._close(self._drafter)
            self._drafter, self._drafter_ready = None, False

    def _close(self, peer: TargetPort | DrafterPort) -> None:
        with suppress(DraftwireError):  # a peer that cannot be told ends the session with its lease
            peer.close(self._session_id, self._epoch)

    def _note(self, event: str, **attributes: int | str) -> None:
        if self._spans is not None:
            self._spans.note(event, **attributes)

    @property
    def _traceparent(self) -> str:
        return "" if self._spans is None else self._spans.traceparent

    @property
    def _fence(self) -> Fence:
        return Fence(self._session_id, self._epoch, self._round, len(self._committed), self._committed.hash)

    def _key(self, role: Role) -> bytes:
        """Returns the key of a role; under a coupled rule both sides draw with the same."""
        is_coupled = facts_of(self._generation.rule).is_coupled
        return derive_key(self._generation.seed, Role.COUPLING if is_coupled else role)

    def _target_spec(self, has_drafter: bool) -> TargetSessionSpec:
        generation = self._generation
        rounds = 1 if has_drafter else self._settings.plain_run_rounds
        return TargetSessionSpec(
            session_id=self._session_id,
            epoch=self._epoch,
            first_round=self._round,
            choice=generation.choice,
            token_ids=list(self._committed.ids),
            prompt_len=len(generation.prompt_ids),
            sampling=generation.sampling,
            rule=generation.rule,
            verifying_key=self._key(Role.VERIFYING),
            max_draft_tokens=generation.num_speculative_tokens,
            plain_rounds=max(1, min(rounds, generation.max_tokens - self._num_generated)),
            stop_token_ids=generation.stop_token_ids,
            max_len=generation.max_len,
            cache_salt=generation.cache_salt,
            permit_key=self._permit_key if generation.num_speculative_tokens else b"",
            logprobs=generation.logprobs
            if self._prompt.is_missing
            else replace(generation.logprobs, prompt_logprobs=None),
            reports_draft_logprobs=generation.token_details,
            traceparent=self._traceparent,
        )

    def _draft_spec(self, drafter: ModelDescription, target: TargetPort) -> DraftSessionSpec:
        generation = self._generation
        return DraftSessionSpec(
            session_id=self._session_id,
            epoch=self._epoch,
            choice=generation.choice,
            token_ids=list(self._committed.ids),
            prompt_len=len(generation.prompt_ids),
            sampling=generation.sampling,
            rule=generation.rule,
            drafting_key=self._key(Role.DRAFTING),
            stop_token_ids=generation.stop_token_ids,
            verifier_address=target.address,
            target_vocab_size=target.description.vocab_size,
            max_draft_tokens=generation.num_speculative_tokens,
            max_len=min(generation.max_len, drafter.context_length),
            permit=Permit.make(self._permit_key, self._permit_number),
            cache_salt=generation.cache_salt,
            traceparent=self._traceparent,
        )
