"""The drafter of a session: at most one at a time, each with a permit of its own. Independent of text.

A drafter whose block is late is asked to send what it has drawn, and replies when that is on its way. One that does not
reply in time is *asleep*: the round becomes plain, the session stays open on it, and it is asked for blocks again once
it replies. A drafter that has replied is never blamed for the verifier's silence.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.rounds import BlockSent, DraftSessionSpec, Verdict
from draftwire.models.description import FEATURES, FLUSH_REPLIES, NEEDS_FEATURES, ModelDescription
from draftwire_gateway.session.event_queue import EventQueue, TaggedInbox
from draftwire_gateway.session.policy import Policy
from draftwire_gateway.session.ports import DrafterLost, DrafterPort, DrafterReady, Peers, TargetPort
from draftwire_gateway.session.seated_drafter import BlockFate, SeatedDrafter
from draftwire_gateway.session.session_option import SessionOption
from draftwire_gateway.session.session_state import SessionState

log = structlog.get_logger()

NO_BLOCK = "no block in time, not even a part of one"

LEAST_LEFT = 3
"""Tokens that a text must still have to be drafted for: one of the plain round while the drafter reads, one that is
drafted, and one of the verifier after it."""
MAX_MISSING_BLOCKS = 2
"""A drafter is given up when so many blocks in a row, which it says that it sent, did not reach the verifier."""


@dataclass(slots=True, eq=False)
class DrafterSeat:
    """Holds the current drafter of a session, and opens the session on the next one in the background."""

    _session: SessionState
    _peers: Peers
    _queue: EventQueue
    """Receives the drafters' events."""
    _policy: Policy
    _options: Sequence[SessionOption] = ()
    _drafter: SeatedDrafter | None = None
    _opening: asyncio.Task[None] | None = None
    _tried: set[int] = field(default_factory=set)
    permit_number: int = -1
    """Permit number of the latest drafter; each drafter has a higher one."""
    error: str = ""
    """Error of the drafter that was lost last; empty if none was lost."""

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter, ready or not."""
        return self._drafter is not None

    @property
    def is_ready(self) -> bool:
        """Whether there is a drafter that has finished its prefill."""
        return self._drafter is not None and self._drafter.is_ready

    @property
    def is_awaited(self) -> bool:
        """Whether a block of the open round is awaited: not if it was late, though it may still be verified."""
        return self._drafter is not None and self._drafter.is_awaited

    @property
    def is_asleep(self) -> bool:
        """Whether the drafter did not reply in time, and is not asked for blocks until it does."""
        return self._drafter is not None and self._drafter.is_asleep

    @property
    def room(self) -> int:
        """How many tokens the drafter may draft now; 0 if no drafter is ready and awake."""
        return 0 if self._drafter is None or not self.is_ready or self.is_asleep else self._drafter.room

    @property
    def drafter(self) -> SeatedDrafter:
        """The drafter that is asked for blocks."""
        assert self._drafter is not None, "only a drafter that is ready is asked"
        return self._drafter

    def restart(self, target: TargetPort) -> bool:
        """Makes all drafters eligible again, before the session is opened on a verifier; returns whether there is a
        drafter that could draft for that verifier, and text for it.
        """
        self._tried = set()
        drafter = self._next(target)
        self._join(target, drafter)
        return drafter is not None and self._session.num_left >= LEAST_LEFT

    def seek(self, target: TargetPort, longest_sleep_s: float = math.inf) -> None:
        """Opens the session on the next drafter, unless there is one already. The queue receives the outcome. A drafter
        that has been asleep for longer than `longest_sleep_s` is given up if there is another one.
        """
        if self._drafter is not None:
            if self._drafter.slept_s() <= longest_sleep_s or self._next(target) is None:
                return
            self.give_up(UnavailableError(NO_BLOCK))
        port = self._next(target)
        self._join(target, port)
        if port is None:
            return
        if not self._policy.uses_drafter or self._session.num_left < LEAST_LEFT:
            return  # its prefill alone would cost time
        self._tried.add(port.instance_id)
        self.permit_number += 1
        self._drafter = SeatedDrafter(port, target, self._session, self._options, self.permit_number)
        inbox = TaggedInbox(self._queue, self._session.epoch, self.permit_number)
        self._opening = asyncio.create_task(_open(port, self._drafter.spec(), inbox))

    def mark_ready(self) -> None:
        """Marks the drafter as ready after its prefill, unless it was lost meanwhile."""
        if self._drafter is not None:
            self._drafter.is_ready = True
            self._session.add_event("drafter ready", epoch=self._session.epoch)

    def note_sent(self, sent: BlockSent, arrived_at: float) -> bool:
        """Records the drafter's reply to a flush, if there still is one; see `SeatedDrafter.note_sent`."""
        return self._drafter is not None and self._drafter.note_sent(sent, arrived_at)

    def end_round(self, verdict: Verdict, arrived_at: float) -> None:
        """Ends the open round, and gives the drafter up if its blocks do not come. The verdict's arrival is by the
        event loop's clock: who reads the text may have been away since.
        """
        drafter = self._drafter
        for option in self._options:
            option.end_round(verdict, was_held=drafter is not None and drafter.is_held)
        if drafter is None:
            return
        match drafter.end_round(verdict, arrived_at):
            case BlockFate.MISSING if drafter.num_missing == MAX_MISSING_BLOCKS:
                self.give_up(UnavailableError("its blocks do not reach the verifier"))
            case BlockFate.LATE if not drafter.is_capable_of(FLUSH_REPLIES):  # nobody would say when it is awake
                self.give_up(UnavailableError(NO_BLOCK))

    def give_up(self, error: Exception) -> bool:
        """Drops the drafter, unless it was dropped before: one loss may cause several events. Returns whether a block
        was awaited, so that the open round must be requested in another way.
        """
        if self._drafter is None:
            return False
        # Messages of other exceptions may quote the prompt.
        reason = str(error) if isinstance(error, DraftwireError) else f"internal error: {type(error).__name__}"
        log.warning("gateway.drafter_lost", session_id=self._session.session_id, reason=reason)
        self._session.add_event("drafter lost", epoch=self._session.epoch, reason=reason)
        self.error = reason
        self._session.statistics.num_drafters_lost += 1
        was_awaited = self.is_awaited
        self.drop()
        return was_awaited

    def end(self) -> None:
        """Ends the session."""
        self.drop()
        self._policy.leave()

    def drop(self) -> None:
        """Closes the session on the drafter, or cancels its opening. To be called before the epoch ends."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._drafter is not None:
            self._session.close_at(self._drafter.port)
        self._drafter = None

    def _join(self, target: TargetPort, drafter: DrafterPort | None) -> None:
        for option in self._options:
            option.join(target.description)
        self._policy.join(target, drafter)

    def _next(self, target: TargetPort) -> DrafterPort | None:
        """Returns the next drafter that was not tried yet and whose context is long enough; None if there is none.

        A session keeps its draft model while that has one, also if its rounds are plain: else it would be counted in
        and out of pairs with every round.
        """
        longest = 0
        found: dict[str, DrafterPort] = {}
        is_wanted = self._session.generation.num_speculative_tokens > 0
        for drafter in self._peers.drafters_for(target, self._tried) if is_wanted else ():
            model = drafter.description
            if model.name in found or not self._accepts(model, target.description):
                continue
            if len(self._session.committed) < model.context_length:
                found[model.name] = drafter
            else:
                longest = max(longest, model.context_length)
        if found:
            return self._policy.preferred(target, list(found.values()), self._session.session_id)
        if longest and self.permit_number < 0:  # otherwise a drafter was used until its context was full
            self.error = f"the text is longer than the drafter's context of {longest}"
        return None

    def _accepts(self, drafter: ModelDescription, target: ModelDescription) -> bool:
        """Whether the drafters of a model may draft: not those that need features which the verifier does not send."""
        if NEEDS_FEATURES in drafter.capabilities and FEATURES not in target.capabilities:
            return False
        models = self._session.generation.draft_models
        is_named = models is None or drafter.name in models
        return is_named and all(option.accepts(drafter, target) for option in self._options)


async def _open(drafter: DrafterPort, spec: DraftSessionSpec, inbox: TaggedInbox) -> None:
    try:
        await drafter.open(spec, inbox)
    except Exception as error:
        inbox.put_nowait(DrafterLost(error))
    else:
        inbox.put_nowait(DrafterReady())
