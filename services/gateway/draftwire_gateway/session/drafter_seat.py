"""The drafter of a session: at most one at a time, each with a permit of its own. Independent of text.

A drafter whose block is late is asked to send what it has drawn, and replies when that is on its way. One that does not
reply in time is *asleep*: the round becomes plain, the session stays open on it, and it is asked for blocks again once
it replies. A drafter that has replied is never blamed for the verifier's silence.
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace

import structlog

from draftwire.drafting.model_free.names import parts_of
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.ahead_limits import room_for_drafts
from draftwire.method.keys import Role
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    DraftSessionSpec,
    LocalDraft,
    Permit,
    SendDrafted,
    Verdict,
)
from draftwire.models.description import (
    DRAFT_AHEAD,
    FEATURES,
    FLUSH_REPLIES,
    HELD_BLOCKS,
    ISSUED_IDENTITIES,
    NEEDS_FEATURES,
    PARTIAL_BLOCKS,
    ModelDescription,
)
from draftwire.requests.structured_output import MAX_PLACE_S
from draftwire_gateway.session.begun_rounds import BegunRounds
from draftwire_gateway.session.block_wait import BlockFate, BlockWait
from draftwire_gateway.session.ports import (
    DrafterLost,
    DrafterPort,
    DrafterReady,
    PeerEvent,
    Peers,
    TaggedInbox,
    TargetPort,
)
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.session.session_state import SessionState
from draftwire_gateway.session.tree_request import tree_to_draft
from draftwire_gateway.speculation.arms import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.pairs import PairName, Pairs, PairSeat

log = structlog.get_logger()

NO_BLOCK = "no block in time, not even a part of one"

LEAST_LEFT = 3
"""Tokens that a text must still have to be drafted for: one of the plain round while the drafter reads, one that is
drafted, and one of the verifier after it."""
MAX_MISSING_BLOCKS = 2
"""A drafter is given up when so many blocks in a row, which it says that it sent, did not reach the verifier."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Rounds without a drafter, to be requested at once."""

    why: WhyPlain
    """Reason why they have no drafter, or why a round in which the verifier drafts by itself has no draft."""
    num_rounds: int
    draft: LocalDraft | None = None
    """Drafts of the verifier by itself."""


class DrafterSeat:
    """Holds the current drafter of a session, and opens the session on the next one in the background."""

    def __init__(self, session: SessionState, peers: Peers, queue: asyncio.Queue[PeerEvent], pairs: Pairs) -> None:
        """Opens no session before `seek`.

        Args:
            session: the session to draft for.
            peers: the available drafters.
            queue: receives the drafters' events.
            pairs: choose lengths for sessions that adapt them.
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
        self._rounds_ahead = 0
        self._begun = BegunRounds()
        """Rounds that the session's drafters of this epoch may have begun."""
        self._counts_ahead = False
        """Whether no block was there when the open round began, for which one may have been drafted ahead."""
        self._num_nodes = 0
        """Nodes of the token trees that the drafter is asked for, at most if they are chosen; 0 if it is asked for
        chains."""
        self._wait = BlockWait()
        self._pair = PairSeat(pairs)
        """The session's place in a pair of drafter and verifier; in none where lengths are given, or nobody could
        draft."""
        self._local: LocalDraft | None = None
        """Drafts that the session's verifier may make by itself; None if it does not."""
        self.permit_number = -1
        """Permit number of the latest drafter; each drafter has a higher one."""
        self.is_ready = False
        """Whether there is a drafter that has finished its prefill."""
        self.error = ""
        """Error of the drafter that was lost last; empty if none was lost."""

    @property
    def is_awaited(self) -> bool:
        """Whether a block of the open round is awaited: not if it was late, though it may still be verified."""
        return self._wait.is_awaited

    @property
    def is_asleep(self) -> bool:
        """Whether the drafter did not reply in time, and is not asked for blocks until it does."""
        return self._wait.is_asleep

    @property
    def room(self) -> int:
        """How many tokens the drafter may draft now; 0 if no drafter is ready and awake."""
        if self._drafter is None or not self.is_ready or self.is_asleep:
            return 0
        return room_for_drafts(self._max_len(self._drafter.description), len(self._session.committed))

    @property
    def num_begun(self) -> int:
        """Rounds that a drafter may have begun, from the open one on. A run in its place has as many at least: so none
        of their blocks is there when it ends.
        """
        return self._begun.num_from(self._session.round)

    def next_draft(self) -> Arm:
        """Returns what to draft for the round that is requested now; plain decoding if the drafter is not to draft.

        Depends only on lengths and on rounds that are over, never on the drafted tokens: see docs/exactness.md.
        """
        room, number = self.room, self._session.round
        wanted = self._wanted_draft(room)
        allowed = PLAIN if self._session.masks.is_used_up else wanted
        arm = self._begun.arm(allowed, number, room, self.permit_number)
        if arm != wanted and self._pair.length is not None:
            self._pair.length.replace_arm(number, arm)
        return arm

    def _wanted_draft(self, most: int) -> Arm:
        """Returns what to draft for the round as far as what was begun before does not matter, of `most` tokens."""
        if self._session.generation.adapts_length:
            length = self._pair.length
            return PLAIN if length is None else length.next_draft(self._session.round, most, time.perf_counter())
        num_draft_tokens = min(self._session.generation.num_speculative_tokens, most)
        if num_draft_tokens < 1:
            return PLAIN
        if self._num_nodes:
            return Arm(DraftSource.TREES, num_draft_tokens, self._num_nodes)
        return Arm(DraftSource.AHEAD if self._rounds_ahead else DraftSource.DRAFTER, num_draft_tokens)

    def run(self, most: int, bridge: int, *, is_coming: bool = False) -> RunRequest:
        """Returns the rounds to request now, where `next_draft` is plain decoding.

        Args:
            most: rounds where no drafter is expected.
            bridge: rounds while one is.
            is_coming: whether there is a drafter, on which the session is about to be opened.
        """
        if not self._session.generation.num_speculative_tokens:
            return RunRequest(WhyPlain.NOT_ASKED_FOR, most)
        if self._session.masks.is_used_up:
            return RunRequest(WhyPlain.SLOW_MASKS, bridge)
        if not self._uses_drafter():
            return self._local_run(WhyPlain.DOES_NOT_PAY, most)
        if self.is_asleep:
            return RunRequest(WhyPlain.LATE, bridge)
        if is_coming:
            return RunRequest(WhyPlain.WARMING_UP, bridge)
        if self._drafter is None:
            return self._local_run(WhyPlain.NO_DRAFTER, most)
        if self.is_ready and self._begun.is_of_another(self._session.round, self.permit_number):
            return RunRequest(WhyPlain.WARMING_UP, bridge)
        if self.is_ready:
            return self._local_run(WhyPlain.NO_ROOM, most)
        if not self._session.numbers_are_fresh:  # how long warming up takes shows no more than it must
            return RunRequest(WhyPlain.WARMING_UP, bridge)
        return self._local_run(WhyPlain.WARMING_UP, bridge)

    def first_run(self, target: TargetPort, most: int) -> RunRequest:
        """Returns the same for a session that is being opened on a verifier: one round if it may be drafted for."""
        has_drafter = self.restart(target)
        request = self.run(most, 1, is_coming=has_drafter)
        if request.draft is None:
            return request
        return RunRequest(WhyPlain.DOES_NOT_PAY if has_drafter else WhyPlain.NO_DRAFTER, 1)

    def _local_run(self, why: WhyPlain, most: int) -> RunRequest:
        """Returns rounds in which the verifier drafts by itself, if it does and that pays; else plain ones."""
        length, now = self._pair.length, time.perf_counter()
        num_draft_tokens = min(self._session.generation.num_speculative_tokens, self._session.num_left - 1)
        can_draft = self._local is not None and num_draft_tokens >= 1
        if length is not None and (can_draft or why is WhyPlain.DOES_NOT_PAY):
            most = length.num_plain_rounds(most, now)
        if self._local is None or not can_draft:
            return RunRequest(why, most)
        if length is not None:
            num_draft_tokens = length.next_own_length(self._session.round, num_draft_tokens, now)
            if num_draft_tokens < 1:
                return RunRequest(WhyPlain.DOES_NOT_PAY if why is WhyPlain.NO_DRAFTER else why, most)
        return RunRequest(WhyPlain.NO_GUESS, most, replace(self._local, num_draft_tokens=num_draft_tokens))

    def observe(self, times: RoundTimes) -> None:
        """Takes note of a committed round; a `RoundObserver`."""
        if self._pair.length is not None:
            self._pair.length.observe(times)

    def restart(self, target: TargetPort) -> bool:
        """Makes all drafters eligible again, before the session is opened on a verifier.

        Returns:
            Whether there is a drafter that could draft for that verifier, and text for it.
        """
        self._tried, self._begun = set(), BegunRounds()
        drafter = self._next(target)
        self._join(target, drafter)
        return drafter is not None and self._session.num_left >= LEAST_LEFT

    def leave(self) -> None:
        """Counts the session out of its pair while it waits for a verifier that accepts it: it runs no rounds."""
        self._pair.join(None)

    def seek(self, target: TargetPort, longest_sleep_s: float = math.inf) -> None:
        """Opens the session on the next drafter, unless there is one already. The queue receives the outcome.

        Args:
            target: the verifier that its blocks go to.
            longest_sleep_s: a drafter that has been asleep for longer is given up if there is another one.
        """
        if self._wait.sleeping_s(self._now()) > longest_sleep_s and self._next(target) is not None:
            self.give_up(UnavailableError(NO_BLOCK))
        if self._drafter is not None:
            return
        drafter = self._next(target)
        self._join(target, drafter)
        if drafter is None:
            return
        if not self._uses_drafter() or self._session.num_left < LEAST_LEFT:
            return  # its prefill alone would cost time
        self._tried.add(drafter.instance_id)
        self._drafter, self.is_ready = drafter, False
        self._known_len = len(self._session.committed)
        self.permit_number += 1
        self._verifier_address = target.address
        self._has_permit = not _has_identity(drafter.description, target.description)
        can_go_ahead = _can_go_ahead(drafter.description, target.description)
        self._rounds_ahead = self._session.generation.rounds_ahead if can_go_ahead else 0
        self._num_nodes = self._max_tree_nodes(drafter.description, target.description)
        inbox = TaggedInbox(self._queue, self._session.epoch, self.permit_number)
        self._opening = asyncio.create_task(_open(drafter, self._spec(drafter.description, target), inbox))

    def mark_ready(self) -> None:
        """Marks the drafter as ready after its prefill, unless it was lost meanwhile."""
        if self._drafter is not None:
            self.is_ready = True
            self._session.add_event("drafter ready", epoch=self._session.epoch)

    def timeout_s(self, num_draft_tokens: int, most: float) -> float:
        """Returns the timeout of a block of so many tokens, after which `request_flush` is due; at most `most`."""
        if not self._is_capable_of(PARTIAL_BLOCKS):  # all that could be done is to leave out what it has drawn
            return most
        return self._ready_drafter.round_trip.timeout_s(num_draft_tokens, most)

    def flush_timeout_s(self, most: float) -> float:
        """Returns the timeout of the reply to `request_flush`, or of the block if the drafter does not reply."""
        if not self._is_capable_of(FLUSH_REPLIES):
            return most
        has_form = self._session.generation.sampling.structured_output is not None
        mask_s = MAX_PLACE_S if has_form else 0.0
        return self._ready_drafter.round_trip.flush_timeout_s(self._wait.num_tokens, most, mask_s)

    def sent_timeout_s(self, most: float) -> float:
        """Returns the timeout of the verdict after that reply."""
        return self._ready_drafter.round_trip.sent_timeout_s(self._wait.num_tokens, most)

    def ask_for_block(self, arm: Arm, most_s: float = math.inf) -> float:
        """Requests a block of the open round, and sends the tokens committed since the last one.

        Args:
            arm: what to draft, of `next_draft`.
            most_s: longest timeout of the block, seconds.

        Returns:
            The timeout of the block, seconds; see `timeout_s`.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        base_len = self._known_len
        self._known_len = len(self._session.committed)
        rounds_ahead = self._rounds_ahead if arm.source is DraftSource.AHEAD else 0
        tree = tree_to_draft(self._session.generation, arm.num_nodes, arm.length)
        # A shape may be less deep than was asked for: its nodes ran out.
        depth = arm.length if tree is None or tree.shape is None else tree.shape.depth
        is_held = self._session.next_is_held
        if is_held:
            timeout_s = self._ready_drafter.round_trip.sent_timeout_s(depth, most_s)
        else:
            timeout_s = self.timeout_s(depth, most_s)
        self._wait.begin(self._session.round, depth, self._now(), timeout_s, is_held=is_held)
        self._counts_ahead = rounds_ahead > 0 or is_held or self.num_begun > 0
        self._begun.request(self._session.round, rounds_ahead, arm.length, self.permit_number)
        # Blocks that were drafted for later rounds may still be held when none is drafted ahead any more.
        is_ahead = self._rounds_ahead > 0
        self._session.expected.request_block(arm.length, num_nodes=arm.num_nodes, is_ahead=is_ahead)
        new_ids = self._session.committed.ids[base_len:]
        permit = None if self._has_permit else self._named_permit()
        self._has_permit = True
        calibration = Calibration(
            self._session.fence,
            base_len,
            new_ids,
            arm.length,
            permit=permit,
            max_rounds_ahead=rounds_ahead,
            tree=tree,
        )
        self._ready_drafter.calibrate(calibration)
        return timeout_s

    @property
    def can_flush(self) -> bool:
        """Whether the drafter supports partial blocks, and was not asked for this one yet."""
        return not self._wait.flush_requested and self._is_capable_of(PARTIAL_BLOCKS)

    def request_flush(self) -> None:
        """Requests the tokens drawn so far of the block.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        self._wait.flush_requested = True
        self._ready_drafter.send_drafted(
            SendDrafted(self._session.session_id, self._session.epoch, self._session.round)
        )

    def fall_asleep(self) -> None:
        """Records that the block of the open round did not come in time, which must then be requested in another way.

        The drafter is asleep unless it has replied.
        """
        if self._wait.expire(self._now()):
            log.info("gateway.drafter_asleep", session_id=self._session.session_id, round=self._session.round)
            self._session.add_event("drafter asleep", epoch=self._session.epoch, round=self._session.round)

    def note_sent(self, sent: BlockSent, arrived_at: float) -> bool:
        """Records the drafter's reply to a flush, which wakes it if it is asleep.

        Args:
            sent: the reply.
            arrived_at: when it arrived, by the event loop's clock.

        Returns:
            Whether the block is still awaited: from now on of the verifier.
        """
        if not self._wait.take_reply(sent.round):
            return False
        if self.is_asleep:
            self._learn(arrived_at, None)
            self._wake()
        return self.is_awaited

    def end_round(self, verdict: Verdict, arrived_at: float) -> None:
        """Ends the open round; if a block was requested, updates the estimate of the drafter's times.

        Args:
            verdict: of the open round.
            arrived_at: when it arrived, by the event loop's clock: who reads the text may have been away since.
        """
        if self._counts_ahead:
            self._counts_ahead = False
            statistics, is_hit = self._session.statistics, self._wait.is_held and verdict.is_ahead
            statistics.num_ahead_hits += is_hit
            statistics.num_ahead_late += verdict.is_ahead and not is_hit
            statistics.num_ahead_misses += not verdict.is_ahead
        match self._wait.end(verdict.fence.round, verdict.num_draft_tokens > 0 and not verdict.local_strategy):
            case BlockFate.VERIFIED:
                if not self._wait.is_held:
                    self._learn(arrived_at, verdict)
                self._wake()
            case BlockFate.MISSING if self._wait.num_missing == MAX_MISSING_BLOCKS:
                self.give_up(UnavailableError("its blocks do not reach the verifier"))
            case BlockFate.LATE if not self._is_capable_of(FLUSH_REPLIES):  # nobody would say when it is awake
                self.give_up(UnavailableError(NO_BLOCK))

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

    def end(self) -> None:
        """Ends the session: drops its drafter, and counts it out of its pair."""
        self.drop()
        self._pair.join(None)

    def drop(self) -> None:
        """Closes the session on the drafter, or cancels its opening. To be called before the epoch ends."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._drafter is not None:
            self._session.close_at(self._drafter)
        self._drafter, self.is_ready, self._wait = None, False, BlockWait()

    def _join(self, target: TargetPort, drafter: DrafterPort | None) -> None:
        """Counts the session in to its pair, if it adapts lengths and somebody could draft."""
        pair = self._pair_of(target, None if drafter is None else drafter.description)
        generation = self._session.generation
        self._local = generation.local_draft(target.description, generation.num_speculative_tokens)
        if generation.adapts_length:
            self._pair.join(pair if pair.drafters else None)

    def _pair_of(self, target: TargetPort, drafter: ModelDescription | None) -> PairName:
        generation = self._session.generation
        local_strategy = generation.local_strategy(target.description)
        if drafter is None:
            return PairName(target.address, "", local_strategy)
        can_go_ahead = generation.rounds_ahead > 0 and _can_go_ahead(drafter, target.description)
        most_nodes = self._max_tree_nodes(drafter, target.description)
        return PairName(target.address, drafter.name, local_strategy, can_go_ahead, most_nodes)

    def _max_tree_nodes(self, drafter: ModelDescription, target: ModelDescription) -> int:
        """Returns how large the session's token trees may be with a drafter; 0 if it is asked for chains."""
        return min(self._session.generation.num_draft_nodes, drafter.max_tree_nodes, target.max_tree_nodes)

    def _max_len(self, drafter: ModelDescription) -> int:
        """Returns how many tokens of the session's text a drafter can have at most."""
        return min(self._session.generation.max_len, drafter.context_length)

    def _uses_drafter(self) -> bool:
        """Whether a drafter is to draft now, if there is one."""
        length = self._pair.length
        return length is None or not self._pair.has_drafter or length.uses_drafter(time.perf_counter())

    def _wake(self) -> None:
        if self._wait.wake():
            self._session.add_event("drafter awake", epoch=self._session.epoch)

    def _learn(self, arrived_at: float, verdict: Verdict | None) -> None:
        """Updates the estimate of the drafter's times by the time since the block was requested."""
        seconds = self._wait.seconds_until(arrived_at)
        pass_s = None
        if verdict is not None and verdict.num_draft_tokens:
            drafting_s = (verdict.timings.calibration_us + verdict.timings.draft_us) / 1e6
            pass_s = min(drafting_s, seconds) / verdict.num_draft_positions
        self._ready_drafter.round_trip.add(seconds, self._wait.num_tokens, pass_s)

    def _is_capable_of(self, capability: str) -> bool:
        return capability in self._ready_drafter.description.capabilities

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _ready_drafter(self) -> DrafterPort:
        assert self._drafter is not None, "only a drafter that is ready is asked"
        return self._drafter

    def _named_permit(self) -> Permit:
        """Returns the permit of the drafter, which nobody else can show."""
        drafter_id = self._ready_drafter.known_as(self._verifier_address)
        return Permit.make(self._session.permit_key, self.permit_number, drafter_id)

    def _next(self, target: TargetPort) -> DrafterPort | None:
        """Returns the next drafter that was not tried yet and whose context is long enough; None if there is none.

        A session keeps its draft model while that has one, also if its rounds are plain: else it would be counted in
        and out of pairs with every round.
        """
        generation = self._session.generation
        longest = 0
        found: dict[str, DrafterPort] = {}
        for drafter in self._peers.drafters_for(target, self._tried) if generation.num_speculative_tokens else ():
            model = drafter.description
            if model.name in found or not self._is_wanted(model, target):
                continue
            if len(self._session.committed) < model.context_length:
                found[model.name] = drafter
            else:
                longest = max(longest, model.context_length)
        if found:
            pairs = [self._pair_of(target, drafter.description) for drafter in found.values()]
            if generation.adapts_length:
                return found[self._pair.preferred(pairs, self._session.session_id).drafter_model]
            return found[pairs[0].drafter_model]
        if longest and self.permit_number < 0:  # otherwise a drafter was used until its context was full
            self.error = f"the text is longer than the drafter's context of {longest}"
        return None

    def _is_wanted(self, drafter: ModelDescription, target: TargetPort) -> bool:
        """Whether the drafters of a model may draft: not those that do what the verifier can do by itself, or that need
        features which it does not send.
        """
        model = drafter.name
        if NEEDS_FEATURES in drafter.capabilities and FEATURES not in target.description.capabilities:
            return False
        generation, offered = self._session.generation, target.description.local_strategies
        is_local = all(part in generation.local_strategies and part in offered for part in parts_of(model))
        return not is_local and (generation.draft_models is None or model in generation.draft_models)

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
            max_len=self._max_len(drafter),
            permit=Permit.make(session.permit_key, self.permit_number) if self._has_permit else None,
            max_branches=session.generation.max_branches if self._rounds_ahead else 0,
            max_held_blocks=session.generation.max_held_blocks if self._rounds_ahead else 0,
            max_tree_nodes=self._num_nodes,
        )


def _can_go_ahead(drafter: ModelDescription, target: ModelDescription) -> bool:
    """Whether a drafter can draft ahead of the verdict, and a verifier hold what it drafts."""
    return DRAFT_AHEAD in drafter.capabilities and HELD_BLOCKS in target.capabilities


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
