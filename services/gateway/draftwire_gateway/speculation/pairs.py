"""The choosers of a gateway: one for each verifier and draft model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire_gateway.session.policy import DraftSource
from draftwire_gateway.speculation.explanation import Explanation
from draftwire_gateway.speculation.pair_chooser import MAX_CHOSEN_LENGTH, MIN_CHOSEN_NODES, PairChooser
from draftwire_gateway.speculation.pair_model import NOTHING_KNOWN, WarmUp
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser
from draftwire_gateway.speculation.session_length import SessionLength

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
    max_tree_nodes: int = 0
    """Largest token tree that may be chosen; 0 if none may be."""

    @property
    def drafters(self) -> dict[DraftSource, str]:
        """The names of those that could draft."""
        named = {DraftSource.DRAFTER: self.drafter_model, DraftSource.VERIFIER: self.local_strategy}
        if self.can_go_ahead:
            named[DraftSource.AHEAD] = f"{self.drafter_model}, ahead"
        if self.max_tree_nodes >= MIN_CHOSEN_NODES:
            named[DraftSource.TREES] = f"{self.drafter_model}, trees"
        return {source: name for source, name in named.items() if name}


class Pairs:
    """Makes choosers as pairs meet. They remember until the gateway ends."""

    def __init__(self, max_speculative_tokens: int, first_length: int, *, predicts: bool = False) -> None:
        """Knows no pair.

        Args:
            max_speculative_tokens: longest draft that the services take.
            first_length: tried first.
            predicts: whether a model of each pair predicts what is best, in place of windows that measure it.
        """
        self._predicts = predicts
        self._max_length = min(max_speculative_tokens, MAX_CHOSEN_LENGTH)
        self._first_length = first_length
        self._choosers: dict[PairName, PairChooser | PredictingChooser] = {}

    def session_length(self, pair: PairName, warm_up: WarmUp = NOTHING_KNOWN) -> SessionLength | PredictedSession:
        """Returns the lengths of a new session with a pair, to be closed at its end."""
        chooser = self._choosers.get(pair)
        if chooser is None:
            self._forget_idle()
            chooser = self._choosers[pair] = self._make(pair, warm_up)
        return SessionLength(chooser) if isinstance(chooser, PairChooser) else PredictedSession(chooser)

    def preferred(self, pairs: Sequence[PairName], session_id: int) -> PairName:
        """Returns the pair whose sessions were fastest, or one that was not measured yet.

        Args:
            pairs: of one verifier, with drafters of a model each; at least one.
            session_id: random; one session of `SESSIONS_PER_TRIAL` tries another pair.
        """
        trial, turn = session_id % SESSIONS_PER_TRIAL, session_id // SESSIONS_PER_TRIAL
        if trial == 0:
            return pairs[turn % len(pairs)]
        choosers = [self._choosers.get(pair) for pair in pairs]
        rates = [None if chooser is None else chooser.tokens_per_second for chooser in choosers]
        return max(zip(pairs, rates, strict=True), key=lambda rated: math.inf if rated[1] is None else rated[1])[0]

    def _make(self, pair: PairName, warm_up: WarmUp) -> PairChooser | PredictingChooser:
        lengths, sources = (self._max_length, self._first_length), tuple(pair.drafters)
        if self._predicts:
            return PredictingChooser(
                *lengths, [source for source in sources if source is not DraftSource.TREES], warm_up
            )
        return PairChooser(*lengths, sources, pair.max_tree_nodes)

    def _forget_idle(self) -> None:
        if len(self._choosers) >= MAX_PAIRS:
            self._choosers = {pair: chooser for pair, chooser in self._choosers.items() if chooser.num_sessions}

    def explain(self) -> dict[PairName, list[Explanation]]:
        """Returns what lengths are chosen by, by pair, for each that could draft."""
        return {
            pair: [chooser.explain(source) for source in pair.drafters if source in chooser.sources]
            for pair, chooser in self._choosers.items()
        }
