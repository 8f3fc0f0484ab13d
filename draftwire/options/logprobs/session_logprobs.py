"""The log-probabilities that one session has reported: of its prompt, of what is emitted, and of what was drafted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftwire.errors import UnavailableError
from draftwire.method.round_parts import LogprobsPart
from draftwire.method.rounds import ReceivedBlock, TargetSessionSpec
from draftwire.options.logprobs.draft_logprobs import of_drafter
from draftwire.options.logprobs.reported_logprobs import Asking, EmittedLogprobs, of_prompt
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsRequest, PromptPart
from draftwire.verification.deciding import NOT_FINITE, Case, FinishReport, Judgement, ScoredBlock


@dataclass(frozen=True, slots=True)
class LogprobsReport:
    """The `SessionReport` of a session. Travels to the ranks of vLLM."""

    wanted: LogprobsRequest
    """The target's log-probabilities to report."""
    has_drafters: bool = False
    """Whether the drafter's are reported too."""

    @classmethod
    def of(cls, spec: TargetSessionSpec) -> "LogprobsReport | None":
        """Returns the report that a session asks for; None if it asks for none."""
        if spec.logprobs == NO_LOGPROBS and not spec.reports_draft_logprobs:
            return None
        return cls(spec.logprobs, spec.reports_draft_logprobs)

    @property
    def reads_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are reported."""
        return self.wanted.prompt_logprobs is not None

    def of_prompt(self, case: Case, start: int, logits: Tensor) -> PromptPart | UnavailableError:
        """Returns the log-probabilities of prompt tokens; an error if some are NaN. See `TokenReport.of_prompt`."""
        num_top = self.wanted.prompt_logprobs
        assert num_top is not None, "asked of those who report their prompt"
        tokens = of_prompt(case, start, logits, num_top, self.wanted.mode)
        if any(math.isnan(token.logprob) for token in tokens):
            return UnavailableError(NOT_FINITE)
        return PromptPart(start + 1, tokens)

    def begin(self, members: Sequence[ScoredBlock], logits: Tensor) -> FinishReport:
        """Keeps the unprocessed log-probabilities of those who ask for them; see `TokenReport.begin`."""
        wanted = [(one, one.case.report.wanted) for one in members if isinstance(one.case.report, LogprobsReport)]
        asking = [Asking(one, own.logprobs, own.mode) for one, own in wanted if own.logprobs is not None]
        return EmittedLogprobs.of(asking, logits).add

    def of_round(self, block: ReceivedBlock | None, judgement: Judgement) -> LogprobsPart | None:
        """Returns what the verdict on a block says; None if nothing is reported of generated tokens."""
        draft = of_drafter(block, judgement) if self.has_drafters else []
        return LogprobsPart(judgement.logprobs, draft) if judgement.logprobs or draft else None
