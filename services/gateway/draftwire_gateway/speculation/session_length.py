"""The chosen lengths and shapes of one session's drafts."""

import time
from collections import deque
from typing import NamedTuple

from draftwire.method.round_parts import WatchedGuess
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_gateway.speculation.acceptance import AcceptanceEstimate
from draftwire_gateway.speculation.pair_acceptance import estimates_of
from draftwire_gateway.speculation.pair_chooser import MAX_CHOSEN_LENGTH, PairChooser
from draftwire_gateway.speculation.windows import Window

OWN_DRAFTS = 16
"""A session's drafts, before they alone can shorten its next ones."""
OWN_GAIN = 0.10
"""By so much a shorter draft must be better for a session, to depart from the length of all."""
OWN_EVERY = 4
"""A session's drafts, after which its length is computed anew within a window."""


class Asked(NamedTuple):
    """What was asked for from a round on."""

    round: int
    window: Window
    arm: Arm


class SessionLength:
    """The chosen lengths of one session with one pair."""

    def __init__(self, pair: PairChooser) -> None:
        """Counts the session in; `close` counts it out.

        Args:
            pair: chooses for all its sessions.
        """
        self._pair = pair
        self._acceptance = estimates_of(pair.acceptance.chains, pair.acceptance.chains)
        self._asked: deque[Asked] = deque(maxlen=2)
        """The latest requests, of different rounds."""
        self._is_fresh = True
        """Whether no drafter's block was verified since the last round without: the drafter has much to read first."""
        self._is_opening = True
        """Whether a drafter that is asked to draft next has to read the text first, or reads it."""
        self._ended_at: float | None = None
        """When the latest round and the wait for its reader ended; None before the first one did."""
        self._is_reading = True
        """Whether the prompt is still being read."""
        self._text_tokens = 0
        """Tokens of the text so far, without its prompt."""
        self._shortened_at: tuple[Window, int] | None = None
        """The window, and the session's drafts by a multiple of `OWN_EVERY`, for which its length was computed last."""
        self._shortened_to = 0
        pair.join()

    def uses_drafter(self, now: float) -> bool:
        """Whether drafters are to draft for the pair now: a drafter is opened only then."""
        return self._pair.window(now).arm.uses_drafter

    def close(self) -> None:
        """Counts the session out."""
        self._end_reading(time.perf_counter(), is_read=False)
        self._pair.leave()

    def next_draft(self, round_number: int, most: int, now: float) -> Arm:
        """Returns what the drafter is to draft for a round that is requested now; plain decoding for a round without
        it.

        Args:
            round_number: the round.
            most: for how many tokens, on each path of a tree, there is room; less than 1 for none.
            now: by the clock of `RoundTimes`.
        """
        window = self._pair.window(now)
        return self._ask(round_number, window, window.arm if window.arm.uses_drafter else PLAIN, most)

    def replace_arm(self, round_number: int, arm: Arm) -> None:
        """Records that something else is drafted for a round than `next_draft` has just returned."""
        asked = self._asked.pop()
        assert asked.round == round_number, "of the latest request"
        self._asked.append(asked._replace(arm=arm))

    def next_own_length(self, round_number: int, most: int, now: float) -> int:
        """Returns how many tokens the verifier is to draft by itself for each of the rounds that are requested now, 0
        for none: in place of a drafter that cannot, as many as are best for the verifier.

        Args:
            round_number: the first of the rounds.
            most: for how many there is room, at least 1.
            now: by the clock of `RoundTimes`.
        """
        window = self._pair.window(now)
        arm = window.arm
        if arm.uses_drafter:
            arm = Arm(DraftSource.VERIFIER, self._pair.known.best_length(DraftSource.VERIFIER, window.load))
        return self._ask(round_number, window, arm, most).length

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`."""
        return self._pair.num_plain_rounds(most, now)

    def observe(self, times: RoundTimes) -> None:
        """Takes note of a round; a `RoundObserver`."""
        if self._is_reading:
            self._end_reading(times.ended_at, is_read=True)
        asked = self._asked_for(times.verdict.fence.round)
        is_drafters = _is_drafters(times)
        ended_at = times.ended_at + times.gateway_s
        text_tokens = self._text_tokens
        self._text_tokens += times.num_tokens
        if self._ended_at is not None and not times.is_first:  # all pay for the prompt at the verifier
            window = None if asked is None else asked.window
            is_opening = self._is_opening and window is not None and window.arm.uses_drafter
            self._pair.count(times, window, ended_at - self._ended_at, is_opening=is_opening)
        self._ended_at = ended_at
        if asked is None:
            return
        window, arm = asked.window, asked.arm
        self._learn(times, window, arm, is_drafters=is_drafters)
        is_whole = arm == window.arm and not times.is_first and not times.lost_s and not _reads_for_drafts(times)
        if is_drafters:
            self._is_opening = False
        elif not window.arm.uses_drafter:
            self._is_opening = True
        was_fresh, self._is_fresh = self._is_fresh, not is_drafters
        if arm.uses_drafter:
            is_whole = is_whole and not was_fresh and times.why_plain not in _NOT_OF_THE_LENGTH
            is_whole = is_whole and not _is_verifiers(times)
        self._pair.observe(times, window, is_whole=is_whole, text_tokens=text_tokens)

    def _asked_for(self, round_number: int) -> Asked | None:
        """Returns the request that a round was of; None if it was requested without."""
        for asked in reversed(self._asked):
            if asked.round <= round_number:
                return asked
        return None

    def _learn(self, times: RoundTimes, window: Window, arm: Arm, *, is_drafters: bool) -> None:
        """Adds what a round of some arm shows of how much is accepted."""
        pair = self._pair.acceptance
        if is_drafters and arm.num_nodes:
            size = arm if arm in pair.trees else window.arm  # one that was cut for room is of the window's size
            if size in pair.trees:
                pair.count_tree(size, arm.length, times.verdict.num_accepted_tokens)
        chains = pair.chains.get(DraftSource.DRAFTER)
        num_surprises = 0 if chains is None else chains.num_surprises
        for source, own in self._acceptance.items():
            if source is DraftSource.DRAFTER:
                # A drafter's block may be judged after it was given up: as a tree, or in a round that asked for none.
                if is_drafters and arm.uses_drafter and not arm.num_nodes and times.verdict.tree is None:
                    own.add(times.verdict.num_draft_tokens, times.verdict.num_accepted_tokens)
                    pair.chains[source].add(times.verdict.num_draft_tokens, times.verdict.num_accepted_tokens)
            elif source is not DraftSource.AHEAD:  # shares the drafter's
                _learn_guess(own, times, source, arm)
                _learn_guess(pair.chains[source], times, source, arm)
        if chains is not None and chains.num_surprises > num_surprises:
            pair.forget_trees()

    def _end_reading(self, now: float, *, is_read: bool) -> None:
        if self._is_reading:
            self._is_reading = False
            self._pair.end_reading(now, is_read=is_read)

    def _ask(self, round_number: int, window: Window, wanted: Arm, most: int) -> Arm:
        """Returns an arm as far as there is room, or a shorter one that is better for this session; and remembers."""
        length = max(0, min(wanted.length, most))
        own = None if wanted.source is None else self._acceptance.get(wanted.source)
        if own is not None and length > 1 and window.arm == (wanted.source, length, 0) and not window.is_probe:
            at = window, own.num_drafts // OWN_EVERY
            if at != self._shortened_at:
                self._shortened_at, self._shortened_to = at, self._shortened(window, own)
            length = self._shortened_to
        arm = wanted if length == wanted.length else wanted._replace(length=length) if length else PLAIN
        if self._asked and self._asked[-1].round == round_number:
            self._asked.pop()
        self._asked.append(Asked(round_number, window, arm))
        return arm

    def _shortened(self, window: Window, acceptance: AcceptanceEstimate) -> int:
        """Returns the best length up to the window's, by this session's own acceptance."""
        longest = window.arm.length
        round_s = self._pair.known.round_s_on_line(window) if acceptance.num_drafts >= OWN_DRAFTS else []
        if not round_s:
            return longest
        survival = acceptance.survival(longest)
        rates, tokens = [], 1.0
        for length, probability in enumerate(survival, 1):
            tokens += acceptance.share * probability
            rates.append(tokens / round_s[length - 1])
        best = max(range(len(rates)), key=lambda index: rates[index])
        return best + 1 if rates[best] > (1.0 + OWN_GAIN) * rates[-1] else longest


_NOT_OF_THE_LENGTH = (WhyPlain.WARMING_UP, WhyPlain.NO_DRAFTER, WhyPlain.NO_ROOM, WhyPlain.SLOW_MASKS)


def _learn_guess(acceptance: AcceptanceEstimate, times: RoundTimes, source: DraftSource, arm: Arm) -> None:
    """Adds what a round of some arm shows of what the verifier drafts by itself."""
    if arm.source is source and times.verdict.is_of_verifier:
        # A guess may be shorter, at no cost but its rows: what was not guessed counts as not accepted.
        acceptance.add(arm.length, times.verdict.num_accepted_tokens)
    elif (watched := _watched(times)) is not None:
        if watched.has_guess:
            acceptance.add(min(times.num_tokens, MAX_CHOSEN_LENGTH), watched.num_right)
        else:
            acceptance.add_missing()


def _watched(times: RoundTimes) -> WatchedGuess | None:
    return None if times.verdict.guess is None else times.verdict.guess.watched


def _reads_for_drafts(times: RoundTimes) -> bool:
    """Whether what drafts at the verifier still reads the text, which takes time and drafts nothing yet."""
    return times.why_plain is WhyPlain.NO_GUESS and _watched(times) is None


def _is_verifiers(times: RoundTimes) -> bool:
    """Whether the verifier drafted by itself in a round, or had no guess."""
    return times.verdict.is_of_verifier or times.why_plain is WhyPlain.NO_GUESS


def _is_drafters(times: RoundTimes) -> bool:
    """Whether a drafter's block was verified in a round."""
    return times.verdict.num_draft_tokens > 0 and not _is_verifiers(times)
