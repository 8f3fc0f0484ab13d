"""The rounds that a drafter may have begun to draft for before they are requested. Calls nobody.

A drafter that drafts ahead begins a later round when the verifier tells it the outcome of the one before, and its block
goes straight to the verifier. If that round were then requested without it, the block and the request would meet at the
verifier, which takes what comes first. When a block comes may depend on its tokens: so some would be dropped by their
values, which biases the text. A round that may have begun is therefore requested as it was begun. See
docs/exactness.md.
"""

from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource


class BegunRounds:
    """How far the calibrations of one epoch have allowed a session's drafter to go."""

    def __init__(self) -> None:
        """Nothing was requested."""
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

        Args:
            wanted: what is to be drafted for it.
            round_number: the round that is requested now.
            most: for how many draft tokens there is room, as its drafter counts it; without room for one, it has begun
                nothing.
            permit_number: identifies the drafter that is asked. What another one may have begun is plain: two blocks
                would meet at the verifier.
        """
        if not self.num_from(round_number):
            return wanted
        if self.is_of_another(round_number, permit_number) or min(self._length, most) < 1:
            return PLAIN
        begun = Arm(DraftSource.AHEAD, min(self._length, most))
        return wanted if wanted == begun else begun._replace(source=DraftSource.DRAFTER)
