"""A drafter that a session is open on: its permit, the block that it is asked for, and the wait for that block."""

import asyncio
import math
from collections.abc import Sequence
from enum import Enum, auto

import structlog

from draftwire.method.keys import Role
from draftwire.method.rounds import BlockSent, Calibration, DraftSessionSpec, Permit, SendDrafted, Verdict
from draftwire.models.description import FLUSH_REPLIES, ISSUED_IDENTITIES, PARTIAL_BLOCKS
from draftwire_gateway.session.policy import Arm
from draftwire_gateway.session.ports import DrafterPort, TargetPort
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState

log = structlog.get_logger()

MAX_STRETCH = 2.0
"""A block counts in the estimate of a drafter's times as at most so many times the timeout that it was asked under: one
pause, of the verifier too, must not make all sessions patient."""


class BlockFate(Enum):
    """Outcome of a round's block."""

    NOT_REQUESTED = auto()
    VERIFIED = auto()
    MISSING = auto()
    """The drafter replied in time that it sent the block, which the verifier does not have."""
    LATE = auto()
    """The drafter did not reply in time, and the round was plain."""


class SeatedDrafter:
    """One drafter of a session, which drafts for one verifier. Times are by the event loop's clock, seconds."""

    def __init__(
        self,
        port: DrafterPort,
        target: TargetPort,
        session: SessionState,
        options: Sequence[SessionOption],
        permit_number: int,
    ) -> None:
        """Sends nothing yet; `spec` is what it is to be opened with."""
        self.port = port
        self.is_ready = False
        """Whether it has finished its prefill."""
        self.is_awaited = False
        """Whether a block of the open round is awaited: not if it was late, though it may still be verified."""
        self.is_asleep = False
        """Whether it did not reply in time, and is not asked for blocks until it does."""
        self.is_held = False
        """Whether the latest block was drafted ahead: how soon it is verified tells nothing of the drafter."""
        self.num_missing = 0
        """Blocks in a row that went missing."""
        self._num_tokens, self._round = 0, -1
        """Tokens that were requested of the latest block, and the number of its round."""
        self._requested_at, self._begins_at, self._timeout_s = 0.0, 0.0, 0.0
        """Time at which it was requested, that at which it was or may have been begun, and the timeout."""
        self._ended_at = 0.0
        """Time at which the latest verdict arrived."""
        self._asleep_since = 0.0
        self._flush_requested = self._has_replied = self._is_missing = False
        self._target, self._session, self._options = target, session, options
        self._permit_number = permit_number
        self._known_len = len(session.committed)
        capabilities = port.description.capabilities & target.description.capabilities
        self._has_permit = ISSUED_IDENTITIES not in capabilities
        """Whether it has its permit: one that names nobody from the start, else one with the identity that the verifier
        gave it."""

    @property
    def max_len(self) -> int:
        """How many tokens of the session's text it can have at most."""
        return min(self._session.generation.max_len, self.port.description.context_length)

    @property
    def room(self) -> int:
        """How many tokens it may draft now; one is left for the verifier. Drafters count alike."""
        return self.max_len - len(self._session.committed) - 1

    def is_capable_of(self, capability: str) -> bool:
        """Whether the drafter has a capability."""
        return capability in self.port.description.capabilities

    def spec(self) -> DraftSessionSpec:
        """Returns the parameters of the session."""
        session, target = self._session, self._target
        spec = DraftSessionSpec(
            session_id=session.session_id,
            epoch=session.epoch,
            token_ids=list(session.committed.ids),
            parameters=session.parameters,
            drafting_key=session.key(Role.DRAFTING),
            verifier_address=target.address,
            target_vocab_size=target.description.vocab_size,
            max_len=self.max_len,
            permit=Permit.make(session.permit_key, self._permit_number) if self._has_permit else None,
        )
        for option in self._options:
            spec = option.draft_spec(spec, self.port.description, target.description)
        return spec

    def request_block(self, arm: Arm, most_s: float = math.inf) -> float:
        """Requests a block of the open round, and sends the tokens committed since the last one. Returns its timeout,
        at most `most_s`; see `timeout_s`.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        base_len, self._known_len = self._known_len, len(self._session.committed)
        new_ids = self._session.committed.ids[base_len:]
        block = BlockRequest(arm, arm.length)
        for option in self._options:
            option.request(block)
        self._round, self._num_tokens = self._session.round, block.depth
        self.is_awaited, self._is_missing = True, False
        self.is_held = self._flush_requested = self._has_replied = block.is_held
        self._timeout_s = self.sent_timeout_s(most_s) if block.is_held else self.timeout_s(block.depth, most_s)
        requested_at, self._requested_at = self._requested_at, asyncio.get_running_loop().time()
        # Who reads the text slowly keeps the request waiting, and not a drafter that the one before lets begin.
        self._begins_at = max(self._ended_at, requested_at) if block.is_begun else self._requested_at
        self._session.expected.request_block(arm.length, num_nodes=arm.num_nodes, is_ahead=block.may_be_ahead)
        fence, permit, wanted = self._session.fence, self._next_permit(), (block.max_rounds_ahead, block.tree)
        self.port.calibrate(Calibration(fence, base_len, new_ids, arm.length, permit, *wanted, block.stop_below))
        return self._timeout_s

    def timeout_s(self, num_draft_tokens: int, most: float) -> float:
        """Returns the timeout of a block of so many tokens, after which `request_flush` is due; at most `most`."""
        if not self.is_capable_of(PARTIAL_BLOCKS):  # all that could be done is to leave out what it has drawn
            return most
        return self.port.round_trip.timeout_s(num_draft_tokens, most)

    @property
    def can_flush(self) -> bool:
        """Whether it supports partial blocks, and was not asked for this one yet."""
        return not self._flush_requested and self.is_capable_of(PARTIAL_BLOCKS)

    def request_flush(self) -> None:
        """Requests the tokens drawn so far of the block.

        Raises:
            DraftwireError: the drafter cannot be asked.
        """
        self._flush_requested = True
        self.port.send_drafted(SendDrafted(self._session.session_id, self._session.epoch, self._session.round))

    def flush_timeout_s(self, most: float) -> float:
        """Returns the timeout of the reply to `request_flush`, or of the block if the drafter does not reply."""
        if not self.is_capable_of(FLUSH_REPLIES):
            return most
        mask_s = sum(option.flush_s for option in self._options)
        return self.port.round_trip.flush_timeout_s(self._num_tokens, most, mask_s)

    def sent_timeout_s(self, most: float) -> float:
        """Returns the timeout of the verdict after that reply."""
        return self.port.round_trip.sent_timeout_s(self._num_tokens, most)

    def fall_asleep(self) -> None:
        """Ends the wait for a block that did not come in time: the round must then be requested in another way.

        The drafter is asleep, unless it has replied: then the verifier has the block, and is late itself, or will never
        get it. The block may still be the first to be verified.
        """
        self.is_awaited, self._is_missing = False, self._has_replied
        if self._has_replied:
            return
        self.is_asleep, self._asleep_since = True, asyncio.get_running_loop().time()
        session = self._session
        log.info("gateway.drafter_asleep", session_id=session.session_id, round=session.round)
        session.add_event("drafter asleep", epoch=session.epoch, round=session.round)

    def note_sent(self, sent: BlockSent, arrived_at: float) -> bool:
        """Records its reply to a flush, which wakes it if it is asleep. Returns whether the block is still awaited:
        from now on of the verifier.
        """
        if not self._flush_requested or sent.round != self._round or self._has_replied:
            return False
        self._has_replied = True
        if self.is_asleep:
            self._learn(arrived_at, None)
            self._wake()
        return self.is_awaited

    def end_round(self, verdict: Verdict, arrived_at: float) -> BlockFate:
        """Ends the open round; if a block was verified, updates the estimate of the drafter's times."""
        was_awaited, self.is_awaited, self._ended_at = self.is_awaited, False, arrived_at
        if verdict.fence.round != self._round:
            return BlockFate.NOT_REQUESTED
        if was_awaited or (verdict.num_draft_tokens and not verdict.is_of_verifier):
            self.num_missing = 0
            if not self.is_held and arrived_at >= self._begins_at:
                self._learn(arrived_at, verdict)
            self._wake()
            return BlockFate.VERIFIED
        self.num_missing += self._is_missing
        return BlockFate.MISSING if self._is_missing else BlockFate.LATE

    def slept_s(self) -> float:
        """Returns for how long it has been asleep; 0 if it is awake."""
        return asyncio.get_running_loop().time() - self._asleep_since if self.is_asleep else 0.0

    def _next_permit(self) -> Permit | None:
        """Returns the permit to send now, which names the drafter; None if it has one."""
        if self._has_permit:
            return None
        self._has_permit = True
        drafter_id = self.port.known_as(self._target.address)
        return Permit.make(self._session.permit_key, self._permit_number, drafter_id)

    def _wake(self) -> None:
        if self.is_asleep:
            self.is_asleep = False
            self._session.add_event("drafter awake", epoch=self._session.epoch)

    def _learn(self, arrived_at: float, verdict: Verdict | None) -> None:
        """Updates the estimate of the drafter's times by the time since the block was requested, or begun."""
        seconds = min(arrived_at - self._begins_at, MAX_STRETCH * self._timeout_s)
        pass_s, num_tokens = None, self._num_tokens
        if verdict is not None and verdict.ended_unsure:
            num_tokens = verdict.num_draft_tokens
        if verdict is not None and verdict.num_draft_tokens:
            drafting_s = (verdict.timings.calibration_us + verdict.timings.draft_us) / 1e6
            pass_s = min(drafting_s, seconds) / verdict.num_draft_positions
        self.port.round_trip.add(seconds, num_tokens, pass_s)
