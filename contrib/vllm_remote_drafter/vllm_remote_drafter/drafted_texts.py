"""The texts that vLLM generates, and their sessions on drafters. Runs on one event loop; no vLLM and no gRPC here.

vLLM does not tell a speculator which request a row of its batch belongs to, so texts are recognised by their tokens: a
row continues the text that it starts with.
"""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import numpy as np
import structlog
from numpy.typing import NDArray

from draftwire.errors import BlockViolationError, DraftwireError
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import Calibration, CommittedTokens, DraftSessionSpec, Fence, ReceivedBlock
from draftwire.models.description import NEEDS_FEATURES, ModelDescription
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.requests.session_parameters import SessionParameters
from draftwire_gateway.peers.wire import DrafterLink
from draftwire_gateway.session.ports import DrafterLost, SessionEvent

log = structlog.get_logger()

IDS_ALONE = RuleFacts("ids", needs_draft_probs=False)
"""vLLM judges tokens, and takes no distributions with them."""
ABSENT_SECONDS = 1.0
"""Seconds outside of vLLM's batch after which a text has ended. One that comes back is opened again."""
IDLE_SECONDS = 10.0
"""Seconds without a step of vLLM after which all texts have ended."""
RETRY_SECONDS = 1.0
"""How long a text is not opened again after its session failed."""
RESERVED_TOKENS = 2048
"""Room that a session reserves beyond its text: vLLM does not tell how long it may become. It is opened again after."""
MOST_DOUBLINGS = 8
"""A drafter that is late again and again is asked once in `2**MOST_DOUBLINGS` deadlines at least."""
MOST_REFUSALS = 4
"""One that refuses or loses sessions again and again is sent new ones once in `RETRY_SECONDS * 2**MOST_REFUSALS`."""
MOST_COMPARED = 64
"""Texts that a row is compared with as a whole. One whose text is not among them counts as new."""

RowIds = NDArray[np.int32]


class RemoteSession:
    """One text's session on a drafter, and the `Inbox` of its events."""

    def __init__(self, drafter: DrafterLink, spec: DraftSessionSpec, refusals: "Lateness") -> None:
        """Starts to open the session. `refusals`: how often in a row sessions of the drafter have failed, until one is
        opened.
        """
        self.drafter = drafter
        self.session_id = spec.session_id
        self.max_len = spec.max_len
        self.is_ready = False
        """Whether the drafter has read the text."""
        self.is_lost = False
        self.block: Future[list[int]] | None = None
        """The one that was requested; None before, and once it was judged whether it came in time."""
        self.was_late = False
        """Whether somebody has waited for it in vain."""
        self._committed = CommittedTokens(spec.token_ids)
        self._fence: Fence | None = None
        self._num_rounds = 0
        self._num_asked = 0
        self._refusals = refusals
        self._opening = asyncio.get_running_loop().create_task(self._open(spec))

    @property
    def is_waiting(self) -> bool:
        """Whether a block is still to come."""
        return self.block is not None and not self.block.done()

    async def _open(self, spec: DraftSessionSpec) -> None:
        try:
            await self.drafter.open(spec, self)
            self.is_ready = True
            self._refusals.num_late = 0
        except Exception as error:
            self._lose(error)

    def put_nowait(self, item: SessionEvent) -> None:
        """Takes note of the loss of the session, of which there is nothing more to come."""
        if isinstance(item, DrafterLost):
            self._lose(item.error)

    def _lose(self, error: Exception) -> None:
        _warn_once(self.drafter.address, str(error) if isinstance(error, DraftwireError) else type(error).__name__)
        self.is_lost = True
        self._give_up()

    def _give_up(self) -> None:
        """Ends the wait for a block."""
        if self.block is not None and not self.block.done():
            self.block.set_result([])

    def ask(self, ids: RowIds, num_draft_tokens: int) -> Future[list[int]]:
        """Requests a block behind a text, which continues the text before."""
        base_len = len(self._committed)
        new_ids = ids[base_len:].tolist()
        self._committed.append(new_ids)
        fence = Fence(self.session_id, 0, self._num_rounds, len(self._committed), self._committed.hash)
        self._num_rounds += 1
        self._num_asked = num_draft_tokens
        self._fence, self.block, self.was_late = fence, Future(), False
        self.drafter.calibrate(Calibration(fence, base_len, new_ids, num_draft_tokens))
        return self.block

    def deliver(self, block: ReceivedBlock) -> bool:
        """Takes a block, if it is the one that was requested; returns whether it is."""
        is_good = not isinstance(block.draft, BlockViolationError) and len(block.token_ids) <= self._num_asked
        if self.block is not None and not self.block.done() and block.fence == self._fence and is_good:
            self.block.set_result(block.token_ids)
            return True
        return False

    def close(self) -> None:
        """Ends the session."""
        self._opening.cancel()
        self._give_up()
        self.drafter.close(self.session_id, 0)


@lru_cache(maxsize=256)
def _warn_once(address: str, reason: str) -> None:
    log.warning("remote_drafter.session_lost", address=address, reason=reason)


@dataclass(slots=True, eq=False)
class DraftedText:
    """One text of vLLM."""

    ids: RowIds
    """`[num_tokens]`, as last seen."""
    row: int
    """Row of vLLM's batch where it was last seen."""
    seen_at: float
    retry_at: float = 0.0
    session: RemoteSession | None = None

    def is_continued_by(self, ids: RowIds) -> bool:
        """Whether a text starts with all tokens of this one."""
        known = len(self.ids)
        return len(ids) >= known and ids[known - 1] == self.ids[-1] and np.array_equal(ids[:known], self.ids)


@dataclass(slots=True)
class Lateness:
    """How often a drafter has been late in a row, and until when it is not waited for."""

    num_late: int = 0
    rests_until: float = 0.0

    def count(self, now: float, deadline_s: float, most: int = MOST_DOUBLINGS) -> None:
        """It was late once more: it rests twice as long as the last time, `deadline_s * 2**most` at most."""
        self.num_late = min(self.num_late + 1, most)
        self.rests_until = now + deadline_s * 2.0**self.num_late


@dataclass(slots=True)
class DraftedTexts:
    """All texts of a vLLM, each with a session on one of the drafters."""

    drafters: Sequence[DrafterLink]
    target: ModelDescription
    """Its context is the longest text."""
    address: str
    """Address to which drafters send blocks."""
    num_draft_tokens: int
    deadline_s: float
    """How long somebody waits for the blocks of `ask`."""
    clock: Callable[[], float] = time.monotonic
    texts: list[DraftedText] = field(default_factory=list)
    _sessions: dict[int, RemoteSession] = field(default_factory=dict)
    _num_open: Counter[str] = field(default_factory=Counter)
    """Sessions of each drafter."""
    _lateness: dict[str, Lateness] = field(default_factory=dict)
    _refusals: defaultdict[str, Lateness] = field(default_factory=lambda: defaultdict(Lateness))
    """Number of times in a row that each drafter has refused or lost a session, and until when no new one is opened on
    it."""

    def ask(self, rows: Mapping[int, RowIds]) -> dict[int, Future[list[int]]]:
        """Requests a block for each text whose drafter is ready for one; opens sessions for new texts.

        `rows` are the texts, by their row of vLLM's batch, that have a new token.

        Returns:
            By row, the tokens to come; none if they cannot come any more.
        """
        now = self.clock()
        texts = self._match(rows, now)
        self.end(ABSENT_SECONDS)
        self._judge_lateness(now)
        blocks = {}
        for row, text in texts.items():
            room = self._room(text, now)
            if room >= 1 and text.session is not None and not self._rests(text.session.drafter, now):
                blocks[row] = text.session.ask(text.ids, min(room, self.num_draft_tokens))
        return blocks

    def deliver(self, blocks: Sequence[ReceivedBlock]) -> int:
        """Takes blocks of drafters, and returns how many of them were requested."""
        num_used = 0
        for block in blocks:
            session = self._sessions.get(block.fence.session_id)
            num_used += session is not None and session.deliver(block)
        return num_used

    def end(self, absent_s: float) -> None:
        """Ends the texts that vLLM's batch has not had for more than so many seconds: all, if they are below 0."""
        now, left = self.clock(), []
        for text in self.texts:
            if now - text.seen_at > absent_s:
                self._close(text)
            else:
                left.append(text)
        self.texts = left

    def _match(self, rows: Mapping[int, RowIds], now: float) -> dict[int, DraftedText]:
        """Returns the text in each row: one that it continues, first of all the one that was there, or a new one."""
        free = {id(text): text for text in self.texts}
        at_row = {text.row: text for text in self.texts}
        found: dict[int, DraftedText] = {}

        def take(row: int, text: DraftedText) -> None:
            free.pop(id(text), None)
            text.ids, text.row, text.seen_at = rows[row], row, now
            found[row] = text

        for row, ids in rows.items():
            text = at_row.get(row)
            if text is not None and text.is_continued_by(ids):
                take(row, text)
        others = list(free.values())
        lengths = np.array([len(text.ids) for text in others], np.int64)
        ends = np.array([text.ids[-1] for text in others], np.int32)
        for row in rows.keys() - found.keys():
            ids = rows[row]
            shorter = np.flatnonzero(lengths <= len(ids))
            alike = shorter[ids[lengths[shorter] - 1] == ends[shorter]]
            likely = islice((others[at] for at in alike if id(others[at]) in free), MOST_COMPARED)
            text = next((one for one in likely if one.is_continued_by(ids)), None)
            if text is None:
                text = DraftedText(ids, row, now)
                self.texts.append(text)
            take(row, text)
        return found

    def _room(self, text: DraftedText, now: float) -> int:
        """Returns how many tokens can be drafted for a text now; opens its session if it has none."""
        session, length = text.session, len(text.ids)
        if session is not None and session.is_lost:
            self._close(text)
            text.retry_at = now + RETRY_SECONDS
            refusals = self._refusals[session.drafter.address]
            if now >= refusals.rests_until:  # many sessions fail at once
                refusals.count(now, RETRY_SECONDS, MOST_REFUSALS)
        elif session is not None and session.max_len <= length:
            self._close(text)
        if text.session is None:
            if now >= text.retry_at:
                self._open(text, now)
            return 0
        assert session is not None
        return session.max_len - length if session.is_ready and not session.is_waiting else 0

    def _open(self, text: DraftedText, now: float) -> None:
        length = len(text.ids)
        usable = [
            drafter
            for drafter in self.drafters
            if drafter.connected
            and NEEDS_FEATURES not in drafter.description.capabilities
            and self._longest(drafter) > length
            and not self._rests(drafter, now)
            and now >= self._refusals[drafter.address].rests_until
        ]
        if not usable:
            return
        drafter = min(usable, key=lambda one: self._num_open[one.address])
        self._num_open[drafter.address] += 1
        parameters = SessionParameters(
            prompt_len=length,
            sampling=SamplingParams(temperature=0.0),  # the likeliest token is what vLLM accepts most often
            rule=IDS_ALONE,
            max_draft_tokens=self.num_draft_tokens,
        )
        spec = DraftSessionSpec(
            session_id=secrets.randbits(64),
            epoch=0,
            token_ids=text.ids.tolist(),
            parameters=parameters,
            drafting_key=secrets.token_bytes(KEY_BYTES),
            verifier_address=self.address,
            target_vocab_size=self.target.vocab_size,
            max_len=min(self._longest(drafter), length + RESERVED_TOKENS),
            permit=None,
        )
        text.session = self._sessions[spec.session_id] = RemoteSession(drafter, spec, self._refusals[drafter.address])

    def _longest(self, drafter: DrafterLink) -> int:
        return min(drafter.description.context_length, self.target.context_length)

    def _rests(self, drafter: DrafterLink, now: float) -> bool:
        lateness = self._lateness.get(drafter.address)
        return lateness is not None and now < lateness.rests_until

    def _judge_lateness(self, now: float) -> None:
        """Counts the drafters that were late, once however many blocks are missing, and forgives the others."""
        late, punctual = set[str](), set[str]()
        for session in self._sessions.values():
            if session.is_waiting:
                if not session.was_late:
                    late.add(session.drafter.address)
                session.was_late = True
            elif session.block is not None:
                if not session.was_late:
                    punctual.add(session.drafter.address)
                session.block = None
        for address in punctual - late:
            self._lateness.pop(address, None)
        for address in late:
            self._lateness.setdefault(address, Lateness()).count(now, self.deadline_s)

    def _close(self, text: DraftedText) -> None:
        session, text.session = text.session, None
        if session is not None:
            del self._sessions[session.session_id]
            self._num_open[session.drafter.address] -= 1
            with suppress(DraftwireError):  # the stream may be full
                session.close()
