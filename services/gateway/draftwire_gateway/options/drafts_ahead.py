"""Drafting ahead of the verdict: which rounds a drafter may begin before they are requested, and what came of them."""

from dataclasses import replace

from typing_extensions import override

from draftwire.method.ahead_limits import held_blocks
from draftwire.method.round_parts import AheadPart, BranchLimits
from draftwire.method.rounds import DraftSessionSpec, TargetSessionSpec, Verdict
from draftwire.models.description import DRAFT_AHEAD, HELD_BLOCKS, ModelDescription
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_option import BlockRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class BegunRounds:
    """How far the calibrations of one epoch have allowed a session's drafter to go.

    A drafter that drafts ahead begins a later round when the verifier tells it the outcome of the one before, and
    its block goes straight to the verifier. If that round were then requested without it, the block and the request
    would meet at the verifier, which takes what comes first. When a block comes may depend on its tokens: so some
    would be dropped by their values, which biases the text. A round that may have begun is therefore requested as
    it was begun. See docs/exactness.md.
    """

    def __init__(self) -> None:
        self._last_round = -1
        self._length = 0
        self._permit_number = -1

    def request(self, round_number: int, rounds_ahead: int, length: int, permit_number: int) -> None:
        """Records a calibration: how many rounds beyond its own the drafter may begin, and how many draft tokens each
        has.
        """
        self._last_round = max(self._last_round, round_number + rounds_ahead)
        self._length, self._permit_number = length, permit_number

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
        if self.is_of_another(round_number, permit_number) or min(self._length, most) < 1:
            return PLAIN
        begun = Arm(DraftSource.AHEAD, min(self._length, most))
        return wanted if wanted == begun else begun._replace(source=DraftSource.DRAFTER)


class DraftsAhead(SessionOption):
    """Lets drafters begin rounds early, and requests a round that may have begun as it was begun. Comes after all
    options that change arms.
    """

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._begun = BegunRounds()
        """Rounds that the session's drafters of this epoch may have begun."""
        self._drafter_number = -1
        """Identifies the drafter; each one has a higher number."""
        self._rounds_ahead = 0
        """Rounds that it may begin early."""
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
        self._rounds_ahead = generation.rounds_ahead if can_go_ahead(generation, drafter, target) else 0
        if not self._rounds_ahead:
            return spec
        return replace(spec, ahead=BranchLimits(generation.max_branches, self._max_held_blocks))

    @override
    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        is_chosen = self._session.generation.adapts_length  # then the policy says itself what is drafted ahead
        if self._rounds_ahead and wanted.source is DraftSource.DRAFTER and not is_chosen:
            wanted = wanted._replace(source=DraftSource.AHEAD)
        return self._begun.arm(wanted, round_number, room, self._drafter_number)

    @override
    def why_plain(self, round_number: int, *, is_ready: bool) -> WhyPlain | None:
        is_anothers = is_ready and self._begun.is_of_another(round_number, self._drafter_number)
        return WhyPlain.WARMING_UP if is_anothers else None

    @override
    def num_begun(self, round_number: int) -> int:
        return self._begun.num_from(round_number)

    @override
    def request(self, block: BlockRequest) -> None:
        number = self._session.round
        rounds_ahead = self._rounds_ahead if block.arm.source is DraftSource.AHEAD else 0
        self._counts = rounds_ahead > 0 or self._next_is_held or self.num_begun(number) > 0
        self._begun.request(number, rounds_ahead, block.arm.length, self._drafter_number)
        block.is_held = self._next_is_held
        # Blocks that were drafted for later rounds may still be held when none is drafted ahead any more.
        block.may_be_ahead = self._rounds_ahead > 0
        block.calibration = replace(block.calibration, max_rounds_ahead=rounds_ahead)

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

    @property
    def _max_held_blocks(self) -> int:
        """Blocks that a verifier is to hold for the session at most."""
        generation = self._session.generation
        return held_blocks(generation.max_branches, generation.rounds_ahead) if generation.max_branches else 0


def can_go_ahead(generation: Generation, drafter: ModelDescription, target: ModelDescription) -> bool:
    """Whether a drafter may draft ahead of the verdict, and a verifier can hold what it drafts."""
    is_possible = DRAFT_AHEAD in drafter.capabilities and HELD_BLOCKS in target.capabilities
    return generation.rounds_ahead > 0 and is_possible
