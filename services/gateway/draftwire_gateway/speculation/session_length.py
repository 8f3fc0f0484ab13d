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

    def __init__(self, pair: PairChooser, is_local: bool = False) -> None:
        """Counts the session in; `close` counts it out.

        Args:
            pair: chooses for all its sessions.
            is_local: whether the verifier drafts by itself. Then a round of some length may have a shorter draft, or
                none, at no cost but its rows: what was not guessed counts as not accepted.
        """
        self._pair = pair
        self._is_local = is_local
        self._acceptance = AcceptanceEstimate(prior=pair.acceptance)
        self._asked: deque[tuple[int, Window, int]] = deque(maxlen=2)
        """Round, window and length of the latest requests."""
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
        self.end_reading(time.perf_counter())
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
        self._asked.append((round_number, window, length))
        return length

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many plain rounds to request at once, at most `most`."""
        return self._pair.num_plain_rounds(most, now)

    def observe(self, times: RoundTimes) -> None:
        """Takes note of a round; a `RoundObserver`."""
        self.end_reading(times.ended_at)
        asked = next((asked for asked in reversed(self._asked) if asked[0] <= times.round), None)
        if asked is None:
            return
        _, window, length = asked
        num_draft_tokens = self._num_judged(times, length)
        if num_draft_tokens:
            self._acceptance.add(num_draft_tokens, times.num_accepted_tokens)
            self._pair.acceptance.add(num_draft_tokens, times.num_accepted_tokens)
        is_whole = length == window.length
        was_fresh, self._is_fresh = self._is_fresh, not times.num_draft_tokens and not self._is_local
        if window.length:
            is_whole = is_whole and not was_fresh and times.why_plain not in _NOT_OF_THE_LENGTH
            is_other = bool(times.local_strategy) or times.why_plain is WhyPlain.NO_GUESS  # while a drafter warms up
            is_whole = is_whole and (self._is_local or not is_other)
        is_whole = is_whole and not times.is_first and not times.lost_s
        self._pair.observe(times, window, is_whole=is_whole)

    def _num_judged(self, times: RoundTimes, length: int) -> int:
        """Returns of how many draft tokens a round shows whether they are accepted, asked for so many."""
        if self._is_local:
            return 0 if times.is_first else length
        return 0 if times.local_strategy else times.num_draft_tokens

    def end_reading(self, now: float) -> None:
        """Records that the prompt was read, unless it was recorded before."""
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
