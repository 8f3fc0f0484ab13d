"""Rounds that a drafter may begin before they are requested: on their outcome, or ahead of the verdict."""

from dataclasses import replace

from typing_extensions import override

from draftwire.method.ahead_limits import held_blocks
from draftwire.method.round_parts import AheadPart, BranchLimits
from draftwire.method.rounds import DraftSessionSpec, TargetSessionSpec, Verdict
from draftwire.models.description import DRAFT_AHEAD, DRAFTS_ON_OUTCOMES, HELD_BLOCKS, ModelDescription
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class BegunRounds:
    """How far the calibrations of one epoch have allowed a session's drafter to go.

    A drafter begins a later round when the verifier tells it the outcome of the one before, and its block goes
    straight to the verifier: two hops in place of three. If that round were then requested without it, the block and
    the request would meet at the verifier, which takes what comes first. When a block comes may depend on its tokens:
    so some would be dropped by their values, which biases the text. A round that may have begun is therefore requested
    as it was begun. See docs/exactness.md.
    """

    def __init__(self) -> None:
        self._last_round = -1
        self.length = 0
        """Draft tokens of each such round, at most."""
        self._permit_number = -1

    def request(self, round_number: int, rounds_ahead: int, length: int, permit_number: int) -> None:
        """Records a calibration: how many rounds beyond its own the drafter may begin, and how many draft tokens each
        has.
        """
        self._last_round = max(self._last_round, round_number + rounds_ahead)
        self.length, self._permit_number = length, permit_number

    def num_from(self, round_number: int) -> int:
        """Returns how many rounds may have begun, from a round on: all of them up to the last one."""
        return max(0, self._last_round - round_number + 1)

    def is_of_another(self, round_number: int, permit_number: int) -> bool:
        """Whether another drafter may have begun a round than the one with this permit."""
        return self.num_from(round_number) > 0 and permit_number != self._permit_number

    def arm(self, wanted: Arm, round_number: int, most: int, permit_number: int) -> Arm:
        """Returns what to request for a round: what is wanted, unless the round may have begun as something else.
        Without room for a draft token, as its drafter counts it, it has begun nothing. What another drafter than that
        of the permit may have begun is plain: two blocks would meet at the verifier.
        """
        if not self.num_from(round_number):
            return wanted
        length = min(self.length, most)
        if self.is_of_another(round_number, permit_number) or length < 1:
            return PLAIN
        is_chain = wanted.uses_drafter and not wanted.num_nodes
        return wanted if is_chain and wanted.length == length else Arm(DraftSource.DRAFTER, length)


class DraftsAhead(SessionOption):
    """Lets drafters begin rounds early, and requests a round that may have begun as it was begun. Comes after all
    options that change arms.

    A drafter that takes outcomes begins the next round as soon as the verifier tells it how the one before ended. With
    `rounds_ahead` it drafts for texts that rounds may come to, before they end.
    """

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._begun = BegunRounds()
        """Rounds that the session's drafters of this epoch may have begun."""
        self._drafter_number = -1
        """Identifies the drafter; each one has a higher number."""
        self._rounds_ahead = 0
        """Rounds that it may draft for ahead of the verdict."""
        self._takes_outcomes = False
        """Whether it may begin the next round on the outcome of the one before."""
        self._is_changing = False
        """Whether the round that is requested now is not what was wanted: then no later one may begin early."""
        self._next_is_held = False
        """Whether the verifier has the block of the open round since before it began."""
        self._counts = False
        """Whether no block was there when the open round began, for which one may have been drafted ahead."""

    @override
    def target_spec(self, spec: TargetSessionSpec, target: ModelDescription) -> TargetSessionSpec:
        self._begun = BegunRounds()
        return replace(spec, max_held_blocks=self._max_held_blocks if HELD_BLOCKS in target.capabilities else 0)

    @override
    def draft_spec(
        self, spec: DraftSessionSpec, drafter: ModelDescription, target: ModelDescription
    ) -> DraftSessionSpec:
        generation = self._session.generation
        self._drafter_number += 1
        self._takes_outcomes = DRAFTS_ON_OUTCOMES in drafter.capabilities & target.capabilities
        self._rounds_ahead = generation.rounds_ahead if can_go_ahead(generation, drafter, target) else 0
        if not self._rounds_ahead:
            return spec
        return replace(spec, ahead=BranchLimits(generation.max_branches, self._max_held_blocks))

    @override
    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        is_chosen = self._session.generation.adapts_length  # then the policy says itself what is drafted ahead
        if self._rounds_ahead and wanted.source is DraftSource.DRAFTER and not is_chosen:
            wanted = wanted._replace(source=DraftSource.AHEAD)
        arm = self._begun.arm(wanted, round_number, room, self._drafter_number)
        self._is_changing = arm != wanted
        return arm

    @override
    def why_plain(self, round_number: int, *, is_ready: bool) -> WhyPlain | None:
        is_anothers = is_ready and self._begun.is_of_another(round_number, self._drafter_number)
        return WhyPlain.WARMING_UP if is_anothers else None

    @override
    def num_begun(self, round_number: int) -> int:
        return self._begun.num_from(round_number)

    @override
    def request(self, block: BlockRequest) -> None:
        number, is_ahead = self._session.round, block.arm.source is DraftSource.AHEAD
        block.is_begun = self.num_begun(number) > 0
        self._counts = self._rounds_ahead > 0 and (is_ahead or self._next_is_held or block.is_begun)
        block.max_rounds_ahead = self._rounds_ahead if is_ahead else int(self._goes_on(block.arm))
        self._begun.request(number, block.max_rounds_ahead, block.arm.length, self._drafter_number)
        block.is_held = self._next_is_held
        # Blocks that were drafted for later rounds may still be held when none is drafted ahead any more. What is begun
        # on an outcome may be judged after its drafter was lost.
        block.may_be_ahead = self._rounds_ahead > 0 or block.max_rounds_ahead > 0

    @override
    def end_round(self, verdict: Verdict, *, was_held: bool) -> None:
        ahead = verdict.ahead or AheadPart()
        self._next_is_held = ahead.next_is_held
        statistics, is_hit = self._session.statistics, was_held and ahead.is_ahead
        statistics.num_ahead_wasted_tokens += ahead.num_wasted_draft_tokens
        statistics.max_held_bytes = max(statistics.max_held_bytes, ahead.held_bytes)
        if not self._counts:
            return
        self._counts = False
        statistics.num_ahead_hits += is_hit
        statistics.num_ahead_late += ahead.is_ahead and not is_hit
        statistics.num_ahead_misses += not ahead.is_ahead

    @override
    def end_at_string(self) -> None:
        if self.num_begun(self._session.round):
            self._session.statistics.num_ahead_wasted_tokens += self._begun.length

    def _goes_on(self, arm: Arm) -> bool:
        """Whether the drafter may begin the round after one of this arm on its outcome. One that may have branches
        would draft for these before that.
        """
        is_chain = arm.source is DraftSource.DRAFTER and not arm.num_nodes
        return self._takes_outcomes and not self._rounds_ahead and is_chain and not self._is_changing

    @property
    def _max_held_blocks(self) -> int:
        """Blocks that a verifier is to hold for the session at most."""
        generation = self._session.generation
        return held_blocks(generation.max_branches, generation.rounds_ahead) if generation.max_branches else 0


def can_go_ahead(generation: Generation, drafter: ModelDescription, target: ModelDescription) -> bool:
    """Whether a drafter may draft ahead of the verdict, and a verifier can hold what it drafts."""
    is_possible = DRAFT_AHEAD in drafter.capabilities and HELD_BLOCKS in target.capabilities
    return generation.rounds_ahead > 0 and is_possible
