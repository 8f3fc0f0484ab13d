"""Messages to vLLM's ranks with a step, and the report that rank 0 returns. No vLLM here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwire.audit import AuditSums
from draftwire.errors import DraftwireError
from draftwire.method.distributions import DraftRows
from draftwire.method.keys import DrawKey
from draftwire.requests.automaton import BlockMasks
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.deciding import JudgingOutcome, TokenReport


@dataclass(frozen=True, slots=True)
class RoundItem:
    """One session's part in a step: a round to decide, as soon as the committed tokens are read."""

    draft_tokens: list[int]
    """The draft block; empty for plain decoding."""
    draft: DraftRows | None
    """The distributions of the draft tokens."""
    sampling: SamplingParams
    rule: str
    """Name of the verification rule."""
    key: DrawKey
    num_committed: int
    """Committed tokens before the block."""
    max_read: int
    """Limit of unread committed tokens: if there are more, only so many are read and nothing is decided."""
    prompt_len: int
    stop_token_ids: frozenset[int] = frozenset()
    report: TokenReport | None = None
    """Reports about its tokens; None if nothing is reported."""
    committed: Sequence[int] = ()
    """The committed tokens, if what is decided or reported depends on them."""
    masks: BlockMasks | None = None
    """Masks of the form of its text, if it has one."""
    is_used: bool = True
    """Whether the draft tokens may enter the text; if not, they are audited alone."""


@dataclass(frozen=True, slots=True)
class PromptToReport:
    """Consecutive prompt tokens of one request that a step reads and reports."""

    start: int
    """Position of the token that the first row of logits is after."""
    num_rows: int
    """How many tokens are reported: those at `start + 1` and behind."""


@dataclass(frozen=True, slots=True)
class StepItems:
    """The items of one step of vLLM. Every rank gets them in the scheduler's output."""

    reading: dict[str, RoundItem] = field(default_factory=dict)
    """All that take part, by request id."""
    deciding: frozenset[str] = frozenset()
    """Those whose committed tokens and whole block this step reads to the end."""
    prompts: dict[str, PromptToReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Decisions of rank 0."""

    outcomes: dict[str, JudgingOutcome] = field(default_factory=dict)
    """Outcomes by request id: of all that were decided or reported."""
    audits: dict[str, AuditSums | None] = field(default_factory=dict)
    error: DraftwireError | None = None
    """Error for which nothing was decided; the same on every rank."""

    def tokens_of(self, request_id: str) -> list[int]:
        """Returns the tokens that a request's text gets; none if nothing was decided."""
        return list(getattr(self.outcomes.get(request_id), "token_ids", ()))
