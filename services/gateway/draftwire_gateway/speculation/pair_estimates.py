"""What is known of a pair, and what is expected of its arms by that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.speculation.explanation import ArmEstimate, Explanation, LoadExplanation
from draftwire_gateway.speculation.load_probes import LoadProbes
from draftwire_gateway.speculation.pair_acceptance import PairAcceptance
from draftwire_gateway.speculation.round_costs import RoundCosts
from draftwire_gateway.speculation.windows import Window, Yields


@dataclass(slots=True)
class LoadState:
    """What is known of one load."""

    arm: Arm
    """The chosen one."""
    costs: RoundCosts = field(default_factory=RoundCosts)
    yields: Yields = field(default_factory=Yields)
    probes: LoadProbes = field(default_factory=LoadProbes)
    used_s: float = 0.0
    """Time in which there were rounds at that load."""
    learnt_at: float = 0.0
    """Time of use by the latest window that counted."""
    calm_at: float | None = None
    """When a calm window ended last, in seconds of use; None if none did yet."""
    was_calm: bool = False
    """Whether the latest window was."""


class PairEstimates:
    """What all sessions of a pair have shown, by load: see `load_of`."""

    def __init__(self, arms: Sequence[Arm], acceptance: PairAcceptance, first_length: int, max_length: int) -> None:
        """Knows nothing yet.

        Args:
            arms: that are tried.
            acceptance: of the pair.
            first_length: of drafts, that is best before anything is known.
            max_length: longest draft that is explained.
        """
        self.loads: dict[int, LoadState] = {}
        self._arms = arms
        self._acceptance = acceptance
        self._first_length = first_length
        self._max_length = max_length

    def estimate(self, arm: Arm, load: int) -> ArmEstimate:
        """Returns what is expected of an arm. Something must have been measured at that load."""
        state = self.loads[load]
        costs, measured = state.costs, state.costs.measured(arm)
        tokens, round_s = self._acceptance.mean_tokens(arm) * costs.bias(arm), self._round_s(arm, load)
        share = state.yields.share(arm, 2**load * tokens / round_s)
        num_windows = 0 if measured is None else measured.num_windows
        return ArmEstimate(arm.length, tokens, round_s, num_windows, share, arm.num_nodes)

    def estimates(self, load: int) -> dict[Arm, ArmEstimate]:
        """Returns what is expected of each arm. Something must have been measured at that load."""
        return {arm: self.estimate(arm, load) for arm in self._arms}

    def expected_rate(self, arm: Arm, load: int) -> float:
        """Returns the tokens/s that are expected of a session in rounds of an arm, of which some was measured."""
        costs = self.loads[load].costs
        return self._acceptance.mean_tokens(arm) * costs.bias(arm) / costs.round_s(arm)

    def best_length(self, source: DraftSource, load: int) -> int:
        """Returns the length that is best for a source by what is known, at least 1."""
        state = self.loads[load]
        if state.arm.source is source:
            return state.arm.length
        arms = [arm for arm in self._arms if arm.source is source]
        if state.costs.is_empty:
            return min(arms, key=lambda arm: abs(arm.length - self._first_length)).length
        return max(arms, key=lambda arm: self.estimate(arm, load).tokens_per_second).length

    def tokens_per_second(self, num_sessions: int) -> float | None:
        """Returns what is expected of each of so many sessions with the best arm, at the nearest load that is known;
        None if none is.
        """
        measured = [load for load, state in self.loads.items() if not state.costs.is_empty]
        if not measured:
            return None
        load = min(measured, key=lambda known: abs(known - load_of(num_sessions)))
        return self.estimate(self.loads[load].arm, load).tokens_per_second

    def round_s_on_line(self, window: Window) -> list[float]:
        """Returns the time of rounds with 1 to the window's length of draft tokens, seconds, on a line through the
        measured time of its arm; empty if that was not measured. It is computed once for a window: sessions ask for it
        all the time, and what is known changes when windows end.
        """
        if window.round_s_on_line is None:
            window.round_s_on_line = self._round_s_on_line(window.arm, window.load)
        return window.round_s_on_line

    def _round_s_on_line(self, arm: Arm, load: int) -> list[float]:
        costs = self.loads[load].costs
        measured = costs.measured(arm)
        if measured is None or arm.source is None:
            return []
        slope = costs.draft_token_s(arm.source) + costs.row_s(arm.source)
        return [
            max(measured.verify_s, measured.round_s - (arm.length - length) * slope)
            for length in range(1, arm.length + 1)
        ]

    def explain(self, source: DraftSource, num_sessions: int) -> Explanation:
        """Returns what the lengths of a source's drafts are chosen by; of trees, those that were measured.

        Args:
            source: of the pair.
            num_sessions: that the pair has now.
        """
        arms = [PLAIN, *(Arm(source, length) for length in range(1, self._max_length + 1))]
        loads = []
        for load, state in sorted(self.loads.items()):
            known = arms
            if source is DraftSource.TREES:
                known = [PLAIN, *(arm for arm in self._acceptance.trees if state.costs.measured(arm) is not None)]
            estimates = [] if state.costs.is_empty else [self.estimate(arm, load) for arm in known]
            best = self._explained(source, state, known, estimates)
            loads.append(
                LoadExplanation(
                    min_sessions=math.floor(2 ** (load - 0.5)) + 1,
                    max_sessions=math.floor(2 ** (load + 0.5)),
                    length=best.length,
                    num_nodes=best.num_nodes,
                    chosen=state.arm.source,
                    estimates=estimates,
                    row_s=state.costs.row_s(source),
                    draft_token_s=state.costs.draft_token_s(source),
                )
            )
        if source is DraftSource.TREES:  # whose tokens fare by their size
            num_drafts = sum(known.num_drafts for known in self._acceptance.trees.values())
            return Explanation(source, num_sessions, (), num_drafts, tuple(loads))
        acceptance = self._acceptance.chains[source]
        survival = [acceptance.share * probability for probability in acceptance.survival(self._max_length)]
        return Explanation(source, num_sessions, survival, acceptance.num_drafts, tuple(loads))

    def _explained(
        self, source: DraftSource, state: LoadState, arms: Sequence[Arm], estimates: Sequence[ArmEstimate]
    ) -> Arm:
        """Returns the best arm of a source, as far as that is known."""
        if state.arm.source in (source, None) or not estimates:
            return state.arm
        return max(zip(arms, estimates, strict=True), key=lambda known: known[1].tokens_per_second)[0]

    def _round_s(self, arm: Arm, load: int) -> float:
        """Returns the expected time of a round, seconds. What an arm costs of whose source nothing was measured at a
        load is inferred from the nearest one where that is known.
        """
        costs = self.loads[load].costs
        if arm.source is None or costs.tells_of(arm.source) or costs.measured(PLAIN) is None:
            return costs.round_s(arm)
        known = [other for other, state in self.loads.items() if state.costs.tells_price_of(arm.source)]
        if not known:
            return costs.round_s(arm)
        near = min(known, key=lambda other: abs(other - load))
        return costs.round_s(PLAIN) + self.loads[near].costs.price_s(arm, 2.0 ** (load - near))


def load_of(num_sessions: int) -> int:
    """Returns the nearest power of two of a number of sessions. Clients often keep a power of two of requests running:
    one that ends shortly before the next begins changes no load.
    """
    return round(math.log2(max(1, num_sessions)))
