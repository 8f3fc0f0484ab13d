"""Who verifies a session: one verifier after the other, each under its own epoch. Knows no drafters and no text."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from draftwire.errors import (
    CompletionInterruptedError,
    DraftwireError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.keys import Role
from draftwire.method.rounds import PlainRun, TargetSessionSpec
from draftwire_gateway.config import LoopSettings
from draftwire_gateway.session.ports import Peers, Said, TaggedInbox, TargetPort
from draftwire_gateway.session.session_state import SessionState

log = structlog.get_logger()

FIRST_WAIT_SECONDS = 5.0
"""How long a new completion waits for a verifier where none is ready: they may be restarted, one after the other."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between attempts to open a session elsewhere; doubled from one to the next."""

MAX_FUTILE_MOVES = 3
"""A session that was lost so often without committing a token in between is given up: it may be what its verifiers die
of."""

Prepare = Callable[[TargetPort], int]
"""Called before each attempt to open the session, under its epoch. Returns how many rounds the verifier is to decode by
itself at first."""


class VerifierSeat:
    """Holds the verifier that a session is open on, and opens it on another one when that is lost."""

    def __init__(self, session: SessionState, peers: Peers, queue: asyncio.Queue[Said], settings: LoopSettings) -> None:
        """Opens nothing yet.

        Args:
            session: what is opened, with all that it has committed by then.
            peers: who may be asked.
            queue: where what verifiers say arrives.
            settings: how long to wait.
        """
        self._session = session
        self._peers = peers
        self._queue = queue
        self._settings = settings
        self._target: TargetPort | None = None
        self._lost_by: list[str] = []
        self._futile_moves = 0
        self.preferred_address = ""
        """Of the one that holds the prompt already, and is tried first."""

    @property
    def target(self) -> TargetPort:
        """The verifier that the session is open on."""
        assert self._target is not None, "the session is not open"
        return self._target

    @property
    def address(self) -> str:
        """Where the session is open; empty if it is not."""
        return "" if self._target is None else self._target.address

    async def open(self, prepare: Prepare, *, waits_for_room: bool) -> None:
        """Opens the session on the best verifier that takes it.

        Args:
            prepare: what is to be done before each attempt.
            waits_for_room: whether verifiers that are full are tried again, all of them for `failover_timeout_s`.

        Raises:
            DraftwireError: none takes it.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + (self._settings.failover_timeout_s if waits_for_room else FIRST_WAIT_SECONDS)
        pause_s = FIRST_PAUSE_S
        while True:
            refusals: list[DraftwireError] = []
            # Those that lost the session come last: one that hangs has few sessions, and so would be chosen again.
            for target in sorted(self._offering(), key=self._rank):
                self._session.epoch += 1  # also after a refusal, which may have come too late to be one
                try:
                    await self._open_at(target, prepare(target))
                except ProtocolViolationError as error:
                    # It does not know its lease, say, because it was restarted a moment ago.
                    refusals.append(UnavailableError(f"{target.address}: {error}"))
                except (UnavailableError, NoRoomError) as error:
                    refusals.append(error)
                else:
                    return
            full = [error for error in refusals if isinstance(error, NoRoomError)]  # trying again helps
            if clock() >= deadline or (full and not waits_for_room):
                raise [*full, *refusals, UnavailableError(self._nobody())][0]
            if full:
                pause_s = max(pause_s, full[0].retry_after_s)
            # Many sessions may have been lost at once: they must not all come back at once, again and again.
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, deadline - clock())))
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def move(self, error: Exception, prepare: Prepare) -> None:
        """Opens the session elsewhere, since its verifier is lost. Whatever that one still says is of an old epoch.

        Args:
            error: how it was lost.
            prepare: what is to be done before each attempt.

        Raises:
            DraftwireError: it was not the verifier's fault, or no verifier is left.
        """
        if isinstance(error, NoRoomError):  # what has begun is moved; only what has not may be tried again as a whole
            error = UnavailableError(str(error))
        if not isinstance(error, UnavailableError):
            raise error
        epoch = self._session.epoch
        log.warning("gateway.verifier_lost", session_id=self._session.session_id, epoch=epoch, reason=str(error))
        self._session.note("verifier lost", epoch=epoch, reason=str(error))
        self._lost_by.append(self.target.address)
        self._session.statistics.num_verifiers_lost += 1
        self._futile_moves += 1
        self.drop()
        try:
            if self._futile_moves > MAX_FUTILE_MOVES:
                raise error
            await self.open(prepare, waits_for_room=True)
        except (UnavailableError, NoRoomError) as refusal:
            raise CompletionInterruptedError(str(refusal), self._session.num_generated) from error

    def end_round(self) -> None:
        """Notes that the open round was committed: the session gets on here."""
        self._futile_moves = 0

    def run_plain(self, num_rounds: int) -> None:
        """Asks for plain rounds, beginning with the open one."""
        with suppress(DraftwireError):  # if it is lost, we hear of it
            self.target.run_plain(PlainRun(self._session.fence, num_rounds))

    def drop(self) -> None:
        """Ends the session where it is open, if it is."""
        if self._target is not None:
            self._session.close_at(self._target)
            self._target = None

    def _offering(self) -> list[TargetPort]:
        """Returns the verifiers that offer the session's rule."""
        rule = self._session.generation.rule
        return [target for target in self._peers.targets() if rule in target.description.rules]

    def _nobody(self) -> str:
        """Returns why there is no verifier to ask."""
        name = self._session.generation.rule.name
        return f"no verifier offers {name} now" if self._peers.targets() else "no verifier can be reached"

    def _rank(self, target: TargetPort) -> tuple[int, bool]:
        """Returns how well a verifier suits, the least the best."""
        return self._lost_by.count(target.address), target.address != self.preferred_address

    async def _open_at(self, target: TargetPort, plain_rounds: int) -> None:
        """Opens the session on a verifier, or raises why not, and then it is closed there."""
        try:
            await target.open(self._spec(plain_rounds), TaggedInbox(self._queue, self._session.epoch))
        except BaseException:
            self._session.close_at(target)
            raise
        self._target = target
        self._session.note("verifier opened", address=target.address, epoch=self._session.epoch)

    def _spec(self, plain_rounds: int) -> TargetSessionSpec:
        session, generation = self._session, self._session.generation
        return TargetSessionSpec(
            session_id=session.session_id,
            epoch=session.epoch,
            first_round=session.round,
            token_ids=list(session.committed.ids),
            parameters=session.parameters,
            verifying_key=session.key(Role.VERIFYING),
            plain_rounds=max(1, min(plain_rounds, session.num_left)),
            max_len=generation.max_len,
            permit_key=session.permit_key if generation.num_speculative_tokens else b"",
            logprobs=generation.logprobs
            if session.prompt.is_missing
            else replace(generation.logprobs, prompt_logprobs=None),
            reports_draft_logprobs=generation.token_details,
        )
