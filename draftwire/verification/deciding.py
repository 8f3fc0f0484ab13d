"""The target's decisions: from its logits at the positions of blocks to the tokens that are accepted.

The one definition of what a verifier decides, whichever engine computed the logits. Runs on the torch thread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError
from draftwire.method.block_shape import BlockShape
from draftwire.method.devices import upload
from draftwire.method.distributions import DenseRows, DraftRows, no_rows
from draftwire.method.keys import DrawKey
from draftwire.method.sampling import (
    SMALLEST,
    Span,
    TokenEdits,
    first_penalized,
    is_distribution,
    probabilities_of_spans,
)
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.requests.logprobs import PromptPart, TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch, ShapedBatch
from draftwire.verification.rule import KeyedNoise, VerificationRule, verify

NEAR_TIE = 1e-4
"""Logits that are closer may be ordered differently by a forward pass of another shape: ten times the differences
observed in float32."""

NEAR_TIES = {torch.bfloat16: 0.25, torch.float16: 0.03}
"""The same for lower precisions."""

NOT_FINITE = "the target gave no finite logits"

MadeMasks = BlockMasks | DraftwireError
"""Masks of a form at the positions of a block, made in its step or, where they are slow, before it; or why the text
fails."""


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence's block, as it is decided: everything but the logits."""

    draft_tokens: list[int]
    """The draft block; empty for plain decoding."""
    draft: DraftRows | None
    """The distributions of the draft tokens, one row each, or as many as `tree` says; None for an empty block, and for
    a `tree` that was sent without."""
    sampling: SamplingParams
    """Sampling parameters of the target's distribution at every position."""
    rule: VerificationRule
    key: DrawKey
    """Key of the random numbers to decide with."""
    num_committed: int
    """Committed tokens before the block, prompt included."""
    committed: Sequence[int] = ()
    """These tokens. May be left out unless `sampling.penalizes`."""
    prompt_len: int = 0
    """How many of the committed ids are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` masks."""
    report: "TokenReport | None" = None
    """Reports about its tokens; None if nothing is reported."""
    masks: BlockMasks | None = None
    """Masks of the form of its text, if it has one."""
    edits: TokenEdits | None = None
    """Those of `sampling` and `stop_token_ids`, kept with the session; None makes them for this step."""
    tree: BlockShape | None = None
    """The shape of the block, if it is no chain: only where its decider has a rule for it."""
    is_used: bool = True
    """Whether its draft tokens may enter the text. If not, they are scored for the audit, and the round is decided as
    if nothing had been drafted."""

    @property
    def num_rows(self) -> int:
        """Rows of logits that decide: after the committed tokens and after each draft token."""
        return len(self.draft_tokens) + 1

    @property
    def span(self) -> Span:
        """The positions of the rows: those of a chain follow each other; in another shape each has a text of its own,
        which matters where the text does.
        """
        sampling, paths = self.sampling, None
        if self.tree is not None and (sampling.penalizes or sampling.min_tokens):
            paths = self.tree.texts(self.draft_tokens)
        drafted = self.draft_tokens if paths is None else []
        first = first_penalized(sampling, self.prompt_len)
        text = [*self.committed[first:], *drafted] if sampling.penalizes else ()
        prompt_len, text_len = self.prompt_len - first, self.num_committed + len(drafted) - first
        rows = self.masks.rows if self.masks is not None else None
        return Span(sampling, self.num_rows, text, prompt_len, self.stop_token_ids, text_len, rows, self.edits, paths)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Decision about one block."""

    token_ids: list[int]
    """The accepted draft tokens, then the extra one."""
    num_accepted: int
    num_near_ties: int = 0
    """Tokens that rounding could have changed; 0 for rules that do not count them."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each token, if requested."""
    prompt: PromptPart | None = None
    """Log-probabilities of the prompt tokens that were read, if requested."""
    path: tuple[int, ...] = ()
    """Indices of the accepted draft tokens, if the block was no chain."""

    @property
    def rows(self) -> Sequence[int]:
        """The row of the block that each token follows: 0 is after the committed tokens, n + 1 after draft token n."""
        return [0, *(node + 1 for node in self.path)] if self.path else range(len(self.token_ids))


@dataclass(frozen=True, slots=True)
class StillReading:
    """Nothing was decided: only part of the committed tokens was read, as in chunked prefill."""

    prompt: PromptPart | None = None
    """Log-probabilities of the prompt, as in `Judgement`."""


JudgingOutcome = Judgement | StillReading | DraftwireError
"""An error concerns one sequence alone, whose cache is unchanged: UnavailableError for logits after the committed
tokens that are not finite, InvalidRequestError if the form of its text cannot be followed."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A batch of blocks that a rule decided in a step."""

    members: list[int]
    """Indices of the step's judgings, or of the cases that were decided."""
    blocks: BlockBatch
    """Blocks with their draft tokens, also of cases whose tokens are not used."""
    lacks_next: list[bool]
    """Whether the row after each block's last token is not a distribution; a placeholder stands there. If the
    block is accepted as a whole, its last token takes the place of the extra one. Whoever derives the law of the text
    from `blocks`, as `tests/enumeration.py` does, needs it: the length of a block whose own rows are all good does not
    show it."""


@dataclass(frozen=True, slots=True)
class DecidedShapes:
    """A batch of blocks that are no chains, which a rule that reads draft distributions decided in a step."""

    members: list[int]
    """Indices, as in `Decided`."""
    blocks: ShapedBatch
    """Blocks without what follows tokens after which the target has no distribution. With their draft tokens, also of
    cases whose tokens are not used."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Result of `decide`."""

    outcomes: list[Judgement | DraftwireError | None]
    """One for each case; None for those that were not to be decided."""
    batches: list[Decided]
    """One for each rule among the cases, more if it had both dense and sparse draft distributions, or draft tokens that
    are used and others that are not. Of chains."""
    shaped: list[DecidedShapes] = field(default_factory=list)
    """The same for other shapes; those whose rule reads no distributions are in none."""


@dataclass(frozen=True, slots=True)
class ScoredBlock:
    """A case with its rows of the target's distributions."""

    index: int
    case: Case
    draft: DraftRows
    first_row: int
    """First of its `draft_len + 1` rows."""
    bad_rows: tuple[int, ...] = ()
    """Indices of these rows that are no distributions, ascending."""

    @property
    def num_good(self) -> int:
        """How many of these rows are distributions before the first one that is not."""
        return self.bad_rows[0] if self.bad_rows else self.case.num_rows

    @property
    def end_row(self) -> int:
        """The row after its last one."""
        return self.first_row + self.case.num_rows

    @property
    def num_judged(self) -> int:
        """Draft tokens that are judged. The block ends behind the first one whose following row is not a distribution.

        That depends on this token and those before it alone, so that the law of the text stays exact. To drop the block
        because of that row would be to drop tokens because of their values.
        """
        return min(self.num_good, len(self.case.draft_tokens))

    @property
    def lacks_next(self) -> bool:
        """Whether the row after the last token that is judged is not a distribution."""
        return bool(self.bad_rows)

    def with_rows(self, is_good: list[bool]) -> "ScoredBlock":
        """Returns this with `bad_rows`, from whether each row over the vocabulary is a distribution."""
        own = is_good[self.first_row : self.end_row]
        if False not in own:
            return self
        return replace(self, bad_rows=tuple(row for row, good in enumerate(own) if not good))


FinishReport = Callable[[dict[int, Judgement], Tensor], None]
"""Adds what is reported to judgements, by `ScoredBlock.index`, from the target's probabilities `[any, vocab]`."""


class TokenReport(Protocol):
    """Reports of an option about the tokens of a session, all of one kind in a step. Used on the torch thread."""

    @property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt are reported: the logits before each of them are then needed."""

    def of_prompt(self, case: Case, start: int, logits: Tensor) -> PromptPart | DraftwireError:
        """Returns what is reported of some tokens of a session's prompt, or the error that ends the session.

        Args:
            case: of the session, with its committed tokens.
            start: position of the token before the first of these.
            logits: `[num_tokens, vocab]`: the target's before each of them, unprocessed. Not changed.
        """

    def begin(self, members: Sequence[ScoredBlock], logits: Tensor) -> FinishReport:
        """Prepares what is reported of the tokens that a step emits, for all blocks together.

        Args:
            members: the blocks of which something is reported.
            logits: `[any, vocab]`: the target's, unprocessed, which are overwritten next. Not changed.

        Returns:
            To be called with the judgements once the blocks are decided.
        """


def reports_prompt(report: TokenReport | None) -> bool:
    """Returns whether tokens of a session's prompt are reported."""
    return report is not None and report.reads_prompt


class ShapeDecider(Protocol):
    """Decides about blocks of one kind of shape: `BlockShape.decider`."""

    def rule_for(self, rule: VerificationRule, sampling: SamplingParams) -> object:
        """Returns what decides in the place of a session's rule. Blocks that have the same are decided together.

        Raises:
            InvalidRequestError: the rule is for chains alone.
        """

    def decide(
        self, members: Sequence[ScoredBlock], target_probs: Tensor, near_tie: float, decided: list[DecidedShapes]
    ) -> dict[int, Judgement]:
        """Decides about blocks that can be verified together; returns the judgements by `ScoredBlock.index`.

        Args:
            members: the blocks. If their draft tokens are not used, it decides about empty ones.
            target_probs: `[any, vocab]`.
            near_tie: logits that are closer are near-ties.
            decided: receives the batch, if the rule reads draft distributions.
        """

    def masks(
        self, automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], shape: BlockShape
    ) -> BlockMasks:
        """Returns the masks of a block of this shape; see `Automaton.along`."""


def make_masks(
    automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], tree: BlockShape | None = None
) -> MadeMasks:
    """Returns the masks after the generated tokens and after each draft token, or the error that ends the text.

    Args:
        automaton: of the form. Used on one thread at a time.
        generated_ids: the committed tokens without the prompt.
        draft_tokens: of the block; none for plain decoding.
        tree: the shape of the block, if it is no chain.
    """
    try:
        if tree is None:
            return automaton.along(generated_ids, draft_tokens)
        decider: ShapeDecider = tree.decider
        return decider.masks(automaton, generated_ids, draft_tokens, tree)
    except InvalidRequestError as error:
        return error


@torch.inference_mode()
def decide(cases: Sequence[Case], logits: Tensor, not_decided: Collection[int] = ()) -> Decisions:
    """Decides which tokens of each block to accept.

    Probabilities stay on the device of the logits, where the rules run; only decisions and requested log-probabilities
    are transferred to the host.

    Args:
        cases: the blocks.
        logits: `[sum of num_rows, vocab]`, any float dtype: the target's, unprocessed, for each case in order the rows
            before its draft tokens and after the last. Overwritten.
        not_decided: indices of cases that failed for another reason.
    """
    if not cases:
        return Decisions([], [])
    scored, num_rows = [], 0
    for index, case in enumerate(cases):
        scored.append(ScoredBlock(index, case, case.draft or no_rows(logits.shape[1]), num_rows))
        num_rows += case.num_rows
    near_tie = NEAR_TIES.get(logits.dtype, NEAR_TIE)
    reported = [one for one in scored if one.case.report is not None]
    report = reported[0].case.report if reported else None
    finish_report = report.begin(reported, logits) if report is not None else None  # before they are overwritten
    target_probs = probabilities_of_spans(logits, [case.span for case in cases])
    is_good = is_distribution(target_probs).tolist()
    if not all(is_good):
        _hold_places(target_probs, is_good)
        scored = [one.with_rows(is_good) for one in scored]
    is_bad = {one.index for one in scored if 0 in one.bad_rows}
    batches: list[Decided] = []
    shaped: list[DecidedShapes] = []
    decided: dict[int, Judgement] = {}
    for members in _groups([one for one in scored if one.index not in is_bad and one.index not in not_decided]):
        shape = members[0].case.tree
        if shape is not None:
            decided.update(shape.decider.decide(members, target_probs, near_tie, shaped))
            continue
        batches.append(_batch(members, target_probs))
        decided.update(_decide(members, batches[-1].blocks, near_tie))
    if finish_report is not None:
        finish_report(decided, target_probs)
    outcomes: list[Judgement | DraftwireError | None] = [decided.get(index) for index in range(len(cases))]
    for index in sorted(is_bad.difference(not_decided)):
        outcomes[index] = UnavailableError(NOT_FINITE)
    for index, judgement in decided.items():
        outcomes[index] = _fault(cases[index].masks, judgement) or judgement
    return Decisions(outcomes, batches, shaped)


def _fault(masks: BlockMasks | None, judgement: Judgement) -> DraftwireError | None:
    """Returns the error of a sequence whose extra token was drawn where its form cannot be followed. Plain decoding
    reaches such a position with the same probability and fails there too.
    """
    return None if masks is None else masks.faults.get(judgement.rows[-1])


def _hold_places(target_probs: Tensor, is_good: list[bool]) -> None:
    """Puts a distribution in the place of each row that is none: rules compute with it, and nothing of it is used."""
    rows = upload([row for row, good in enumerate(is_good) if not good], target_probs.device, torch.int64)
    target_probs[rows] = 0.0
    target_probs[rows, 0] = 1.0


def _decide(members: list[ScoredBlock], blocks: BlockBatch, bound: float) -> dict[int, Judgement]:
    """Applies the members' rule; `bound` is for near-ties. If the draft tokens are not used, it decides about empty
    blocks.
    """
    cases = [one.case for one in members]
    judged = blocks if cases[0].is_used else blocks.cut(torch.zeros_like(blocks.lengths))
    noise = KeyedNoise([case.key for case in cases], [case.num_committed for case in cases], blocks.target_probs.device)
    verified = verify(cases[0].rule, judged, noise)
    made = [verified.num_accepted, verified.extra_tokens]
    if verified.leads is not None:
        made.append(verified.num_near_ties(near_tie_bounds(cases, bound, blocks.target_probs.device)))
    decisions = torch.stack(made).tolist()  # one transfer
    decisions += [[0] * len(cases)] * (3 - len(made))
    judgements: dict[int, Judgement] = {}
    for one, num_accepted, extra, num_near_ties in zip(members, *decisions, strict=True):
        draft_tokens = one.case.draft_tokens
        if one.lacks_next and num_accepted == one.num_judged:
            # All are accepted, and nothing can follow. The next round fails on that row, as plain decoding does.
            num_accepted, extra = num_accepted - 1, draft_tokens[num_accepted - 1]
        judgements[one.index] = Judgement([*draft_tokens[:num_accepted], extra], num_accepted, num_near_ties)
    return judgements


def near_tie_bounds(cases: Sequence[Case], bound: float, device: torch.device) -> Tensor:
    """Returns the leads below which a token of each case is a near-tie, `[cases, 1]`; `bound` is for logits."""
    bounds = [[bound / max(case.sampling.temperature, SMALLEST)] for case in cases]
    return upload(bounds, device, torch.float32)


def _groups(scored: list[ScoredBlock]) -> list[list[ScoredBlock]]:
    """Groups blocks that can be verified together: of one rule, all used or none, with all dense or all sparse
    distributions; and those that are no chains in the same way.
    """
    groups: dict[tuple[int, bool, bool, bool], list[ScoredBlock]] = {}
    for one in scored:
        shape, rule = one.case.tree, one.case.rule
        if shape is not None:
            rule = shape.decider.rule_for(rule, one.case.sampling)
        key = id(rule), one.case.is_used, isinstance(one.draft, DenseRows), shape is None
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _batch(members: list[ScoredBlock], target_probs: Tensor) -> Decided:
    """Returns the members' blocks, as far as they are judged, as a batch; the target's rows are not copied."""
    blocks = BlockBatch.packed(
        target_probs,
        [one.draft for one in members],
        [one.case.draft_tokens for one in members],
        [one.first_row for one in members],
    )
    lacks_next = [one.lacks_next for one in members]
    if any(lacks_next):
        blocks = blocks.cut(upload([one.num_judged for one in members], target_probs.device, torch.int64))
    return Decided([one.index for one in members], blocks, lacks_next)
