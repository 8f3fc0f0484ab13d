"""The outer loop of speculative decoding, for one session. Knows neither gRPC nor models.

    open a session on verifier and drafter; the verifier decodes the first token by itself
    repeat:
        take the verdict of the round: commit its tokens, show their text, stop if it is time to
        ask for the next round: a block of the drafter, or a plain run where there is no drafter

The loop owns what is committed. Whatever happens to the drafter, the text goes on.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import structlog

from draftwire.errors import DraftwireError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire.randomness import Role, derive_key
from draftwire.rounds import (
    Calibration,
    CommittedTokens,
    DraftSessionSpec,
    Fence,
    PlainRun,
    TargetSessionSpec,
    Verdict,
)
from draftwire.services.gateway.config import LoopSettings
from draftwire.services.gateway.ports import DrafterLost, DrafterPort, DrafterReady, Inbox, TargetLost, TargetPort
from draftwire.services.gateway.request import Generation
from draftwire.services.gateway.statistics import Statistics
from draftwire.services.gateway.text import TextStream
from draftwire.verification import rule_named

log = structlog.get_logger()


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text that became final."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion."""

    reason: FinishReason
    statistics: Statistics
    drafter_error: str
    """Why the drafter was given up; empty if it was not."""


class GenerationLoop:
    """Carries out one generation. Use once."""

    def __init__(
        self,
        generation: Generation,
        target: TargetPort,
        drafter: DrafterPort | None,
        text: TextStream,
        settings: LoopSettings,
    ) -> None:
        """Prepares; `run` does the work."""
        self._generation = generation
        self._target = target
        self._drafter = drafter if generation.num_speculative_tokens else None
        self._text = text
        self._settings = settings
        self._inbox: Inbox = asyncio.Queue()
        self._committed = CommittedTokens(generation.prompt_ids)
        self._session_id = secrets.randbits(64)
        self._epoch = 0
        self._round = 0
        self._drafter_ready = False
        self._drafter_knows = len(generation.prompt_ids)
        self._waits_for_block = False
        self._drafter_error = ""
        self._statistics = Statistics(num_prompt_tokens=len(generation.prompt_ids))

    async def run(self) -> AsyncGenerator[Delta | Finish]:
        """Yields deltas as their tokens are committed, then one finish.

        Raises:
            DraftwireError: the verifier refused the session or was lost.
        """
        started = time.perf_counter()
        opening = asyncio.create_task(self._open_drafter()) if self._drafter else None
        try:
            await self._target.open(self._target_spec(), self._inbox)
            reason: FinishReason | None = None
            while reason is None:
                verdict = await self._next_verdict()
                token_ids, reason = self._commit(verdict)
                asks = verdict.plain_rounds_left == 0
                if asks and reason is None and not self._text.may_stop:
                    self._ask_for_round()
                    asks = False
                    await asyncio.sleep(0)  # lets the request leave before we turn to the text
                text, reason = self._show(token_ids, reason)
                if asks and reason is None:
                    self._ask_for_round()
                elapsed_us = int((time.perf_counter() - started) * 1e6)
                self._statistics.time_to_first_token_us = self._statistics.time_to_first_token_us or elapsed_us
                self._statistics.duration_us = elapsed_us
                if token_ids or text:
                    yield Delta(token_ids, text)
            yield Finish(reason, self._statistics, self._drafter_error)
        finally:
            if opening is not None:
                opening.cancel()
            for peer in (self._target, self._drafter):
                if peer is not None:
                    self._close(peer)

    async def _open_drafter(self) -> None:
        """Opens the drafter's session beside everything else; the inbox learns how it went."""
        assert self._drafter is not None
        try:
            await self._drafter.open(self._draft_spec(self._drafter.description), self._inbox)
        except Exception as error:
            self._inbox.put_nowait(DrafterLost(error))
        else:
            self._inbox.put_nowait(DrafterReady())

    async def _next_verdict(self) -> Verdict:
        """Returns the verdict of the current round, dealing with everything else that arrives before it."""
        while True:
            timeout = self._timeout
            try:
                async with asyncio.timeout(timeout):
                    event = await self._inbox.get()
            except TimeoutError:
                if not self._waits_for_block:
                    raise UnavailableError(f"the verifier was silent for {timeout:g} s") from None
                event = DrafterLost(UnavailableError(f"no verified block within {timeout:g} s"))
            match event:
                case Verdict() if event.fence == self._fence:
                    return event
                case TargetLost():
                    raise event.error
                case DrafterLost():
                    self._give_up_drafter(event.error)
                case DrafterReady():
                    self._drafter_ready = True

    def _commit(self, verdict: Verdict) -> tuple[list[int], FinishReason | None]:
        """Commits a round and returns its tokens up to a stop token or the limit, and whether one of these ends it."""
        self._waits_for_block = False
        self._round += 1
        self._committed.append(verdict.token_ids)
        self._statistics.count(verdict)
        shown = verdict.token_ids[: self._generation.max_tokens - self._statistics.num_generated_tokens]
        stops = [index for index, token in enumerate(shown) if token in self._generation.stop_token_ids]
        if stops:
            shown = shown[: stops[0] + 1]
        self._statistics.num_generated_tokens += len(shown)
        if stops:
            return shown, FinishReason.STOP
        is_full = self._statistics.num_generated_tokens == self._generation.max_tokens
        return shown, FinishReason.LENGTH if is_full else None

    def _show(self, token_ids: list[int], reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Returns the text that a round's tokens make certain, and why the generation ends, if it does.

        Tokens after one that completes a stop string are taken out of `token_ids`.
        """
        visible = token_ids[:-1] if reason is FinishReason.STOP else token_ids  # a stop token has no text
        text, num_used = self._text.push(visible)
        if self._text.stopped:
            self._statistics.num_generated_tokens -= len(token_ids) - num_used
            del token_ids[num_used:]
            reason = FinishReason.STOP
        if reason is not None:
            text += self._text.finish()
            if self._text.stopped:  # the held-back rest completed a stop string
                reason = FinishReason.STOP
        return text, reason

    def _ask_for_round(self) -> None:
        """Asks for the next round: a block if the drafter can make one, else plain rounds."""
        left = self._generation.max_tokens - self._statistics.num_generated_tokens
        num_draft_tokens = min(self._generation.num_speculative_tokens, left - 1)
        if self._drafter is not None and self._drafter_ready:
            # How many tokens are drafted depends on lengths alone, never on what is drafted: see docs/exactness.md.
            num_draft_tokens = min(num_draft_tokens, self._drafter.description.context_length - len(self._committed))
            if num_draft_tokens >= 1:
                self._ask_for_block(self._drafter, num_draft_tokens)
                return
        bridging = self._drafter is not None and not self._drafter_ready
        rounds = self._settings.bridge_rounds if bridging else self._settings.plain_run_rounds
        self._target.run_plain(PlainRun(self._fence, min(rounds, left)))

    def _ask_for_block(self, drafter: DrafterPort, num_draft_tokens: int) -> None:
        base_len = self._drafter_knows
        self._drafter_knows = len(self._committed)
        self._waits_for_block = True
        try:
            drafter.calibrate(Calibration(self._fence, base_len, self._committed.ids[base_len:], num_draft_tokens))
        except DraftwireError as error:
            self._give_up_drafter(error)

    def _give_up_drafter(self, error: Exception) -> None:
        """Goes on without a drafter; a block that was asked for becomes a plain round, whichever comes first."""
        if self._drafter is None:
            # Its last block was refused after it was given up; the plain run that was to take the block's place may
            # have been dropped as the second message for the round. One too many does no harm.
            self._ask_for_round()
            return
        log.warning("gateway.drafter_lost", session_id=self._session_id, reason=str(error))
        self._drafter_error = str(error)
        self._close(self._drafter)
        self._drafter, self._drafter_ready = None, False
        if self._waits_for_block:
            self._waits_for_block = False
            self._ask_for_round()

    @property
    def _timeout(self) -> float:
        """How long the current round's verdict may take, seconds."""
        if self._waits_for_block:
            return self._settings.block_timeout_s
        return self._settings.prompt_timeout_s if self._round == 0 else self._settings.verdict_timeout_s

    def _close(self, peer: TargetPort | DrafterPort) -> None:
        with suppress(DraftwireError):  # a peer that cannot be told ends the session with its lease
            peer.close(self._session_id, self._epoch)

    @property
    def _fence(self) -> Fence:
        return Fence(self._session_id, self._epoch, self._round, len(self._committed), self._committed.hash)

    def _key(self, role: Role) -> bytes:
        """Returns the key of a role; under a coupled rule both sides draw with the same."""
        is_coupled = rule_named(self._generation.rule).is_coupled
        return derive_key(self._generation.seed, Role.COUPLING if is_coupled else role)

    def _target_spec(self) -> TargetSessionSpec:
        generation = self._generation
        rounds = 1 if self._drafter is not None else self._settings.plain_run_rounds
        return TargetSessionSpec(
            session_id=self._session_id,
            epoch=self._epoch,
            first_round=self._round,
            choice=0,
            token_ids=list(self._committed.ids),
            prompt_len=len(generation.prompt_ids),
            sampling=generation.sampling,
            rule=generation.rule,
            verifying_key=self._key(Role.VERIFYING),
            max_draft_tokens=generation.num_speculative_tokens,
            plain_rounds=min(rounds, generation.max_tokens),
            stop_token_ids=generation.stop_token_ids,
            max_len=generation.max_len,
            cache_salt=generation.cache_salt,
            drafter_id=self._drafter.instance_id if self._drafter is not None else None,
        )

    def _draft_spec(self, drafter: ModelDescription) -> DraftSessionSpec:
        generation = self._generation
        return DraftSessionSpec(
            session_id=self._session_id,
            epoch=self._epoch,
            choice=0,
            token_ids=generation.prompt_ids,
            prompt_len=len(generation.prompt_ids),
            sampling=generation.sampling,
            rule=generation.rule,
            drafting_key=self._key(Role.DRAFTING),
            stop_token_ids=generation.stop_token_ids,
            verifier_address=self._target.address,
            target_vocab_size=self._target.description.vocab_size,
            max_draft_tokens=generation.num_speculative_tokens,
            max_len=min(generation.max_len, drafter.context_length),
            cache_salt=generation.cache_salt,
        )
