"""Plan of the next round: a block of the drafter, or rounds without it."""

from collections.abc import Sequence

from draftwire_gateway.session.drafter_seat import DrafterSeat
from draftwire_gateway.session.policy import Arm, Policy
from draftwire_gateway.session.ports import TargetPort
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_option import RunRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class RoundPlanner:
    """Plans the rounds of a session by what its policy chooses and its options allow."""

    def __init__(
        self, session: SessionState, seat: DrafterSeat, policy: Policy, options: Sequence[SessionOption] = ()
    ) -> None:
        self._session, self._seat, self._policy, self._options = session, seat, policy, options

    @property
    def num_begun(self) -> int:
        """Rounds that a drafter may have begun, from the open one on. A run in its place has as many at least: so none
        of their blocks is there when it ends.
        """
        return max((option.num_begun(self._session.round) for option in self._options), default=0)

    def end_at_string(self) -> None:
        """Records that the text has ended at a stop string, which its verifier does not know."""
        for option in self._options:
            option.end_at_string()

    def next_draft(self) -> Arm:
        """Returns what to draft for the round that is requested now; plain decoding if the drafter is not to draft.

        Depends only on lengths and on rounds that are over, never on the drafted tokens: see docs/exactness.md.
        """
        room, number = self._seat.room, self._session.round
        arm = wanted = self._policy.next_draft(number, room)
        for option in self._options:
            arm = option.arm(arm, number, room)
        if arm != wanted:
            self._policy.replace_arm(number, arm)
        return arm

    def run(self, most: int, bridge: int, *, is_coming: bool = False) -> RunRequest:
        """Returns the rounds to request now, where `next_draft` is plain decoding: `most` where no drafter is expected,
        `bridge` while one is. `is_coming` if there is one, on which the session is about to be opened.
        """
        if not self._session.generation.num_speculative_tokens:
            return RunRequest(WhyPlain.NOT_ASKED_FOR, most)
        if (why := self._why_plain(is_ready=False)) is not None:
            return RunRequest(why, bridge)
        if not self._policy.uses_drafter:
            return self._without_drafter(WhyPlain.DOES_NOT_PAY, self._policy.num_rounds(most))
        if self._seat.is_asleep:
            return RunRequest(WhyPlain.LATE, bridge)
        if is_coming:
            return RunRequest(WhyPlain.WARMING_UP, bridge)
        if not self._seat.has_drafter:
            return self._without_drafter(WhyPlain.NO_DRAFTER, most)
        if self._seat.is_ready:
            if (why := self._why_plain(is_ready=True)) is not None:
                return RunRequest(why, bridge)
            return self._without_drafter(WhyPlain.NO_ROOM, most)
        if not self._session.numbers_are_fresh:  # how long warming up takes shows no more than it must
            return RunRequest(WhyPlain.WARMING_UP, bridge)
        return self._without_drafter(WhyPlain.WARMING_UP, bridge)

    def first_run(self, target: TargetPort, most: int) -> RunRequest:
        """Returns the same for a session that is being opened on a verifier: one round if it may be drafted for."""
        has_drafter = self._seat.restart(target)
        request = self.run(most, 1, is_coming=has_drafter)
        if request.draft is None:
            return request
        return RunRequest(WhyPlain.DOES_NOT_PAY if has_drafter else WhyPlain.NO_DRAFTER, 1)

    def _why_plain(self, *, is_ready: bool) -> WhyPlain | None:
        reasons = (option.why_plain(self._session.round, is_ready=is_ready) for option in self._options)
        return next((why for why in reasons if why is not None), None)

    def _without_drafter(self, why: WhyPlain, num_rounds: int) -> RunRequest:
        """Returns rounds in which the verifier may draft by itself, if an option has it do so."""
        request = RunRequest(why, num_rounds)
        for option in self._options:
            request = option.run(request, self._policy)
        return request
