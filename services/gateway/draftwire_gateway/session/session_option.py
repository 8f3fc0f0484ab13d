"""Options of a session: the seam between the loop and whatever is not a fixed chain of a drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwire.method.rounds import DraftSessionSpec, DraftTree, LocalDraft, TargetSessionSpec, Verdict
from draftwire.models.description import ModelDescription
from draftwire_gateway.session.policy import Arm, Policy
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_state import SessionState


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Rounds without a drafter, to be requested at once."""

    why: WhyPlain
    """Reason why they have no drafter, or why a round in which the verifier drafts by itself has no draft."""
    num_rounds: int
    draft: LocalDraft | None = None
    """Drafts of the verifier by itself."""


@dataclass(slots=True)
class BlockRequest:
    """A drafter's block that is about to be requested."""

    arm: Arm
    depth: int
    """Draft tokens on its longest path."""
    tree: DraftTree | None = None
    """None is a chain."""
    max_rounds_ahead: int = 0
    """Rounds beyond this one for which the drafter may draft before they are requested."""
    is_held: bool = False
    """Whether the verifier has it already."""
    is_begun: bool = False
    """Whether the drafter may have begun it when the round before ended."""
    may_be_ahead: bool = False
    """Whether it may have been drafted before it was requested, or later ones may be."""
    stop_below: float | None = None
    """Sureness that is wanted of each place, as in `Calibration`."""


class SessionOption:
    """An option of one session, with a state of its own. This one adds nothing; others override what they need.

    Depends only on lengths and on rounds that are over, never on drafted tokens: see docs/exactness.md.
    """

    flush_s = 0.0
    """Time by which a drafter may take longer to reply to a flush, seconds."""

    def __init__(self, session: SessionState) -> None:
        self._session = session

    def join(self, target: ModelDescription) -> None:
        """Records the verifier that the session is open on, or is about to be."""

    def target_spec(self, spec: TargetSessionSpec, target: ModelDescription) -> TargetSessionSpec:
        """Returns the parameters with which the session is opened on a verifier, under a new epoch."""
        return spec

    def draft_spec(
        self, spec: DraftSessionSpec, drafter: ModelDescription, target: ModelDescription
    ) -> DraftSessionSpec:
        """Returns the parameters with which the session is opened on a drafter, the next one of its epoch."""
        return spec

    def accepts(self, drafter: ModelDescription, target: ModelDescription) -> bool:
        """Whether drafters of a model may draft for the session."""
        return True

    def arm(self, wanted: Arm, round_number: int, room: int) -> Arm:
        """Returns what to draft for the round that is requested now, of what the policy wants, or an option before this
        one. The drafter has room for that many draft tokens; less than 1 for none.
        """
        return wanted

    def why_plain(self, round_number: int, *, is_ready: bool) -> WhyPlain | None:
        """Returns why a round must be plain, before anything else is asked, or for the drafter that is ready; None if
        it need not.
        """
        return None

    def num_begun(self, round_number: int) -> int:
        """Returns how many rounds, from a round on, a drafter may have begun: a run in their place is as long."""
        return 0

    def run(self, request: RunRequest, policy: Policy) -> RunRequest:
        """Returns what to request where no drafter drafts and the verifier may."""
        return request

    def request(self, block: BlockRequest) -> None:
        """Adds what it has to the request of a block."""

    def end_round(self, verdict: Verdict, *, was_held: bool) -> None:
        """Records the verdict of the open round; `was_held` if its block was requested as one that the verifier had."""

    def end_at_string(self) -> None:
        """Records that the text has ended at a stop string, which its verifier does not know."""


MakeOptions = Callable[[SessionState], Sequence[SessionOption]]
"""Makes the options that a session's generation asks for, in the order in which they are asked."""
