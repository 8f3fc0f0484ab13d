"""Where the time of each round goes, as the gateway sees it.

    asked for ── draft ── wire ── queue ── verify ── wire ──▶ verdict ── gateway ──▶ the next round is asked for

The rounds of a session lie end to end: each starts when the one before it left the gateway, so that no time is counted
twice. Left out are the time before the first round is asked for, and rounds that are cut short.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from draftwire.method.rounds import Verdict


class WhyPlain(Enum):
    """Why no draft token was judged in a round."""

    NOT_ASKED_FOR = "not_asked_for"
    """The request wants no speculation."""
    NO_DRAFTER = "no_drafter"
    """None is there, or none that the session has not tried and whose context is long enough."""
    WARMING_UP = "warming_up"
    """The drafter still reads the prompt."""
    NO_ROOM = "no_room"
    """One token is left, or the drafter's context is full."""
    EMPTY_BLOCK = "empty_block"
    """The drafter drew nothing."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One committed round. Times are by `time.perf_counter`, durations in seconds.

    `lost_s` to `wire_s` sum to `ended_at - started_at`, and with `gateway_s` to `duration_s`. What the services report
    of themselves never makes more than what the gateway measured: what is beyond it is cut off.
    """

    epoch: int
    round: int
    started_at: float
    """When the round was asked for; within a plain run, when the verdict before it arrived."""
    ended_at: float
    """When its verdict arrived."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int
    """Tokens that it committed."""
    why_plain: WhyPlain | None
    """None where draft tokens were judged."""
    is_first: bool
    """Whether it is the first of the session at this verifier, which reads the prompt for it."""
    lost_s: float
    """Waiting for drafters and verifiers that were then given up, or that refused."""
    prefill_s: float
    """In a first round, in place of the next four: from its asking to its verdict, most of it the reading of the
    prompt."""
    calibration_s: float
    """The drafter read what was committed since its last block."""
    draft_s: float
    """The drafter drew the block."""
    queue_s: float
    """The block, or the plain round, waited for a step of the verifier."""
    verify_s: float
    """That step."""
    wire_s: float
    """What is left: the network, packing and unpacking, and waiting for a step of the drafter."""
    gateway_s: float
    """From the verdict's arrival until the next round was asked for, or until all was done; 0 within a plain run. A
    client that reads too slowly holds up its rounds here."""

    @property
    def duration_s(self) -> float:
        """From the start of this round to the start of the next."""
        return self.ended_at - self.started_at + self.gateway_s


RoundObserver = Callable[[RoundTimes], None]
"""Hears of each committed round of a session, on the event loop, when it is known how long the gateway took over it.
Must not raise."""


class RoundWatch:
    """Times the rounds of one session for an observer. Without one, does nothing."""

    def __init__(self, observer: RoundObserver | None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Takes who hears of the rounds, and the clock that verdicts are stamped by."""
        self._observer = observer
        self._clock = clock
        self._started_at: float | None = None
        self._asked_at = 0.0
        self._is_first = False
        self._why = WhyPlain.NO_DRAFTER
        self._verdict: Verdict | None = None
        """Of a round that is not told yet."""
        self._arrived_at = 0.0

    def ask(self, why_plain: WhyPlain, *, opens: bool = False) -> None:
        """Notes that a round is asked for, or the open one once more, of others.

        Args:
            why_plain: why no draft token is judged in it, if none is.
            opens: whether it is asked for by opening the session.
        """
        if self._observer is None:
            return
        now = self._clock()
        self._tell(now)
        if self._started_at is None:
            self._started_at = now
        self._asked_at, self._why = now, why_plain
        self._is_first = self._is_first or opens

    def take(self, verdict: Verdict, arrived_at: float) -> None:
        """Notes the verdict of the open round."""
        if self._observer is None:
            return
        self._verdict, self._arrived_at = verdict, arrived_at
        if verdict.plain_rounds_left:
            self._tell(arrived_at)
            self._asked_at = arrived_at

    def end(self) -> None:
        """Notes that no more rounds are wanted."""
        if self._observer is not None:
            self._tell(self._clock())

    def _tell(self, left_at: float) -> None:
        """Tells of the round whose verdict is there, if one is, and begins the next."""
        verdict, started_at = self._verdict, self._started_at
        if verdict is None or started_at is None or self._observer is None:
            return
        arrived_at = max(self._arrived_at, started_at)
        # A block that came after its drafter was given up was not asked for in vain.
        asked_at = started_at if verdict.num_draft_tokens else min(self._asked_at, arrived_at)
        left_s, is_first = arrived_at - asked_at, self._is_first
        parts = []
        for microseconds in (
            verdict.verify_us,
            verdict.queue_us,
            verdict.timings.draft_us,
            verdict.timings.calibration_us,
        ):
            parts.append(0.0 if is_first else min(microseconds / 1e6, left_s))
            left_s -= parts[-1]
        verify_s, queue_s, draft_s, calibration_s = parts
        times = RoundTimes(
            epoch=verdict.fence.epoch,
            round=verdict.fence.round,
            started_at=started_at,
            ended_at=arrived_at,
            num_draft_tokens=verdict.num_draft_tokens,
            num_accepted_tokens=verdict.num_accepted_tokens,
            num_tokens=len(verdict.token_ids),
            why_plain=None if verdict.num_draft_tokens else self._why,
            is_first=is_first,
            lost_s=asked_at - started_at,
            prefill_s=left_s if is_first else 0.0,
            calibration_s=calibration_s,
            draft_s=draft_s,
            queue_s=queue_s,
            verify_s=verify_s,
            wire_s=0.0 if is_first else left_s,
            gateway_s=max(0.0, left_at - arrived_at),
        )
        self._verdict, self._is_first = None, False
        self._started_at = self._asked_at = max(left_at, arrived_at)
        self._observer(times)
