"""A pair and its sessions in simulated time: the gateway's own chooser, and no models.

A verifier and a drafter batch what is ready into steps. Texts may begin together, end, be given up, and have to be read
first.
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from draftwire.method.round_parts import GuessPart, StepSize
from draftwire.method.rounds import DraftTimings, Fence, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.models.description import WarmUpStep
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.pair_model import WarmUp
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser

ARRIVAL_S = 0.003
"""Between texts of a burst."""
PADDED_ROWS, KNEE_ROWS = 8, 32
"""Of a verifier whose times are uneven."""
PLAIN_RUN = 32
"""Rounds without a drafter that a session with a fixed arm requests at once."""


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
    own_acceptance: float | None = None
    """Of the tokens that the verifier guesses by itself; None if it does not."""

    ahead: float | None = None
    """Probability that a block is there before it is requested, if it is drafted ahead; None if none is."""
    ahead_s: float = 0.0
    """What drafting ahead adds to a step of the verifier, which shares its cores with the drafter."""
    slowness: Callable[[float], float] = lambda _: 1.0
    """Of all steps, by time in seconds: those of long texts take longer."""
    text_tokens: tuple[int, int] | None = None
    """Least and most tokens of a text. All sessions begin one at the same time, and again when the last has ended; None
    if texts have no end."""
    renews_texts: bool = False
    """Whether a session begins its next text when one has ended, and does not wait for the others."""
    text_token_s: float = 0.0
    """What each token of the sessions' texts adds to a step of the verifier."""
    prompt_s: float = 0.0
    """What a drafter takes for a session's prompt. Until it has read that, rounds are plain."""
    prompts_at_once: int = 1
    """So many are read beside a step of the drafter."""
    burst_s: float | None = None
    """After so long all texts are given up, and as many begin; None if they are not."""
    read_s: float = 0.0
    """What the verifier takes for a session's prompt, one after the other."""

    is_uneven: bool = False
    """Whether times are as no line has them: rows are padded to `PADDED_ROWS`, cost a quarter up to `KNEE_ROWS` and
    twice as much beyond, a drafter takes half as long again while the verifier works, and one step in twenty takes
    three times as long."""

    @property
    def sources(self) -> list[DraftSource]:
        """Who could draft."""
        possible = {
            DraftSource.DRAFTER: 1.0,
            DraftSource.VERIFIER: self.own_acceptance,
            DraftSource.AHEAD: self.ahead,
        }
        return [source for source, value in possible.items() if value is not None]

    @property
    def warm_up(self) -> WarmUp:
        """What steps of few and of many rows took before the first request."""
        rows = (2, 64)
        verifier = [WarmUpStep(each, round(1e6 * (self.verify_s + self.rows_s(each)))) for each in rows]
        return WarmUp(verifier, [WarmUpStep(each, round(1e6 * self.draft_s)) for each in rows])

    def rows_s(self, num_rows: int) -> float:
        """Returns what the rows of a step of the verifier add to it, seconds."""
        if not self.is_uneven:
            return self.row_s * num_rows
        padded = math.ceil(num_rows / PADDED_ROWS) * PADDED_ROWS
        return self.row_s * (0.25 * min(padded, KNEE_ROWS) + 2.0 * max(0, padded - KNEE_ROWS))

    def acceptance_of(self, arm: Arm, now: float) -> float:
        """Returns the acceptance of an arm's tokens."""
        return (self.own_acceptance or 0.0) if arm.source is DraftSource.VERIFIER else self.acceptance(now)

    def num_accepted(self, arm: Arm, now: float, draw: Callable[[], float]) -> int:
        """Returns how many tokens of an arm's draft are accepted in a round.

        Args:
            arm: of the round.
            now: its time, seconds.
            draw: returns uniform numbers.
        """
        rate = self.acceptance_of(arm, now)
        return next((accepted for accepted in range(arm.length) if draw() >= rate), arm.length)


@dataclass(eq=False)
class SimulatedSession:
    """Progress of one session."""

    chooser: PredictedSession | None
    """None with a fixed length."""
    round: int = 0
    arm: Arm = PLAIN
    asked_at: float = 0.0
    plain_left: int = 0
    draft_s: float = 0.0
    num_drafting: int = 0
    """Sessions that share the drafter's passes."""
    tokens_left: float = math.inf
    num_tokens: int = 0
    """Of the text so far."""
    is_read: bool | None = None
    """Whether a drafter has read the prompt; None before it begins."""
    is_given_up: bool = False


@dataclass
class Simulation:
    """One run, with a fixed arm, a fixed length of the drafter's drafts, or (None) with chosen arms."""

    pair: SimulatedPair
    fixed: Arm | int | None
    seed: int = 0
    chooser: PredictingChooser = field(default_factory=lambda: PredictingChooser(8, 4))

    def tokens_per_s(self, seconds: float, since: float = 0.0) -> float:
        """Runs to a time, and returns the tokens per second after another."""
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._reading: list[SimulatedSession] = []
        self._drafting: list[SimulatedSession] = []
        self._verifying: list[SimulatedSession] = []
        self._drafter_is_busy = self._verifier_is_busy = False
        self._since, self._num_tokens = since, 0
        self._read_until = 0.0
        self._begin_texts(0.0)
        while self._events and self._events[0][0] <= seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self._num_tokens / (seconds - since)

    def _begin_texts(self, now: float) -> None:
        self._num_running = self.pair.num_sessions
        running: list[SimulatedSession] = []
        for index in range(self.pair.num_sessions):
            arrives_at = now + (ARRIVAL_S * index if self.pair.burst_s is not None else 0.0)
            self._at(arrives_at, partial(self._begin_text, running))
        if self.pair.burst_s is not None:
            self._at(now + self.pair.burst_s, partial(self._give_up, running))

    def _begin_text(self, running: list[SimulatedSession], now: float) -> None:
        session = SimulatedSession(PredictedSession(self.chooser) if self.fixed is None else None)
        running.append(session)
        if self.pair.text_tokens is not None:
            session.tokens_left = self._random.randint(*self.pair.text_tokens)
        if session.chooser is not None:
            session.chooser.uses_drafter(now)
        if self.pair.read_s:
            self._read_until = max(now, self._read_until) + self.pair.read_s
            self._session_at(self._read_until, session, partial(self._end_prompt, began_at=now))
        else:
            self._session_at(now + 0.01 * self._random.random(), session, self._ask)

    def _end_prompt(self, session: SimulatedSession, now: float, *, began_at: float) -> None:
        if session.chooser is not None:
            session.chooser.observe(round_times(session.round, began_at, now, 0, 0, is_first=True))
        session.round += 1
        self._ask(session, now)

    def _give_up(self, running: Sequence[SimulatedSession], now: float) -> None:
        for session in running:
            session.is_given_up = True
            if session.chooser is not None:
                session.chooser.close()
        for queue in (self._reading, self._drafting, self._verifying):
            queue.clear()
        self._read_until = now
        self._begin_texts(now + ARRIVAL_S)

    def _end_text(self, session: SimulatedSession, now: float) -> None:
        if session.chooser is not None:
            session.chooser.close()
        if self.pair.renews_texts:
            self._begin_text([], now)
            return
        self._num_running -= 1
        if not self._num_running:
            self._begin_texts(now)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _session_at(
        self, time: float, session: SimulatedSession, event: Callable[[SimulatedSession, float], None]
    ) -> None:
        """Lets a session do something at a time, unless its text was given up by then."""
        self._at(time, lambda now: None if session.is_given_up else event(session, now))

    def _ask(self, session: SimulatedSession, now: float) -> None:
        session.asked_at, session.draft_s = now, 0.0
        session.arm = self._next_arm(session, now)
        if session.arm.source is DraftSource.AHEAD and self._random.random() < (self.pair.ahead or 0.0):
            self._queue_round(session, now)
            return
        if session.arm.uses_drafter and self._is_ready(session, now):
            self._session_at(now + self.pair.hop_s, session, self._queue_draft)
            return
        if session.arm.uses_drafter:
            session.arm, session.plain_left = PLAIN, 1
            self._session_at(now + self.pair.hop_s, session, self._queue_round)
            return
        chooser = session.chooser
        session.plain_left = PLAIN_RUN if chooser is None else chooser.num_plain_rounds(PLAIN_RUN, now)
        self._session_at(now + self.pair.hop_s, session, self._queue_round)

    def _next_arm(self, session: SimulatedSession, now: float) -> Arm:
        if session.chooser is None:
            if isinstance(self.fixed, Arm):
                return self.fixed
            return Arm(DraftSource.DRAFTER, self.fixed) if self.fixed else PLAIN
        arm = session.chooser.next_draft(session.round, 10**6, now)
        if arm.length:
            return arm
        if DraftSource.VERIFIER not in self.pair.sources:
            return PLAIN
        length = session.chooser.next_own_length(session.round, 10**6, now)
        return Arm(DraftSource.VERIFIER, length) if length else PLAIN

    def _is_ready(self, session: SimulatedSession, now: float) -> bool:
        """Whether a drafter has read the prompt, which it begins when it is first asked."""
        if session.is_read is None and self.pair.prompt_s:
            session.is_read = False
            self._reading.append(session)
            self._start_drafting(now)
        return session.is_read is not False

    def _queue_draft(self, session: SimulatedSession, now: float) -> None:
        self._drafting.append(session)
        self._start_drafting(now)

    def _queue_round(self, session: SimulatedSession, now: float) -> None:
        self._verifying.append(session)
        self._start_verifying(now)

    def _took(self, seconds: float, now: float) -> float:
        if self.pair.is_uneven and self._random.random() < 0.05:
            seconds *= 3.0
        return seconds * self.pair.slowness(now) * max(0.3, 1.0 + self.pair.noise * self._random.gauss(0.0, 1.0))

    def _start_drafting(self, now: float) -> None:
        if self._drafter_is_busy or not (self._drafting or self._reading):
            return
        batch, self._drafting, self._drafter_is_busy = self._drafting, [], True
        reading, self._reading = self._reading[: self.pair.prompts_at_once], self._reading[self.pair.prompts_at_once :]
        took = self._took(self.pair.draft_s * max((session.arm.length for session in batch), default=0), now)
        if self.pair.is_uneven and self._verifier_is_busy:
            took *= 1.5
        took += self.pair.prompt_s * len(reading)
        for session in batch:
            session.draft_s, session.num_drafting = took, len(batch)
        self._at(now + took, partial(self._end_drafting, batch, reading))

    def _end_drafting(self, batch: list[SimulatedSession], reading: list[SimulatedSession], now: float) -> None:
        self._drafter_is_busy = False
        for session in reading:
            session.is_read = True
        for session in batch:
            self._session_at(now + self.pair.hop_s, session, self._queue_round)
        self._start_drafting(now)

    def _start_verifying(self, now: float) -> None:
        if self._verifier_is_busy or not self._verifying:
            return
        batch, self._verifying, self._verifier_is_busy = self._verifying, [], True
        num_rows = sum(session.arm.length + 1 for session in batch)
        is_ahead = any(session.arm.source is DraftSource.AHEAD for session in batch)
        num_tokens = sum(session.num_tokens for session in batch)
        took = self.pair.verify_s + self.pair.rows_s(num_rows) + self.pair.ahead_s * is_ahead
        took = self._took(took + self.pair.text_token_s * num_tokens, now)
        self._at(now + took, partial(self._end_verifying, batch, took, StepSize(num_rows, len(batch), num_tokens)))

    def _end_verifying(self, batch: list[SimulatedSession], took: float, size: StepSize, now: float) -> None:
        self._verifier_is_busy = False
        for session in batch:
            if not session.is_given_up:
                self._end_round(session, took, size, now)
        self._start_verifying(now)

    def _end_round(self, session: SimulatedSession, verify_s: float, size: StepSize, now: float) -> None:
        accepted = self.pair.num_accepted(session.arm, now, self._random.random)
        self._num_tokens += (accepted + 1) * (now >= self._since)
        session.tokens_left -= accepted + 1
        session.num_tokens += accepted + 1
        arrived_at = now + self.pair.hop_s
        if session.chooser is not None:
            is_guess = session.arm.source is DraftSource.VERIFIER
            times = (session.asked_at, arrived_at, session.arm.length, accepted, session.draft_s, verify_s)
            changes: dict[str, Any] = {"step": size, "timings": DraftTimings(num_drafted_sessions=session.num_drafting)}
            if is_guess:
                changes["guess"] = GuessPart("guesses")
            if session.is_read is False:
                changes["why_plain"] = WhyPlain.WARMING_UP
            session.chooser.observe(round_times(session.round, *times, **changes))
        session.round += 1
        session.plain_left -= 1
        if session.tokens_left <= 0:
            self._end_text(session, arrived_at)
        elif not session.arm.uses_drafter and session.plain_left:
            session.asked_at = arrived_at
            self._verifying.append(session)
        else:
            self._session_at(arrived_at, session, self._ask)


def round_times(
    number: int,
    started_at: float,
    ended_at: float,
    num_draft_tokens: int,
    accepted: int,
    draft_s: float = 0.0,
    verify_s: float = 0.0,
    **changes: Any,
) -> RoundTimes:
    """Returns the times of a round without losses; `changes` are of these or of its verdict."""
    extra = TokenSource.RECOVERED if accepted < num_draft_tokens else TokenSource.BONUS
    verdict = Verdict(
        Fence(0, 0, number, 0, 0),
        [0] * (accepted + 1),
        num_draft_tokens,
        accepted,
        extra if num_draft_tokens else TokenSource.PLAIN,
        0,
        **{name: changes.pop(name) for name in tuple(changes) if name not in RoundTimes.__slots__},
    )
    fields: dict[str, Any] = {
        "verdict": verdict,
        "started_at": started_at,
        "ended_at": ended_at,
        "why_plain": None if num_draft_tokens else WhyPlain.DOES_NOT_PAY,
        "is_first": False,
        "draft_s": draft_s,
        "verify_s": verify_s,
        **dict.fromkeys(("lost_s", "prefill_s", "calibration_s", "queue_s", "wire_s", "gateway_s"), 0.0),
    }
    return RoundTimes(**(fields | changes))


def constant(acceptance: float) -> Callable[[float], float]:
    """Returns an acceptance that does not change."""
    return lambda _: acceptance
