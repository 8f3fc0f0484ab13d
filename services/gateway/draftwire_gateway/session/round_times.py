"""Breakdown of the time of each round, measured at the gateway.

    asked for ── draft ── wire ── queue ── verify ── wire ──▶ verdict ── gateway ──▶ the next round is asked for

The rounds of a session are contiguous: each starts at the end of the one before, so that no time is counted twice. The
time before the first request of a round, and rounds that are cut short, are left out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from draftwire.method.rounds import DraftTimings, Verdict


class WhyPlain(Enum):
    """Reason why no draft token was verified in a round."""

    NOT_ASKED_FOR = "not_asked_for"
    """The request disables speculation."""
    NO_DRAFTER = "no_drafter"
    """There is no untried drafter whose context is long enough."""
    WARMING_UP = "warming_up"
    """The drafter is in its prefill."""
    DOES_NOT_PAY = "does_not_pay"
    """Drafts would cost more time than their accepted tokens save."""
    NO_ROOM = "no_room"
    """One token is left, or the drafter's context is full."""
    LATE = "late"
    """The drafter's block did not come in time; it is asked again when it answers."""
    EMPTY_BLOCK = "empty_block"
    """The drafter drew nothing."""
    UNSURE = "unsure"
    """The drafter was not sure of the first place, and ended the block before it, as it was asked to."""
    NO_GUESS = "no_guess"
    """The verifier drafts by itself, and the text has no earlier place like its end, or its head still reads."""
    SLOW_MASKS = "slow_masks"
    """The masks of the text's form take so long that none are computed for draft tokens."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of one committed round. Times are by `time.perf_counter`, durations in seconds.

    `lost_s` to `wire_s` sum to `ended_at - started_at`, and with `gateway_s` to `duration_s`. Durations reported by the
    services are capped so that their sum does not exceed the time that the gateway measured.
    """

    verdict: Verdict
    """Decision of the round."""
    started_at: float
    """Time at which the round was requested; within a plain run, when the verdict before it arrived."""
    ended_at: float
    """Time at which its verdict arrived."""
    why_plain: WhyPlain | None
    """None if draft tokens were verified."""
    is_first: bool
    """Whether the round is the session's first at this verifier, and includes the prefill."""
    lost_s: float
    """Waiting for drafters and verifiers that were then dropped, or that refused."""
    prefill_s: float
    """Only in a first round, in place of the following parts up to `wire_s`: from its request to its verdict, mostly
    the prefill."""
    calibration_s: float
    """The drafter's forward pass over the tokens committed since its last block."""
    draft_s: float
    """Drawing of the block by the drafter."""
    queue_s: float
    """Wait of the block, or of the plain round, for a step of the verifier."""
    verify_s: float
    """Duration of that step of the verifier."""
    wire_s: float
    """The rest: network, encoding and decoding, and the wait for a step of the drafter."""
    gateway_s: float
    """Time from the verdict's arrival to the request of the next round, or to the end; 0 within a plain run. Includes
    backpressure of a slow client."""
    is_held: bool = False
    """Whether the verifier had its block when it began."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the round committed."""
        return len(self.verdict.token_ids)

    @property
    def duration_s(self) -> float:
        """Time from the start of this round to the start of the next."""
        return self.ended_at - self.started_at + self.gateway_s


RoundObserver = Callable[[RoundTimes], None]
"""Called on the event loop for each committed round of a session, when its `gateway_s` is known. Must not raise."""


class RoundWatch:
    """Measures the rounds of one session for observers."""

    def __init__(self, observers: Sequence[RoundObserver], clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` must be the one that the arrival times of verdicts are from."""
        self._observers = observers
        self._clock = clock
        self._started_at: float | None = None
        self._asked_at = 0.0
        self._is_first = False
        self._why = WhyPlain.NO_DRAFTER
        self._verdict: Verdict | None = None
        """Verdict of a round that was not reported yet."""
        self._arrived_at = 0.0
        self._is_held = self._next_is_held = False
        self._left: RoundTimes | None = None
        """A round after which the next one was requested, and that was not reported yet."""

    def ask(self, why_plain: WhyPlain, *, opens: bool = False) -> None:
        """Records the request of a round, or a repeated one of the open round after a loss; `opens` if it opens the
        session on a verifier. The round before is reported by `report`, so that the request is not delayed.
        """
        now = self._clock()
        self._leave(now)
        if self._started_at is None:
            self._started_at = now
        self._asked_at, self._why = now, why_plain
        self._is_first = self._is_first or opens

    def take(self, verdict: Verdict, arrived_at: float) -> None:
        """Records the verdict of the open round."""
        self._verdict, self._arrived_at = verdict, arrived_at
        self._is_held = self._next_is_held
        self._next_is_held = verdict.ahead is not None and verdict.ahead.next_is_held
        if verdict.plain_rounds_left:
            self._leave(arrived_at)
            self.report()
            self._asked_at = arrived_at

    def end(self) -> None:
        """Reports the last round."""
        self._leave(self._clock())
        self.report()

    def report(self) -> None:
        """Reports the round after which the next one was requested, if that was not done."""
        if (times := self._left) is not None:
            self._left = None
            for observe in self._observers:
                observe(times)

    def _leave(self, left_at: float) -> None:
        """Ends the round whose verdict has arrived, if any, and starts the next."""
        self.report()
        verdict, started_at = self._verdict, self._started_at
        if verdict is None or started_at is None:
            return
        arrived_at = max(self._arrived_at, started_at)
        # A block that arrived after its drafter was dropped still counts from its own request.
        asked_at = started_at if verdict.num_draft_tokens else min(self._asked_at, arrived_at)
        left_s, is_first = arrived_at - asked_at, self._is_first
        parts = []
        timings = DraftTimings() if self._is_held else verdict.timings  # it was drafted in an earlier round
        for microseconds in (verdict.verify_us, verdict.queue_us, timings.draft_us, timings.calibration_us):
            parts.append(0.0 if is_first else min(microseconds / 1e6, left_s))
            left_s -= parts[-1]
        verify_s, queue_s, draft_s, calibration_s = parts
        self._left = RoundTimes(
            verdict=verdict,
            started_at=started_at,
            ended_at=arrived_at,
            why_plain=None if verdict.num_draft_tokens else WhyPlain.UNSURE if verdict.ended_unsure else self._why,
            is_first=is_first,
            lost_s=asked_at - started_at,
            prefill_s=left_s if is_first else 0.0,
            calibration_s=calibration_s,
            draft_s=draft_s,
            queue_s=queue_s,
            verify_s=verify_s,
            wire_s=0.0 if is_first else left_s,
            gateway_s=max(0.0, left_at - arrived_at),
            is_held=self._is_held,
        )
        self._verdict, self._is_first = None, False
        self._started_at = self._asked_at = max(left_at, arrived_at)
