"""Decides a step's blocks from vLLM's logits, on rank 0, by the definition that our own engine uses. No vLLM here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
import torch
from torch import Tensor

from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.sampling import TokenEdits
from draftwire.requests.logprobs import PromptPart
from draftwire.verification.deciding import Case, Judgement, JudgingOutcome, StillReading, decide
from draftwire.verification.rule import VerificationRule
from draftwire_verifier.auditing import audits_of
from draftwire_verifier.vllm.items import RoundItem, StepItems, StepReport

log = structlog.get_logger()


@dataclass(slots=True)
class RankDecisions:
    """State that a rank keeps to decide. Used on the thread of its forward passes."""

    rules: Mapping[str, VerificationRule]
    _edits: dict[str, TokenEdits] = field(default_factory=dict)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of requests that have ended."""
        for request_id in request_ids:
            self._edits.pop(request_id, None)

    def decide(
        self,
        items: StepItems,
        starts: Mapping[str, int],
        logits: Tensor | None,
        prompt_logits: Mapping[str, Tensor],
    ) -> StepReport:
        """Decides the blocks of a step.

        Args:
            items: of the step.
            starts: first row of logits of each request that is decided.
            logits: `[rows, vocab]`: the target's, unprocessed; for each request that is decided, `draft_len + 1` rows.
                None if none is. Overwritten.
            prompt_logits: `[num_rows, vocab]` of each of `items.prompts`.
        """
        outcomes: dict[str, JudgingOutcome] = {}
        prompts: dict[str, PromptPart] = {}
        for name, own in prompt_logits.items():
            part = self._reported(items, name, own)
            if isinstance(part, DraftwireError):
                outcomes[name] = part
            else:
                outcomes[name], prompts[name] = StillReading(part), part
        names = [name for name in starts if name in items.deciding]
        cases = [self._case(name, items.reading[name]) for name in names]
        if not cases:
            return StepReport(outcomes)
        assert logits is not None, "rank 0 has the logits of all that is decided"
        rows = [start for name, case in zip(names, cases, strict=True) for start in _rows(starts[name], case)]
        if rows != list(range(len(logits))):
            logits = logits.index_select(0, upload(rows, logits.device, torch.int64))
        bad = prompt_logits.keys() - prompts.keys()
        decisions = decide(cases, logits, [index for index, name in enumerate(names) if name in bad])
        for name, outcome in zip(names, decisions.outcomes, strict=True):
            if isinstance(outcome, Judgement):
                outcomes[name] = replace(outcome, prompt=prompts.get(name))
            elif outcome is not None:
                outcomes[name] = outcome
        sums = audits_of(decisions.batches, [case.rule for case in cases])
        return StepReport(outcomes, dict(zip(names, sums, strict=True)))

    def _case(self, name: str, item: RoundItem) -> Case:
        return Case(
            draft_tokens=item.draft_tokens,
            draft=item.draft,
            sampling=item.sampling,
            rule=self.rules[item.rule],
            key=item.key,
            num_committed=item.num_committed,
            committed=item.committed,
            prompt_len=item.prompt_len,
            stop_token_ids=item.stop_token_ids,
            report=item.report,
            masks=item.masks,
            edits=self._edits_of(name, item),
            is_used=item.is_used,
        )

    def _edits_of(self, name: str, item: RoundItem) -> TokenEdits:
        if name not in self._edits:
            self._edits[name] = TokenEdits(item.sampling, item.stop_token_ids)
        return self._edits[name]

    def _reported(self, items: StepItems, name: str, logits: Tensor) -> PromptPart | DraftwireError:
        item = items.reading[name]
        assert item.report is not None, "asked of those who report their prompt"
        return item.report.of_prompt(self._case(name, item), items.prompts[name].start, logits)


Share = Callable[[StepReport | None], StepReport]
"""Broadcasts rank 0's report; the other ranks pass None. Every rank calls it once in every step."""


def agreed(decide_here: Callable[[], StepReport], share: Share, rank: int) -> StepReport:
    """Returns on every rank what rank 0, which alone calls `decide_here`, decided. An error of rank 0 is shared too, so
    that no rank waits for ever.
    """
    if rank:
        return share(None)
    try:
        report = decide_here()
    except DraftwireError as error:
        report = StepReport(error=error)
    except Exception as error:  # its message may quote a prompt
        report = StepReport(error=UnavailableError(f"{type(error).__name__} while deciding"))
        log.error("verifier.decision_failed", exc_info=error)
    return share(report)


def _rows(start: int, case: Case) -> range:
    return range(start, start + case.num_rows)
