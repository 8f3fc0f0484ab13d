"""A verifier and a drafter in simulated time, to test which lengths are chosen. Both batch what is ready into steps."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.pair_chooser import PairChooser
from draftwire_gateway.speculation.session_length import SessionLength


@dataclass(frozen=True)
class Cell:
    """Speeds of a pair, and how many sessions it has at once."""

    verify_ms: float
    row_us: float
    draft_ms: float
    acceptance: Callable[[float], float]
    """By time in seconds, of each token whose predecessors were accepted."""
    num_sessions: int
    hop_ms: float = 0.3
    noise: float = 0.05
    max_tokens: int = 10**9
    """Of a completion; then the session starts again."""


@dataclass
class Session:
    index: int
    chooser: SessionLength | None
    round: int = 0
    length: int = 0
    asked_at: float = 0.0
    plain_left: int = 0
    num_tokens: int = 0
    verify_s: float = 0.0
    draft_s: float = 0.0
    queue: list[float] = field(default_factory=list)


def simulate(cell: Cell, seconds: float, fixed: int | None, seed: int = 0, since: float = 0.0, pair=None) -> float:
    """Returns tokens per second after `since`, with a fixed length or (None) the chosen ones."""
    rng = random.Random(seed)
    pair = pair or PairChooser(8, 4)
    sessions = [
        Session(index, None if fixed is not None else SessionLength(pair)) for index in range(cell.num_sessions)
    ]
    events: list[tuple[float, int, str, object]] = []
    count = 0
    ready: dict[str, list[Session]] = {"draft": [], "verify": []}
    busy = {"draft": False, "verify": False}
    total = 0

    def at(when, what, item):
        nonlocal count
        count += 1
        heapq.heappush(events, (when, count, what, item))

    def ask(session: Session, now: float):
        session.asked_at = now
        session.draft_s = 0.0
        if fixed is not None:
            session.length = fixed
        else:
            session.length = session.chooser.next_length(session.round, 10**6, now)
        if session.length:
            at(now + cell.hop_ms / 1e3, "draft", session)
        else:
            rounds = 32 if fixed is not None else session.chooser.num_plain_rounds(32, now)
            session.plain_left = rounds
            at(now + cell.hop_ms / 1e3, "verify", session)

    def start(kind, now):
        if busy[kind] or not ready[kind]:
            return
        batch, ready[kind] = ready[kind], []
        busy[kind] = True
        jitter = 1.0 + cell.noise * rng.gauss(0.0, 1.0)
        if kind == "draft":
            took = cell.draft_ms / 1e3 * (max(s.length for s in batch)) * max(0.3, jitter)
            for s in batch:
                s.draft_s = took
        else:
            rows = sum(s.length + 1 for s in batch)
            took = (cell.verify_ms / 1e3 + cell.row_us * rows / 1e6) * max(0.3, jitter)
            for s in batch:
                s.verify_s = took
        at(now + took, "done " + kind, batch)

    for session in sessions:
        ask(session, rng.random() * 0.01)
    while events:
        now, _, what, item = heapq.heappop(events)
        if now > seconds:
            break
        if what in ("draft", "verify"):
            ready[what].append(item)
            start(what, now)
        elif what == "done draft":
            busy["draft"] = False
            for session in item:
                at(now + cell.hop_ms / 1e3, "verify", session)
            start("draft", now)
        elif what == "done verify":
            busy["verify"] = False
            for session in item:
                rate = cell.acceptance(now)
                accepted = 0
                while accepted < session.length and rng.random() < rate:
                    accepted += 1
                tokens = accepted + 1
                if now >= since:
                    total += tokens
                session.num_tokens += tokens
                back = now + cell.hop_ms / 1e3
                times = RoundTimes(
                    0,
                    session.round,
                    session.asked_at,
                    back,
                    session.length,
                    accepted,
                    tokens,
                    None if session.length else WhyPlain.DOES_NOT_PAY,
                    False,
                    0.0,
                    0.0,
                    0.0,
                    session.draft_s,
                    0.0,
                    session.verify_s,
                    0.0,
                    0.0,
                )
                session.round += 1
                if session.length == 0:
                    session.plain_left -= 1
                    if fixed is None:
                        session.chooser.observe(times)
                    if session.plain_left:
                        session.asked_at = back
                        ready["verify"].append(session)
                    else:
                        at(back, "ask", session)
                else:
                    if fixed is None:
                        session.chooser.observe(times)
                    at(back, "ask", session)
            start("verify", now)
        elif what == "ask":
            if item.num_tokens >= cell.max_tokens and fixed is None:
                item.chooser.close()
                item.chooser = SessionLength(pair)
                item.num_tokens = item.round = 0
            ask(item, now)
    return total / (seconds - since)
