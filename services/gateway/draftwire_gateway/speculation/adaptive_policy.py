"""The policy of a session whose drafts are chosen by what is measured."""

import time
from collections.abc import Sequence

from typing_extensions import override

from draftwire_gateway.options.drafts_ahead import can_go_ahead
from draftwire_gateway.options.local_drafting import local_strategy
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, Policy
from draftwire_gateway.session.ports import DrafterPort, TargetPort
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.speculation.pair_model import NOTHING_KNOWN, WarmUp
from draftwire_gateway.speculation.pairs import PairName, Pairs
from draftwire_gateway.speculation.predicted_session import PredictedSession


class AdaptivePolicy(Policy):
    """Takes what the choosers of its gateway choose. The session is in one pair at a time, or in none."""

    def __init__(self, generation: Generation, pairs: Pairs) -> None:
        """Is in no pair.

        Args:
            generation: of the session.
            pairs: the choosers.
        """
        self._generation = generation
        self._pairs = pairs
        self._name: PairName | None = None
        self._length: PredictedSession | None = None
        """Chooses the session's lengths; None in no pair, as where nobody could draft."""

    @property
    @override
    def uses_drafter(self) -> bool:
        if self._length is None or self._name is None or not self._name.drafter_model:
            return True
        return self._length.uses_drafter(time.perf_counter())

    @override
    def preferred(self, target: TargetPort, drafters: Sequence[DrafterPort], session_id: int) -> DrafterPort:
        """Returns the drafter of the session's own pair if it is among them, else of the fastest pair."""
        pairs = {self._pair_of(target, drafter): drafter for drafter in drafters}
        own = self._name
        return pairs[own if own is not None and own in pairs else self._pairs.preferred(list(pairs), session_id)]

    @override
    def join(self, target: TargetPort, drafter: DrafterPort | None) -> None:
        pair = self._pair_of(target, drafter)
        drafter_steps = () if drafter is None else drafter.description.warm_up_steps
        self._enter(pair if pair.drafters else None, WarmUp(target.description.warm_up_steps, drafter_steps))

    @override
    def leave(self) -> None:
        self._enter(None)

    @override
    def next_draft(self, round_number: int, most: int) -> Arm:
        return PLAIN if self._length is None else self._length.next_draft(round_number, most, time.perf_counter())

    @override
    def replace_arm(self, round_number: int, arm: Arm) -> None:
        if self._length is not None:
            self._length.replace_arm(round_number, arm)

    @override
    def num_rounds(self, most: int) -> int:
        return most if self._length is None else self._length.num_plain_rounds(most, time.perf_counter())

    @override
    def next_own_length(self, round_number: int, most: int) -> int:
        return most if self._length is None else self._length.next_own_length(round_number, most, time.perf_counter())

    @override
    def observe(self, times: RoundTimes) -> None:
        if self._length is not None:
            self._length.observe(times)

    def _enter(self, name: PairName | None, warm_up: WarmUp = NOTHING_KNOWN) -> None:
        if name == self._name:
            return
        if self._length is not None:
            self._length.close()
        self._name = name
        self._length = None if name is None else self._pairs.session_length(name, warm_up)

    def _pair_of(self, target: TargetPort, drafter: DrafterPort | None) -> PairName:
        strategy = local_strategy(self._generation, target.description)
        if drafter is None:
            return PairName(target.address, "", strategy)
        is_ahead = can_go_ahead(self._generation, drafter.description, target.description)
        return PairName(target.address, drafter.description.name, strategy, is_ahead)
