"""The target's decisions: from its logits at the positions of blocks to the tokens that are accepted.

The one definition of what a verifier decides, whichever engine computed the logits. Runs on the torch thread.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.distributions import DenseRows, DraftRows, no_rows
from draftwire.method.draw_key import DrawKey
from draftwire.method.sampling import (
    SMALLEST,
    Span,
    TokenEdits,
    first_penalized,
    is_distribution,
    probabilities_of_spans,
)
from draftwire.method.token_tree import ROOT, TokenTree
from draftwire.requests.automaton import BlockMasks
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.reported_logprobs import EmittedRows, log_softmax_of, of_emitted
from draftwire.verification.rule import KeyedNoise, VerificationRule, verify
from draftwire.verification.tree_choice import tree_rule_for
from draftwire.verification.tree_rule import verify_trees
from draftwire.verification.trees import TreeBatch

NEAR_TIE = 1e-4
"""Logits that are closer may be ordered differently by a forward pass of another shape: ten times the differences
observed in float32."""

NEAR_TIES = {torch.bfloat16: 0.25, torch.float16: 0.03}
"""The same for lower precisions."""

NOT_FINITE = "the target gave no finite logits"


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence's block, as it is decided: everything but the logits."""

    draft_tokens: list[int]
    """The draft block; empty for plain decoding."""
    draft: DraftRows | None
    """The distributions of the draft tokens, one row each, or of a tree one for each of `TokenTree.inner_nodes`; None
    for an empty block, and for a tree whose rule reads none."""
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
    logprobs: LogprobsRequest = NO_LOGPROBS
    """The log-probabilities to report; those of the prompt are not reported here."""
    masks: BlockMasks | None = None
    """Masks of the form of its text, if it has one."""
    edits: TokenEdits | None = None
    """Those of `sampling` and `stop_token_ids`, kept with the session; None makes them for this step."""
    tree: TokenTree | None = None
    """The shape of the block, if it is no chain: only where `tree_rule_for` has a rule for trees."""
    is_used: bool = True
    """Whether its draft tokens may enter the text. If not, they are scored for the audit, and the round is decided as
    if nothing had been drafted."""

    @property
    def num_rows(self) -> int:
        """Rows of logits that decide: after the committed tokens and after each draft token."""
        return len(self.draft_tokens) + 1

    @property
    def spans(self) -> list[Span]:
        """The positions of the rows: those of a chain follow each other; each node of a tree is the end of a path of
        its own, which matters where the text does.
        """
        if self.tree is None or not (self.sampling.penalizes or self.sampling.min_tokens):
            return [self._span_after(self.draft_tokens)]
        paths = [[self.draft_tokens[each] for each in self.tree.path_to(node)] for node in range(ROOT, len(self.tree))]
        return [replace(self._span_after(()), paths=paths)]

    def _span_after(self, drafted: Sequence[int]) -> Span:
        """Returns the positions of the rows, the last one after the committed tokens and `drafted`."""
        first = first_penalized(self.sampling, self.prompt_len)
        text = [*self.committed[first:], *drafted] if self.sampling.penalizes else ()
        prompt_len, text_len = self.prompt_len - first, self.num_committed + len(drafted) - first
        rows = self.masks.rows if self.masks is not None else None
        return Span(self.sampling, self.num_rows, text, prompt_len, self.stop_token_ids, text_len, rows, self.edits)


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
    """The nodes of the accepted draft tokens, if the block was a tree."""

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
class DecidedTrees:
    """A batch of trees that a rule which reads draft distributions decided in a step."""

    members: list[int]
    """Indices, as in `Decided`."""
    trees: TreeBatch
    """Trees without what follows nodes after which the target has no distribution. With their draft tokens, also of
    cases whose tokens are not used."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Result of `decide`."""

    outcomes: list[Judgement | DraftwireError | None]
    """One for each case; None for those that were not to be decided."""
    batches: list[Decided]
    """One for each rule among the cases, more if it had both dense and sparse draft distributions, or draft tokens that
    are used and others that are not. Not of trees."""
    tree_batches: list[DecidedTrees] = field(default_factory=list)
    """The same for trees; those whose rule reads no distributions are in none."""


@dataclass(frozen=True, slots=True)
class _Scored:
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
        return self.num_good <= len(self.case.draft_tokens)

    def with_rows(self, is_good: list[bool]) -> "_Scored":
        """Returns this with `bad_rows`, from whether each row over the vocabulary is a distribution."""
        own = is_good[self.first_row : self.end_row]
        if False not in own:
            return self
        return replace(self, bad_rows=tuple(row for row, good in enumerate(own) if not good))


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
        scored.append(_Scored(index, case, case.draft or no_rows(logits.shape[1]), num_rows))
        num_rows += case.num_rows
    near_tie = NEAR_TIES.get(logits.dtype, NEAR_TIE)
    raw = _RawRows.of(logits, scored)  # before the probabilities overwrite the logits
    target_probs = probabilities_of_spans(logits, [span for case in cases for span in case.spans])
    is_good = is_distribution(target_probs).tolist()
    if not all(is_good):
        _hold_places(target_probs, is_good)
    scored = [one.with_rows(is_good) for one in scored]
    is_bad = {one.index for one in scored if one.num_good == 0}
    batches: list[Decided] = []
    tree_batches: list[DecidedTrees] = []
    decided: dict[int, Judgement] = {}
    for members in _groups([one for one in scored if one.index not in is_bad and one.index not in not_decided]):
        if members[0].case.tree is not None:
            decided.update(_decide_trees(members, target_probs, near_tie, tree_batches))
            continue
        batches.append(_batch(members, target_probs))
        decided.update(_decide(members, batches[-1].blocks, near_tie))
    _report(scored, decided, raw, target_probs)
    outcomes: list[Judgement | DraftwireError | None] = [decided.get(index) for index in range(len(cases))]
    for index in sorted(is_bad.difference(not_decided)):
        outcomes[index] = UnavailableError(NOT_FINITE)
    for index, judgement in decided.items():
        outcomes[index] = _fault(cases[index].masks, judgement) or judgement
    return Decisions(outcomes, batches, tree_batches)


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


@dataclass(frozen=True, slots=True)
class _RawRows:
    """Unprocessed log-probabilities of the sequences that request them."""

    log_probs: Tensor
    starts: dict[int, int]
    """First row of each such case."""

    @classmethod
    def of(cls, logits: Tensor, scored: list[_Scored]) -> "_RawRows | None":
        """Computes the rows; None if no sequence requests them."""
        starts: dict[int, int] = {}
        rows: list[int] = []
        for one in scored:
            wanted = one.case.logprobs
            if wanted.logprobs is not None and wanted.mode is LogprobsMode.RAW:
                starts[one.index] = len(rows)
                rows.extend(range(one.first_row, one.end_row))
        return cls(log_softmax_of(logits, rows), starts) if rows else None


def _report(scored: list[_Scored], decided: dict[int, Judgement], raw: _RawRows | None, target_probs: Tensor) -> None:
    """Adds requested log-probabilities to the judgements."""
    emitted: dict[int, EmittedRows] = {}
    for one in scored:
        num_top, mode = one.case.logprobs.logprobs, one.case.logprobs.mode
        if num_top is not None and one.index in decided:
            token_ids = decided[one.index].token_ids
            first = raw.starts[one.index] if raw is not None and mode is LogprobsMode.RAW else one.first_row
            rows = [first + row for row in decided[one.index].rows]
            emitted[one.index] = EmittedRows(rows, token_ids, num_top, mode)
    if not emitted:
        return
    reported = of_emitted(raw.log_probs if raw is not None else None, target_probs, list(emitted.values()))
    for index, tokens in zip(emitted, reported, strict=True):
        decided[index] = replace(decided[index], logprobs=tokens)


def _decide(members: list[_Scored], blocks: BlockBatch, bound: float) -> dict[int, Judgement]:
    """Applies the members' rule; `bound` is for near-ties. If the draft tokens are not used, it decides about empty
    blocks.
    """
    cases = [one.case for one in members]
    judged = blocks if cases[0].is_used else blocks.cut(torch.zeros_like(blocks.lengths))
    noise = KeyedNoise([case.key for case in cases], [case.num_committed for case in cases], blocks.target_probs.device)
    verified = verify(cases[0].rule, judged, noise)
    near_ties = verified.num_near_ties(_near_tie_bounds(cases, bound, blocks.target_probs.device))
    decisions = torch.stack([verified.num_accepted, verified.extra_tokens, near_ties]).tolist()  # one transfer
    judgements: dict[int, Judgement] = {}
    for one, num_accepted, extra, num_near_ties in zip(members, *decisions, strict=True):
        draft_tokens = one.case.draft_tokens
        if one.lacks_next and num_accepted == one.num_judged:
            # All are accepted, and nothing can follow. The next round fails on that row, as plain decoding does.
            num_accepted, extra = num_accepted - 1, draft_tokens[num_accepted - 1]
        judgements[one.index] = Judgement([*draft_tokens[:num_accepted], extra], num_accepted, num_near_ties)
    return judgements


def _decide_trees(
    members: list[_Scored], target_probs: Tensor, bound: float, batches: list[DecidedTrees]
) -> dict[int, Judgement]:
    """Applies the members' rule for trees, and adds the batch if it reads distributions; `bound` is for near-ties. If
    the draft tokens are not used, it decides about trees without nodes.
    """
    cases, device = [one.case for one in members], target_probs.device
    shapes = [case.tree for case in cases if case.tree is not None]
    noise = KeyedNoise([case.key for case in cases], [case.num_committed for case in cases], device)
    trees = TreeBatch.packed(
        target_probs,
        [one.draft for one in members],
        [case.draft_tokens for case in cases],
        shapes,
        [one.first_row for one in members],
    )
    ends = [{row - 1 for row in one.bad_rows} for one in members]
    rule = tree_rule_for(cases[0].rule, cases[0].sampling)
    if rule.needs_draft_probs:
        kept = [shape.ended_at(end) for shape, end in zip(shapes, ends, strict=True)]
        batches.append(DecidedTrees([one.index for one in members], trees.cut(kept) if any(ends) else trees))
    if cases[0].is_used:
        outcome = verify_trees(rule, trees, noise, ends)
    else:
        outcome = verify_trees(rule, trees.cut([()] * len(cases)), noise)
    near_ties = torch.zeros_like(outcome.last_nodes)
    if outcome.leads is not None:
        near_ties = (outcome.leads < _near_tie_bounds(cases, bound, device)).sum(dim=1)
    decisions = torch.stack([outcome.last_nodes, outcome.extra_tokens, near_ties]).tolist()  # one transfer
    judgements: dict[int, Judgement] = {}
    for one, shape, end, last_node, extra, num_near_ties in zip(members, shapes, ends, *decisions, strict=True):
        path, tokens = shape.path_to(last_node), one.case.draft_tokens
        if last_node in end:  # nothing can follow. The next round fails on that row, as plain decoding does.
            path, extra = path[:-1], tokens[last_node]
        token_ids = [*(tokens[node] for node in path), extra]
        judgements[one.index] = Judgement(token_ids, len(path), num_near_ties, path=path)
    return judgements


def _near_tie_bounds(cases: Sequence[Case], bound: float, device: torch.device) -> Tensor:
    """Returns the leads below which a token of each case is a near-tie, `[cases, 1]`; `bound` is for logits."""
    bounds = [[bound / max(case.sampling.temperature, SMALLEST)] for case in cases]
    return upload(bounds, device, torch.float32)


def _groups(scored: list[_Scored]) -> list[list[_Scored]]:
    """Groups blocks that can be verified together: of one rule, all used or none, with all dense or all sparse
    distributions; and trees in the same way.
    """
    groups: dict[tuple[int, bool, bool, bool], list[_Scored]] = {}
    for one in scored:
        is_tree = one.case.tree is not None
        rule = tree_rule_for(one.case.rule, one.case.sampling) if is_tree else one.case.rule
        key = id(rule), one.case.is_used, isinstance(one.draft, DenseRows), is_tree
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _batch(members: list[_Scored], target_probs: Tensor) -> Decided:
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
