"""A session at the drafter, the steps that it takes part in, and what options add to both. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwire.drafting.strategy import DraftRequest, DraftSequence
from draftwire.engine.session_book import EngineSession
from draftwire.errors import DraftwireError
from draftwire.method.keys import DrawKey
from draftwire.method.rounds import Calibration, DraftBlock, DraftSessionSpec, Fence, Permit, RoundOutcome


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(EngineSession[DraftSessionSpec]):
    """State of a session at the drafter. Changed by the scheduler only."""

    num_known: int
    """Committed tokens that were passed to the strategy."""
    num_sent: int
    """Committed tokens that the gateway has sent: outcomes of rounds may have brought more."""
    num_spare: int = 0
    """Tokens of the KV cache that options need beside its text."""
    latest: Calibration | None = None
    """The latest calibration."""
    last_asked: int = -1
    """Round of the block that was requested last."""
    outcome: RoundOutcome | None = None
    """Outcome of the latest round, if it came before the calibration that lets the drafter go on."""
    calibration: Calibration | None = None
    """The calibration whose block is drafted next."""
    queued: bool = True
    """Whether it waits for a step or is in one: first for prefill, later for a calibration."""
    is_reading: bool = True
    """Whether its prompt is still being read."""
    permit: Permit | None = None
    """Lets it push blocks; None until the first calibration, if the session was opened without."""
    has_shown_permit: bool = False
    """Whether a block was sent; the first one carries the permit."""
    cut_at: int | None = None
    """Round of the block that is to end after the token that is being drawn. Set on the event loop, read on the torch
    thread during drafting."""

    @property
    def last_calibrated(self) -> int:
        """Round of the latest calibration; -1 before the first."""
        return -1 if self.latest is None else self.latest.fence.round

    @property
    def num_reserved(self) -> int:
        """Tokens of the KV cache to reserve."""
        return self.spec.max_len + self.num_spare

    @property
    def reads_much(self) -> bool:
        """Whether more is unread than a round commits: a prompt, or tokens committed during its prefill."""
        return self.is_reading or self.num_unread > self.spec.parameters.max_draft_tokens + 1

    def length_at(self, prefix_len: int) -> int:
        """Returns how many tokens to draft after so many committed ones, as the latest calibration asks, or less than 1
        for none. One is left for the verifier.

        Gateway and drafter count alike: so a gateway knows which rounds a drafter cannot have begun by itself.
        """
        wanted = 0 if self.latest is None else self.latest.num_draft_tokens
        return min(wanted, self.spec.max_len - prefix_len - 1)

    def request(self, number: int, num_tokens: int) -> DraftRequest:
        """Returns the request for a block of a round, which nothing cuts."""
        spec, parameters = self.spec, self.spec.parameters
        return DraftRequest(
            num_tokens,
            parameters.sampling,
            DrawKey(spec.drafting_key, parameters.choice, number),
            spec.target_vocab_size,
            is_coupled=parameters.rule.is_coupled,
            needs_probs=parameters.rule.needs_draft_probs,
            prompt_len=parameters.prompt_len,
            stop_token_ids=parameters.stop_token_ids,
            automaton=self.automaton,
        )


DraftOutcome = DraftBlock | DraftwireError | None
"""Outcome of a session's part in a step: a block, an error that fails the session, or None if tokens were only read."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step: new committed tokens to read, and the block to draft, if any."""

    session: DraftSession
    base_len: int
    """Committed tokens that were passed to the strategy before."""
    token_ids: list[int]
    """New committed tokens."""
    calibration: Calibration | None
    """The block to draft; None only reads."""
    max_read: int | None
    """Tokens to read at most; None is no limit."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. Sequences hold one entry for each item."""

    outcomes: Sequence[DraftOutcome]
    num_unread: Sequence[int]
    num_reused: Sequence[int]
    num_read: int
    """Tokens that were read before drafting."""
    calibration_s: float
    """Time of that reading, seconds."""
    draft_s: float = 0.0
    """Time of drafting, seconds."""
    num_passes: int = 0
    """Forward passes of drafting."""
    guesses: Mapping[int, list[list[int]]] = field(default_factory=dict)
    """Other tokens that may stand in the places of a block, by index of the item."""


class SpareWork(Protocol):
    """Something to do while nothing is requested."""

    @property
    def num_sessions(self) -> int:
        """Number of sessions that it is for."""

    def run(self) -> StepResult:
        """Does it, on the torch thread. The result has no items."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call into the engine: for what was requested or, if nothing was, for what may be requested next."""

    items: Sequence[StepItem]
    spare: SpareWork | None = None

    @property
    def reads_prompts(self) -> bool:
        """Whether some session is in prefill."""
        return any(item.max_read is not None for item in self.items)

    @property
    def num_sessions(self) -> int:
        """Number of sessions that take part."""
        return len(self.items) if self.spare is None else self.spare.num_sessions


class DraftOption:
    """Additions of an option to the sessions of a drafter: by default none. Used on the event loop, the last three
    methods on the torch thread.
    """

    def check_session(self, spec: DraftSessionSpec) -> None:
        """Checks a session before it is opened.

        Raises:
            InvalidRequestError: it asks for something that it cannot have.
        """

    def check_calibration(self, calibration: Calibration, spec: DraftSessionSpec) -> None:
        """Checks a calibration of a session, within the session's other limits.

        Raises:
            ProtocolViolationError: it asks for something that the session cannot have.
        """

    def num_spare(self, spec: DraftSessionSpec) -> int:
        """Returns how many tokens of the KV cache a session needs beside its text."""
        return 0

    def may_draft(self, session: DraftSession) -> bool:
        """Whether a session's block may be drafted now. If not, `Scheduler.resume` is called once it may."""
        return True

    def committed(self, session: DraftSession, fence: Fence, new_ids: list[int]) -> None:
        """Takes note of the tokens that a session has committed before a round."""

    def is_drafted(self, session: DraftSession, calibration: Calibration) -> bool:
        """Whether the block that a session is asked for was drafted, or is being drafted, in which case it is finished
        for this calibration.
        """
        return False

    def spare_work(self) -> SpareWork | None:
        """Returns what to draft while nothing is requested."""
        return None

    def completed(self, step: Step, result: StepResult) -> Sequence[tuple[DraftSession, DraftBlock]]:
        """Takes note of a step; returns the blocks of its spare work that are to be sent."""
        return ()

    def abandoned(self, step: Step) -> None:
        """Forgets a step that failed."""

    def closed(self, session: DraftSession) -> None:
        """Forgets a session."""

    def request(self, session: DraftSession, calibration: Calibration, request: DraftRequest) -> DraftRequest:
        """Returns the request for a session's block with what the option asks for."""
        return request

    def largest(self, request: DraftRequest) -> DraftRequest:
        """Returns a request for as much as any, made from one for the longest chain."""
        return request

    def rehearse(self, sequence: DraftSequence) -> None:
        """Prepares a sequence, which is drafted for in the warm-up."""
