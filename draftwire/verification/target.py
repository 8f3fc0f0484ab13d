"""The target's step: reads the committed tokens and the blocks of many sequences in one forward pass, and decides.

Reading is done here, by a `SequenceModel`; what is decided is defined in `draftwire.verification.deciding`. Runs on the
torch thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import Reading, SequenceModel
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.requests.logprobs import PromptPart
from draftwire.verification.deciding import (
    Case,
    Decided,
    DecidedShapes,
    Judgement,
    JudgingOutcome,
    MadeMasks,
    StillReading,
    decide,
    make_masks,
    reports_prompt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging(Case):
    """A case with its sequence, as a part of a step: reads committed tokens that are not in the cache and decides the
    next round. The step makes the masks, and reports the prompt tokens that it reads.
    """

    sequence: CachedSequence
    committed: list[int]
    """All committed ids, prompt included."""
    max_read: int | None = None
    """Limit of committed tokens that the cache lacks: if there are more, only so many are read and nothing is
    decided."""
    automaton: Automaton | None = None
    """Automaton of the generated text, if `sampling` prescribes a form."""
    made_masks: MadeMasks | None = None
    """The masks of the block, if they were made before the step."""

    def form_masks(self) -> MadeMasks | None:
        """Returns the form's masks after the committed tokens and after each draft token; None if there is no form."""
        if self.automaton is None or self.made_masks is not None:
            return self.made_masks
        return make_masks(self.automaton, self.committed[self.prompt_len :], self.draft_tokens, self.tree)

    def num_reported(self, num_read: int) -> int:
        """Returns how many prompt tokens are reported if the next `num_read` committed tokens are read."""
        start = self.sequence.length
        return max(0, min(start + num_read, self.prompt_len - 1) - start) if reports_prompt(self.report) else 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step."""

    outcomes: list[JudgingOutcome]
    """One for each judging."""
    decided: list[Decided]
    """Batches of the step; see `Decisions.batches`."""
    num_tokens: int = 0
    """Tokens that the forward pass read."""
    shaped: list[DecidedShapes] = field(default_factory=list)
    """The same as `decided` for blocks that are no chains; see `Decisions.shaped`."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt tokens of one sequence that this step reads and reports."""

    index: int
    start: int
    """Position of the token before the first of them."""
    first_row: int
    """Their first row among all kept logits."""
    num_rows: int

    def read_off(self, judging: Judging, logits: Tensor) -> PromptPart | DraftwireError:
        """Returns what is reported of them, from all kept logits."""
        assert judging.report is not None, "tokens are reported"
        return judging.report.of_prompt(judging, self.start, logits[self.first_row : self.first_row + self.num_rows])


@dataclass(slots=True)
class _Plan:
    """Readings of a step, and the owners of the rows of its logits."""

    readings: list[Reading] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Indices of the judgings that are decided."""
    rows: list[int] = field(default_factory=list)
    """Rows of all kept logits that belong to `scored`."""
    prompts: list[_Prompt] = field(default_factory=list)
    num_kept: int = 0

    def add(self, index: int, judging: Judging) -> None:
        """Adds one sequence's part."""
        unread = judging.committed[judging.sequence.length :]
        is_partial = judging.max_read is not None and len(unread) > judging.max_read
        if is_partial:
            unread = unread[: judging.max_read]
        num_reported = judging.num_reported(len(unread))
        token_ids = unread if is_partial else unread + judging.draft_tokens
        num_scored = 0 if is_partial else len(judging.draft_tokens) + 1
        if not is_partial:
            self.scored.append(index)
        if num_reported:
            self.prompts.append(_Prompt(index, judging.sequence.length, self.num_kept, num_reported))
        keep = len(token_ids) if num_reported else num_scored
        parents = judging.tree.parents if judging.tree is not None and not is_partial else ()
        self.readings.append(Reading(judging.sequence, token_ids, keep, parents))
        self.num_kept += keep
        self.rows.extend(range(self.num_kept - num_scored, self.num_kept))


@torch.inference_mode()
def judge(model: SequenceModel, judgings: Sequence[Judging]) -> StepOutcome:
    """Scores blocks after their committed tokens and decides which of their tokens to accept."""
    if not judgings:
        return StepOutcome([], [])
    plan = _Plan()
    # Sequences that report prompts come last, so that the rows of all others are contiguous and not copied.
    for index in sorted(range(len(judgings)), key=lambda index: reports_prompt(judgings[index].report)):
        plan.add(index, judgings[index])
    lengths = [judging.sequence.length for judging in judgings]
    logits = model.read(plan.readings)
    masks, failures = _masks(judgings, plan.scored)  # overlaps with the forward pass on a GPU
    prompts: dict[int, PromptPart] = {}
    for one in plan.prompts:
        part = one.read_off(judgings[one.index], logits)
        if isinstance(part, DraftwireError):
            failures.setdefault(one.index, part)
        else:
            prompts[one.index] = part
    if plan.rows == list(range(len(plan.rows))):
        logits = logits[: len(plan.rows)]
    else:
        logits = logits.index_select(0, upload(plan.rows, logits.device, torch.int64))
    cases = [
        replace(judgings[index], masks=masks[index]) if index in masks else judgings[index] for index in plan.scored
    ]
    decisions = decide(cases, logits, [place for place, index in enumerate(plan.scored) if index in failures])
    outcomes: list[JudgingOutcome] = [StillReading(prompts.get(index)) for index in range(len(judgings))]
    for index, decision in zip(plan.scored, decisions.outcomes, strict=True):
        if isinstance(decision, Judgement):
            outcomes[index] = replace(decision, prompt=prompts[index]) if index in prompts else decision
        elif decision is not None:
            failures[index] = decision
    for index, failure in failures.items():
        outcomes[index] = failure
    for judging, length, outcome in zip(judgings, lengths, outcomes, strict=True):
        _settle(model, judging, length, outcome)
    num_tokens = sum(len(reading.token_ids) for reading in plan.readings)
    batches = [replace(one, members=[plan.scored[place] for place in one.members]) for one in decisions.batches]
    shaped = [replace(one, members=[plan.scored[place] for place in one.members]) for one in decisions.shaped]
    return StepOutcome(outcomes, batches, num_tokens, shaped)


def _settle(model: SequenceModel, judging: Judging, length: int, outcome: JudgingOutcome) -> None:
    """Leaves in a sequence's cache what its outcome commits; `length` is its length before the step."""
    if isinstance(outcome, Judgement):
        if judging.tree is None:
            model.cache.truncate(judging.sequence, len(judging.committed) + outcome.num_accepted)
        else:
            model.keep_path(judging.sequence, outcome.path)
        # Published only now: finite logits show that the cached keys and values are finite too.
        model.cache.publish(judging.sequence, judging.committed)
    elif not isinstance(outcome, StillReading):
        model.cache.truncate(judging.sequence, length)


def _masks(judgings: Sequence[Judging], scored: list[int]) -> tuple[dict[int, BlockMasks], dict[int, DraftwireError]]:
    """Returns the masks of the sequences with a form, and the errors of those whose form cannot be followed."""
    masks: dict[int, BlockMasks] = {}
    failures: dict[int, DraftwireError] = {}
    for index in scored:
        own = judgings[index].form_masks()
        if isinstance(own, DraftwireError):
            failures[index] = own
        elif own is not None:
            masks[index] = own
    return masks, failures
