"""What one session drafts: what is chosen for its pair, or another length where its own drafts fare otherwise."""

from collections import deque

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.accepted_counts import ROUNDS, AcceptedCounts
from draftwire_gateway.speculation.predicting_chooser import LEAST_GAIN, LONGEST, PredictingChooser


class PredictedSession:
    """The lengths of one session with one pair."""

    def __init__(self, pair: PredictingChooser) -> None:
        """Counts the session in; `close` counts it out."""
        self._pair = pair
        self._own = {source: AcceptedCounts(counts) for source, counts in pair.acceptance.items()}
        if DraftSource.AHEAD in self._own:
            self._own[DraftSource.AHEAD] = self._own[DraftSource.DRAFTER]
        self._asked: deque[tuple[int, Arm, Arm]] = deque(maxlen=2)
        """The latest requests: from which round on, what the pair's sessions draft, and what was asked for."""
        self._best: tuple[tuple[Arm, int] | None, Arm] = (None, PLAIN)
        """The pair's arm and the session's drafts, by twice `ROUNDS`, and what is best for the session by them."""
        self._ended_at: float | None = None
        self._is_fresh, self._is_opening = True, False
        """Whether no drafter's block was judged in the latest round, and whether one was asked for in vain."""
        pair.join()

    def uses_drafter(self, now: float) -> bool:
        """Whether a drafter is to draft for the session now."""
        return self._pair.arm_of(self).uses_drafter

    def close(self) -> None:
        """Counts the session out."""
        self._open(is_opening=False)
        self._pair.leave(self)

    def next_draft(self, round_number: int, most: int, now: float) -> Arm:
        """Returns what the drafter is to draft for a round, with room for `most` tokens; plain decoding for nothing."""
        wanted = self._pair.arm_of(self)
        return self._ask(round_number, wanted, wanted if wanted.uses_drafter else PLAIN, most, now)

    def replace_arm(self, round_number: int, arm: Arm) -> None:
        """Records that something else is drafted for a round than `next_draft` has just returned."""
        self._asked[-1] = round_number, self._asked[-1][1], arm

    def next_own_length(self, round_number: int, most: int, now: float) -> int:
        """Returns how many tokens the verifier drafts for each of the rounds that are requested now; in the place of a
        drafter that cannot, as many as are best for it by what is known.
        """
        arm = wanted = self._pair.arm_of(self)
        if wanted.uses_drafter:
            arm = self._pair.best_own()
        return self._ask(round_number, wanted, arm, most, now).length

    def num_plain_rounds(self, most: int, now: float) -> int:
        """Returns how many rounds without a drafter to request at once, at most `most`."""
        return self._pair.num_plain_rounds(most, now)

    def observe(self, times: RoundTimes) -> None:
        """Takes note of a round; a `RoundObserver`."""
        verdict, ended_at = times.verdict, times.ended_at + times.gateway_s
        before, self._ended_at = self._ended_at, ended_at
        asked = [request for request in self._asked if request[0] <= verdict.fence.round]
        if not asked:
            return
        number, wanted, arm = asked[-1]
        by_drafter = verdict.num_draft_tokens > 0 and not verdict.is_of_verifier
        self._learn(times, arm, by_drafter=by_drafter)
        is_slow = times.gateway_s > times.ended_at - times.started_at  # its client does not read
        is_whole = not (times.is_first or times.lost_s or is_slow)
        if arm.uses_drafter:
            is_whole = is_whole and by_drafter and not self._is_fresh and verdict.num_draft_tokens == arm.length
        else:  # the first one of a run waits for it
            is_whole = is_whole and not by_drafter and number < verdict.fence.round
        self._pair.observe(self, times, arm, is_whole=is_whole)
        self._is_fresh = not by_drafter
        self._open(is_opening=wanted.uses_drafter and not by_drafter)
        if before is not None and ended_at > before and not (times.is_first or is_slow):
            self._pair.count(wanted, times.num_tokens, ended_at - before, times.started_at)

    def _ask(self, round_number: int, wanted: Arm, arm: Arm, most: int, now: float) -> Arm:
        arm = self._best_for(arm, now)
        length = max(0, min(arm.length, most))
        arm = arm._replace(length=length) if length else PLAIN
        if self._asked and self._asked[-1][0] == round_number:
            self._asked.pop()
        self._asked.append((round_number, wanted, arm))
        return arm

    def _best_for(self, arm: Arm, now: float) -> Arm:
        """Returns another length than the pair's, if that is better for this session by more than predictions err."""
        own = None if arm.source is None else self._own[arm.source]
        is_known = self._pair.model.verifier.is_known
        if own is None or own.num_drafts < ROUNDS or arm != self._pair.arm or not is_known:
            return arm
        at = arm, own.num_drafts // (2 * ROUNDS)
        if self._best[0] != at:
            rates = self._pair.rates_of(arm.source, own)
            best = max(rates, key=lambda one: rates[one])
            self._best = at, best if rates[best] > (1.0 + 2.0 * LEAST_GAIN) * rates[arm] else arm
        return self._best[1]

    def _open(self, *, is_opening: bool) -> None:
        self._pair.open(is_opening - self._is_opening)
        self._is_opening = is_opening

    def _learn(self, times: RoundTimes, arm: Arm, *, by_drafter: bool) -> None:
        """Counts the drafts of a round, and what the verifier had drafted in it."""
        verdict = times.verdict
        watched = None if verdict.guess is None else verdict.guess.watched
        if by_drafter and arm.uses_drafter and verdict.tree is None:
            self._add(DraftSource.DRAFTER, verdict.num_draft_tokens, verdict.num_accepted_tokens)
        if verdict.is_of_verifier and arm.source is DraftSource.VERIFIER:  # what was not guessed is not accepted
            self._add(DraftSource.VERIFIER, arm.length, verdict.num_accepted_tokens)
        elif watched is not None:
            length = min(times.num_tokens, LONGEST) if watched.has_guess else 1
            self._add(DraftSource.VERIFIER, length, watched.num_right if watched.has_guess else 0)

    def _add(self, source: DraftSource, num_tokens: int, num_accepted: int) -> None:
        if source in self._own:
            self._own[source].add(num_tokens, num_accepted)
            self._pair.acceptance[source].add(num_tokens, num_accepted)
