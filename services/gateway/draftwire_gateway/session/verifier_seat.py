"""The verifier of a session: one at a time, each under its own epoch. Independent of drafters and text."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog

from draftwire.errors import (
    CompletionInterruptedError,
    DraftwireError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.keys import Role
from draftwire.method.rounds import LocalDraft, PlainRun, TargetSessionSpec
from draftwire_gateway.session.event_queue import EventQueue, TaggedInbox
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import Peers, TargetPort
from draftwire_gateway.session.session_option import SessionOption
from draftwire_gateway.session.session_state import SessionState

log = structlog.get_logger()

FIRST_WAIT_SECONDS = 5.0
"""How long a new completion waits for a verifier, from when one could last take sessions, as during a rolling restart.
Where none could for longer it is known that there is none: then one attempt is all, and the error comes at once."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses between attempts to open a session; each is twice the one before."""

LONGEST_NAMED_PAUSE_S = 10.0
"""Longest pause that a full verifier can ask for."""

MAX_FUTILE_MOVES = 3
"""A session that is lost more often than this without committing a token is ended: it may crash its verifiers."""

Prepare = Callable[[TargetPort], int]
"""Called before each attempt to open the session, under its epoch. Returns how many plain rounds the verifier starts
with."""


@dataclass(slots=True, eq=False)
class VerifierSeat:
    """Holds the verifier that a session is open on, and opens the session on another one when it is lost."""

    _session: SessionState
    _peers: Peers
    _queue: EventQueue
    """Receives the verifiers' events."""
    _settings: LoopSettings
    _options: Sequence[SessionOption] = ()
    _target: TargetPort | None = None
    _lost_by: list[str] = field(default_factory=list)
    _futile_moves: int = 0
    preferred_address: str = ""
    """Address of a verifier with the prompt in its KV cache, which is tried first."""
    may_have_drawn: bool = False
    """Whether a verifier that gave no clear answer may have opened the session, and drawn its random numbers."""

    @property
    def target(self) -> TargetPort:
        """The verifier that the session is open on."""
        assert self._target is not None, "the session is not open"
        return self._target

    @property
    def address(self) -> str:
        """Address of the verifier; empty if the session is not open."""
        return "" if self._target is None else self._target.address

    async def open(self, prepare: Prepare, withdraw: Callable[[], None], *, waits_for_room: bool) -> None:
        """Opens the session on the best verifier that accepts it: `prepare` is called before each attempt, `withdraw`
        after attempts that have all failed.

        Retries for `failover_timeout_s` if it waits for room, full verifiers included; else until no verifier was
        usable for `FIRST_WAIT_SECONDS`.

        Raises:
            DraftwireError: no verifier accepts the session.
        """
        clock = asyncio.get_running_loop().time
        deadline = self._peers.last_usable_at() + FIRST_WAIT_SECONDS
        if waits_for_room:
            deadline = clock() + self._settings.failover_timeout_s
        pause_s, rule = FIRST_PAUSE_S, self._session.generation.rule
        while True:
            refusals: list[DraftwireError] = []
            # Verifiers that lost the session come last: one that hangs has few sessions, and would be chosen again.
            offering = [target for target in self._peers.targets() if rule in target.description.rules]
            for target in sorted(offering, key=self._rank):
                self._session.epoch += 1  # also after a refusal: a timeout may have opened it
                try:
                    await self._open_at(target, prepare(target))
                except ProtocolViolationError as error:
                    # The verifier was restarted, for example, and does not know its lease.
                    refusals.append(UnavailableError(f"{target.address}: {error}"))
                except (UnavailableError, NoRoomError) as error:
                    refusals.append(error)
                    self.may_have_drawn |= isinstance(error, UnavailableError)
                else:
                    return
            withdraw()
            full = [error for error in refusals if isinstance(error, NoRoomError)]
            if clock() >= deadline or (full and not waits_for_room):
                why = self._peers.why_no_target() or f"no verifier offers {rule.name} now"
                raise [*full, *refusals, UnavailableError(why)][0]
            if full:
                pause_s = max(pause_s, min(full[0].retry_after_s, LONGEST_NAMED_PAUSE_S))
            # Many sessions may have been lost at once: jitter spreads their retries.
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, deadline - clock())))
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def move(self, error: Exception, prepare: Prepare, withdraw: Callable[[], None]) -> None:
        """Opens the session on another verifier after a loss; see `open`. Late events of the lost one have an old
        epoch.

        Raises:
            DraftwireError: the error was not the verifier's fault, or no verifier is left.
        """
        if isinstance(error, NoRoomError):  # tells clients to retry from the start, but this session has begun
            error = UnavailableError(str(error))
        if not isinstance(error, UnavailableError):
            raise error
        epoch = self._session.epoch
        log.warning("gateway.verifier_lost", session_id=self._session.session_id, epoch=epoch, reason=str(error))
        self._session.add_event("verifier lost", epoch=epoch, reason=str(error))
        self._lost_by.append(self.target.address)
        self._session.statistics.num_verifiers_lost += 1
        self._futile_moves += 1
        self.drop()
        try:
            if self._futile_moves > MAX_FUTILE_MOVES:
                raise error
            await self.open(prepare, withdraw, waits_for_room=True)
        except (UnavailableError, NoRoomError) as refusal:
            raise CompletionInterruptedError(str(refusal), self._session.num_generated) from error

    def end_round(self) -> None:
        """Ends the open round: the session makes progress on this verifier."""
        self._futile_moves = 0

    def run_plain(self, num_rounds: int, draft: LocalDraft | None = None) -> None:
        """Requests rounds without a drafter, starting with the open one; with `draft`, the verifier drafts in them."""
        self._session.expected.request_plain(num_rounds, draft)
        with suppress(DraftwireError):  # a loss arrives as an event
            self.target.run_plain(PlainRun(self._session.fence, num_rounds, draft))

    def drop(self) -> None:
        """Closes the session, if it is open."""
        if self._target is not None:
            self._session.close_at(self._target)
            self._target = None

    def _rank(self, target: TargetPort) -> tuple[int, bool]:
        """Returns the sort key of a verifier; the smallest is tried first."""
        return self._lost_by.count(target.address), target.address != self.preferred_address

    async def _open_at(self, target: TargetPort, plain_rounds: int) -> None:
        """Opens the session on a verifier. On failure, closes the session there and raises."""
        spec = self._spec(target, plain_rounds)
        self._session.expected.open(spec.plain_rounds)
        try:
            await target.open(spec, TaggedInbox(self._queue, self._session.epoch))
        except BaseException:
            self._session.close_at(target)
            raise
        self._target = target
        self._session.add_event("verifier opened", address=target.address, epoch=self._session.epoch)

    def _spec(self, target: TargetPort, plain_rounds: int) -> TargetSessionSpec:
        session, generation, logprobs = self._session, self._session.generation, self._session.generation.logprobs
        spec = TargetSessionSpec(
            session_id=session.session_id,
            epoch=session.epoch,
            first_round=session.round,
            token_ids=list(session.committed.ids),
            parameters=session.parameters,
            verifying_key=session.key(Role.VERIFYING),
            plain_rounds=max(1, min(plain_rounds, session.num_left)),
            max_len=generation.max_len,
            permit_key=session.permit_key if generation.num_speculative_tokens else b"",
            logprobs=logprobs if session.lacks_prompt else replace(logprobs, prompt_logprobs=None),
            reports_draft_logprobs=generation.token_details,
        )
        for option in self._options:
            spec = option.target_spec(spec, target.description)
        return spec
