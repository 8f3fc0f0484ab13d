"""The choosers of a gateway: one for each verifier and draft model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire_gateway.session.policy import DraftSource
from draftwire_gateway.speculation.explanation import Explanation, explain
from draftwire_gateway.speculation.pair_model import NOTHING_KNOWN, WarmUp
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser

MAX_PAIRS = 1024
"""That are remembered: verifiers come and go under new addresses. Then those without sessions are forgotten."""
SESSIONS_PER_TRIAL = 64
"""Of so many sessions, one tries any draft model: one that was slow may have become faster."""


@dataclass(frozen=True, slots=True)
class PairName:
    """A verifier, and who could draft for it: drafters of one model share what is learnt."""

    verifier_address: str
    drafter_model: str = ""
    """Name of the draft model; empty without drafters."""
    local_strategy: str = ""
    """By which the verifier drafts by itself; empty if it does not."""
    can_go_ahead: bool = False
    """Whether the drafters may draft ahead of the verdict."""

    @property
    def drafters(self) -> dict[DraftSource, str]:
        """The names of those that could draft."""
        named = {DraftSource.DRAFTER: self.drafter_model, DraftSource.VERIFIER: self.local_strategy}
        if self.can_go_ahead:
            named[DraftSource.AHEAD] = f"{self.drafter_model}, ahead"
        return {source: name for source, name in named.items() if name}


class Pairs:
    """Makes choosers as pairs meet. They remember until the gateway ends."""

    def __init__(self, max_speculative_tokens: int, first_length: int) -> None:
        """Knows no pair.

        Args:
            max_speculative_tokens: longest draft that the services take.
            first_length: tried first.
        """
        self._lengths = max_speculative_tokens, first_length
        self.choosers: dict[PairName, PredictingChooser] = {}
        """By pair, of those that are remembered."""

    def session_length(self, pair: PairName, warm_up: WarmUp = NOTHING_KNOWN) -> PredictedSession:
        """Returns the lengths of a new session with a pair, to be closed at its end."""
        chooser = self.choosers.get(pair)
        if chooser is None:
            self._forget_idle()
            chooser = self.choosers[pair] = PredictingChooser(*self._lengths, tuple(pair.drafters), warm_up)
        return PredictedSession(chooser)

    def preferred(self, pairs: Sequence[PairName], session_id: int) -> PairName:
        """Returns the pair whose sessions were fastest, or one that was not measured yet.

        Args:
            pairs: of one verifier, with drafters of a model each; at least one.
            session_id: random; one session of `SESSIONS_PER_TRIAL` tries another pair.
        """
        trial, turn = session_id % SESSIONS_PER_TRIAL, session_id // SESSIONS_PER_TRIAL
        if trial == 0:
            return pairs[turn % len(pairs)]
        choosers = [self.choosers.get(pair) for pair in pairs]
        rates = [None if chooser is None else chooser.tokens_per_second for chooser in choosers]
        return max(zip(pairs, rates, strict=True), key=lambda rated: math.inf if rated[1] is None else rated[1])[0]

    def _forget_idle(self) -> None:
        if len(self.choosers) >= MAX_PAIRS:
            self.choosers = {pair: chooser for pair, chooser in self.choosers.items() if chooser.num_sessions}

    def explain(self) -> dict[PairName, Explanation]:
        """Returns what lengths are chosen by, by pair."""
        return {pair: explain(chooser) for pair, chooser in self.choosers.items()}
