"""The chosen lengths of one session's drafts."""

import time
from collections import deque

from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate
from draftwire_gateway.speculation.pair_chooser import PairChooser, Window

OWN_DRAFTS = 16
"""A session's drafts, before they alone can shorten its next ones."""
OWN_GAIN = 0.10
"""By so much a shorter draft must be better for a session, to depart from the length of all."""


class SessionLength:
    """The chosen lengths of one session with one pair."""

    def __init__(self, pair: PairChooser) -> None:
        """Counts the session in; `close` counts it out."""
        self._pair = pair
        self._acceptance = AcceptanceEstimate(prior=pair.acceptance)
        self._asked: deque[tuple[int, Window, bool]] = deque(maxlen=2)
        """Round, window, and whether the round was to have the window's length, of the latest requests."""
        self._is_fresh = True
        """Whether no draft was verified since the last plain round: the drafter has much to read first."""
        self._is_reading = True
        """Whether the prompt is still being read."""
        pair.join()

    def pays(self, now: float) -> bool:
        """Whether sessions of the pair are to draft now: a drafter is opened only then."""
        return self._pair.window(now).length > 0

    def close(self) -> None:
        """Counts the session out."""
        self._end_reading(time.perf_counter())
        self._pair.leave()

    def next_length(self, round_number: int, most: int, now: float) -> int:
        """Returns how many tokens to draft for a round that is requested now; 0 for a plain round.

        Args:
            round_number: the round.
            most: for how many there is room; less than 1 for none.
            now: by the clock of `RoundTimes`.
        """
        window = self._pair.window(now)
        length = max(0, min(window.length, most))
        is_whole = length == window.length
        if is_whole and length > 1 and not window.is_probe and self._acceptance.num_drafts >= OWN_DRAFTS:
            length = self._shortened(window)
            is_whole = length == window.length
        self._asked.append((round_number, window, is_whole))
        return length

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many plain rounds to request at once, at most `most`."""
        return self._pair.num_plain_rounds(most, now)

    def observe(self, times: RoundTimes) -> None:
        """Takes note of a round; a `RoundObserver`."""
        self._end_reading(times.ended_at)
        if times.num_draft_tokens:
            self._acceptance.add(times.num_draft_tokens, times.num_accepted_tokens)
            self._pair.acceptance.add(times.num_draft_tokens, times.num_accepted_tokens)
        asked = next((asked for asked in reversed(self._asked) if asked[0] <= times.round), None)
        if asked is None:
            return
        _, window, is_whole = asked
        was_fresh, self._is_fresh = self._is_fresh, not times.num_draft_tokens
        if window.length:
            is_whole = is_whole and not was_fresh and times.why_plain not in _NOT_OF_THE_LENGTH
        is_whole = is_whole and not times.is_first and not times.lost_s
        self._pair.observe(times, window, is_whole=is_whole)

    def _end_reading(self, now: float) -> None:
        if self._is_reading:
            self._is_reading = False
            self._pair.end_reading(now)

    def _shortened(self, window: Window) -> int:
        """Returns the best length up to the window's, by this session's own acceptance."""
        round_s = self._pair.round_s_on_line(window)
        if not round_s:
            return window.length
        survival = self._acceptance.survival(window.length)
        rates, tokens = [], 1.0
        for length, probability in enumerate(survival, 1):
            tokens += probability
            rates.append(tokens / round_s[length - 1])
        best = max(range(len(rates)), key=lambda index: rates[index])
        return best + 1 if rates[best] > (1.0 + OWN_GAIN) * rates[-1] else window.length


_NOT_OF_THE_LENGTH = (WhyPlain.WARMING_UP, WhyPlain.NO_DRAFTER, WhyPlain.NO_ROOM)
