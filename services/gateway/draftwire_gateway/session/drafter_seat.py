"""The drafter of a session: at most one at a time, each with a permit of its own. Independent of text."""

import asyncio

import structlog

from draftwire.errors import DraftwireError
from draftwire.method.keys import Role
from draftwire.method.rounds import Calibration, DraftSessionSpec, Permit, SendDrafted
from draftwire.models.description import ISSUED_IDENTITIES, PARTIAL_BLOCKS, ModelDescription
from draftwire_gateway.session.ports import (
    DrafterLost,
    DrafterPort,
    DrafterReady,
    PeerEvent,
    Peers,
    TaggedInbox,
    TargetPort,
)
from draftwire_gateway.session.session_state import SessionState

log = structlog.get_logger()


class DrafterSeat:
    """Holds the current drafter of a session, and opens the session on the next one in the background."""

    def __init__(self, session: SessionState, peers: Peers, queue: asyncio.Queue[PeerEvent]) -> None:
        """Opens no session before `seek`.

        Args:
            session: the session to draft for.
            peers: the available drafters.
            queue: receives the drafters' events.
        """
        self._session = session
        self._peers = peers
        self._queue = queue
        self._drafter: DrafterPort | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tried: set[int] = set()
        self._known_len = 0
        self._verifier_address = ""
        self._has_permit = False
        self._asked_at = 0.0
        self.permit_number = -1
        """Permit number of the latest drafter; each drafter has a higher one."""
        self.is_ready = False
        """Whether there is a drafter that has finished its prefill."""
        self.is_awaited = False
        """Whether the drafter was asked for a block of the open round."""
        self.flush_requested = False
        """Whether the drafter was asked for the tokens drawn so far of that block."""
        self.error = ""
        """Error of the drafter that was lost last; empty if none was lost."""

    @property
    def is_warming_up(self) -> bool:
        """Whether a drafter is still in its prefill."""
        return self._drafter is not None and not self.is_ready

    @property
    def room(self) -> int:
        """How many more tokens fit into the context of the drafter; 0 if no drafter is ready."""
        if self._drafter is None or not self.is_ready:
            return 0
        return self._drafter.description.context_length - len(self._session.committed)

    def restart(self, target: TargetPort) -> bool:
        """Makes all drafters eligible again, before the session is opened on a verifier.

        Returns:
            Whether there is a drafter that could draft for that verifier.
        """
        self._tried = set()
        return self._next(target) is not None

    def seek(self, target: TargetPort) -> None:
        """Opens the session on the next drafter, unless there is one already. The queue receives the outcome.

        Args:
            target: the verifier that its blocks go to.
        """
        drafter = None if self._drafter is not None else self._next(target)
        if drafter is None:
            return
        self._tried.add(drafter.instance_id)
        self._drafter, self.is_ready = drafter, False
        self._known_len = len(self._session.committed)
        self.permit_number += 1
        self._verifier_address = target.address
        self._has_permit = not _has_identity(drafter.description, target.description)
        inbox = TaggedInbox(self._queue, self._session.epoch, self.permit_number)
        self._opening = asyncio.create_task(_open(drafter, self._spec(drafter.description, target), inbox))

    def mark_ready(self) -> None:
        """Marks the drafter as ready after its prefill, unless it was lost meanwhile."""
        if self._drafter is not None:
            self.is_ready = True
            self._session.add_event("drafter ready", epoch=self._session.epoch)

    def timeout_s(self, most: float) -> float:
        """Returns the timeout of the drafter's next block, after which `request_flush` is due; at most `most`."""
        return self._ready_drafter.round_trip.timeout_s(most)

    def ask_for_block(self, num_draft_tokens: int) -> None:
        """Requests a block of the open round, and sends the tokens committed since the last one.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        base_len = self._known_len
        self._known_len = len(self._session.committed)
        self.is_awaited, self.flush_requested = True, False
        self._asked_at = asyncio.get_running_loop().time()
        new_ids = self._session.committed.ids[base_len:]
        permit = None if self._has_permit else self._named_permit()
        self._has_permit = True
        calibration = Calibration(self._session.fence, base_len, new_ids, num_draft_tokens, permit=permit)
        self._ready_drafter.calibrate(calibration)

    @property
    def can_flush(self) -> bool:
        """Whether the drafter supports partial blocks, and was not asked for this one yet."""
        return not self.flush_requested and PARTIAL_BLOCKS in self._ready_drafter.description.capabilities

    def request_flush(self) -> None:
        """Requests the tokens drawn so far of the block.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        self.flush_requested = True
        self._ready_drafter.send_drafted(
            SendDrafted(self._session.session_id, self._session.epoch, self._session.round)
        )

    def end_round(self) -> None:
        """Ends the open round; if a block was requested, updates the drafter's round-trip estimate."""
        if self.is_awaited and self._drafter is not None:
            self._drafter.round_trip.add(asyncio.get_running_loop().time() - self._asked_at)
        self.is_awaited = False

    def give_up(self, error: Exception) -> bool:
        """Drops the drafter, unless it was dropped before: one loss may cause several events.

        Returns:
            Whether a block was awaited, so that the open round must be requested in another way.
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

    def drop(self) -> None:
        """Closes the session on the drafter, or cancels its opening. To be called before the epoch ends."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._drafter is not None:
            self._session.close_at(self._drafter)
        self._drafter, self.is_ready, self.is_awaited = None, False, False

    @property
    def _ready_drafter(self) -> DrafterPort:
        assert self._drafter is not None, "only a drafter that is ready is asked"
        return self._drafter

    def _named_permit(self) -> Permit:
        """Returns the permit of the drafter, which nobody else can show."""
        drafter_id = self._ready_drafter.known_as(self._verifier_address)
        return Permit.make(self._session.permit_key, self.permit_number, drafter_id)

    def _next(self, target: TargetPort) -> DrafterPort | None:
        """Returns the next drafter that was not tried yet and whose context is long enough; None if there is none."""
        unwanted = set(self._tried)
        longest = 0
        while self._session.generation.num_speculative_tokens:
            drafter = self._peers.drafter_for(target, unwanted)
            if drafter is None:
                break
            if len(self._session.committed) < drafter.description.context_length:
                return drafter
            longest = max(longest, drafter.description.context_length)
            unwanted.add(drafter.instance_id)
        if longest and self.permit_number < 0:  # otherwise a drafter was used until its context was full
            self.error = f"the text is longer than the drafter's context of {longest}"
        return None

    def _spec(self, drafter: ModelDescription, target: TargetPort) -> DraftSessionSpec:
        session = self._session
        return DraftSessionSpec(
            session_id=session.session_id,
            epoch=session.epoch,
            token_ids=list(session.committed.ids),
            parameters=session.parameters,
            drafting_key=session.key(Role.DRAFTING),
            verifier_address=target.address,
            target_vocab_size=target.description.vocab_size,
            max_len=min(session.generation.max_len, drafter.context_length),
            permit=Permit.make(session.permit_key, self.permit_number) if self._has_permit else None,
        )


def _has_identity(drafter: ModelDescription, target: ModelDescription) -> bool:
    """Whether a verifier gives a drafter an identity, of which it tells."""
    return ISSUED_IDENTITIES in drafter.capabilities & target.capabilities


async def _open(drafter: DrafterPort, spec: DraftSessionSpec, inbox: TaggedInbox) -> None:
    try:
        await drafter.open(spec, inbox)
    except Exception as error:
        inbox.put_nowait(DrafterLost(error))
    else:
        inbox.put_nowait(DrafterReady())
