"""A verifier and a drafter in simulated time, to test which lengths are chosen. Both batch what is ready into steps."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.pair_chooser import PairChooser
from draftwire_gateway.speculation.session_length import SessionLength

PLAIN_RUN = 32
"""Plain rounds that a session with a fixed length of 0 requests at once."""


@dataclass(frozen=True)
class SimulatedPair:
    """Speeds of a pair, and how many sessions it has at once."""

    verify_s: float
    row_s: float
    draft_s: float
    """Of a draft token, for all sessions of a step together."""
    acceptance: Callable[[float], float]
    """By time in seconds, of each token whose predecessors were accepted."""
    num_sessions: int
    hop_s: float = 0.0003
    noise: float = 0.05
    """Standard deviation of the time of a step, as a share of it."""


@dataclass(eq=False)
class SimulatedSession:
    chooser: SessionLength | None
    """None with a fixed length."""
    round: int = 0
    length: int = 0
    asked_at: float = 0.0
    plain_left: int = 0
    draft_s: float = 0.0


@dataclass
class Simulation:
    """One run, with a fixed length or (None) with chosen ones."""

    pair: SimulatedPair
    fixed: int | None
    seed: int = 0
    chooser: PairChooser = field(default_factory=lambda: PairChooser(8, 4))

    def tokens_per_s(self, seconds: float, since: float = 0.0) -> float:
        """Runs to a time, and returns the tokens per second after another."""
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._drafting: list[SimulatedSession] = []
        self._verifying: list[SimulatedSession] = []
        self._drafter_is_busy = self._verifier_is_busy = False
        self._since, self._num_tokens = since, 0
        for _ in range(self.pair.num_sessions):
            session = SimulatedSession(SessionLength(self.chooser) if self.fixed is None else None)
            self._at(0.01 * self._random.random(), lambda now, session=session: self._ask(session, now))  # type: ignore[misc]
        while self._events and self._events[0][0] <= seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self._num_tokens / (seconds - since)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _ask(self, session: SimulatedSession, now: float) -> None:
        session.asked_at, session.draft_s = now, 0.0
        if session.chooser is not None:
            session.length = session.chooser.next_length(session.round, 10**6, now)
        else:
            session.length = self.fixed or 0
        if session.length:
            self._at(now + self.pair.hop_s, lambda now: self._queue_draft(session, now))
            return
        chooser = session.chooser
        session.plain_left = PLAIN_RUN if chooser is None else chooser.num_plain_rounds(PLAIN_RUN, now)
        self._at(now + self.pair.hop_s, lambda now: self._queue_round(session, now))

    def _queue_draft(self, session: SimulatedSession, now: float) -> None:
        self._drafting.append(session)
        self._start_drafting(now)

    def _queue_round(self, session: SimulatedSession, now: float) -> None:
        self._verifying.append(session)
        self._start_verifying(now)

    def _took(self, seconds: float) -> float:
        return seconds * max(0.3, 1.0 + self.pair.noise * self._random.gauss(0.0, 1.0))

    def _start_drafting(self, now: float) -> None:
        if self._drafter_is_busy or not self._drafting:
            return
        batch, self._drafting, self._drafter_is_busy = self._drafting, [], True
        took = self._took(self.pair.draft_s * max(session.length for session in batch))
        for session in batch:
            session.draft_s = took
        self._at(now + took, lambda now: self._end_drafting(batch, now))

    def _end_drafting(self, batch: list[SimulatedSession], now: float) -> None:
        self._drafter_is_busy = False
        for session in batch:
            self._at(now + self.pair.hop_s, lambda now, session=session: self._queue_round(session, now))  # type: ignore[misc]
        self._start_drafting(now)

    def _start_verifying(self, now: float) -> None:
        if self._verifier_is_busy or not self._verifying:
            return
        batch, self._verifying, self._verifier_is_busy = self._verifying, [], True
        num_rows = sum(session.length + 1 for session in batch)
        took = self._took(self.pair.verify_s + self.pair.row_s * num_rows)
        self._at(now + took, lambda now: self._end_verifying(batch, took, now))

    def _end_verifying(self, batch: list[SimulatedSession], took: float, now: float) -> None:
        self._verifier_is_busy = False
        for session in batch:
            self._end_round(session, took, now)
        self._start_verifying(now)

    def _end_round(self, session: SimulatedSession, verify_s: float, now: float) -> None:
        accepted, rate = 0, self.pair.acceptance(now)
        while accepted < session.length and self._random.random() < rate:
            accepted += 1
        self._num_tokens += (accepted + 1) * (now >= self._since)
        arrived_at = now + self.pair.hop_s
        if session.chooser is not None:
            session.chooser.observe(
                round_times(
                    session.round, session.asked_at, arrived_at, session.length, accepted, session.draft_s, verify_s
                )
            )
        session.round += 1
        session.plain_left -= 1
        if session.length == 0 and session.plain_left:
            session.asked_at = arrived_at
            self._verifying.append(session)
        else:
            self._at(arrived_at, lambda now: self._ask(session, now))


def round_times(
    number: int,
    started_at: float,
    ended_at: float,
    length: int,
    accepted: int,
    draft_s: float = 0.0,
    verify_s: float = 0.0,
    **changes: Any,
) -> RoundTimes:
    """Returns the times of a round without losses."""
    fields: dict[str, Any] = {
        "epoch": 0,
        "round": number,
        "started_at": started_at,
        "ended_at": ended_at,
        "num_draft_tokens": length,
        "num_accepted_tokens": accepted,
        "num_tokens": accepted + 1,
        "why_plain": None if length else WhyPlain.DOES_NOT_PAY,
        "is_first": False,
        "draft_s": draft_s,
        "verify_s": verify_s,
        **dict.fromkeys(("lost_s", "prefill_s", "calibration_s", "queue_s", "wire_s", "gateway_s"), 0.0),
    }
    return RoundTimes(**(fields | changes))
