"""The target's step: scores the blocks of many sequences in one forward pass, and applies their rules.

Runs on the torch thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.distributions import DenseRows, DraftRows, no_rows
from draftwire.method.draw_key import DrawKey
from draftwire.method.sampling import SMALLEST, Span, TokenEdits, is_distribution, probabilities_of_spans
from draftwire.models.cached_model import Reading, SequenceModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.reported_logprobs import EmittedRows, PromptRows, log_softmax_of, of_emitted, of_prompt
from draftwire.verification.rule import KeyedNoise, VerificationRule, verify

NEAR_TIE = 1e-4
"""Logits that are closer may be ordered differently by a forward pass of another shape: ten times the differences
observed in float32."""

NEAR_TIES = {torch.bfloat16: 0.25, torch.float16: 0.03}
"""The same for lower precisions."""


@dataclass(frozen=True, slots=True)
class Judging:
    """One sequence's part in a step: reads committed tokens that are not in the cache and decides the next round."""

    sequence: CachedSequence
    committed: list[int]
    """All committed ids, prompt included."""
    draft_tokens: list[int]
    """The draft block; empty for plain decoding."""
    draft: DraftRows | None
    """The distributions of the draft tokens, one row each; None for an empty block."""
    sampling: SamplingParams
    """Sampling parameters of the target's distribution at every position."""
    rule: VerificationRule
    key: DrawKey
    """Key of the random numbers to decide with."""
    prompt_len: int = 0
    """How many of the committed ids are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` masks."""
    max_read: int | None = None
    """If the cache lacks more committed tokens than this, only so many are read and nothing is decided."""
    logprobs: LogprobsRequest = NO_LOGPROBS
    """The log-probabilities to report. A step reports the prompt tokens that it reads."""
    automaton: Automaton | None = None
    """Automaton of the generated text, if `sampling` prescribes a form."""
    edits: TokenEdits | None = None
    """Those of `sampling` and `stop_token_ids`, kept with the session; None makes them for this step."""

    def masks(self) -> BlockMasks | None:
        """Returns the form's masks at the positions of `span`; None if there is no form.

        Raises:
            InvalidRequestError: the form cannot be followed.
        """
        if self.automaton is None:
            return None
        return self.automaton.along(self.committed[self.prompt_len :], self.draft_tokens)

    def span(self, masks: BlockMasks | None = None) -> Span:
        """Returns the positions before each draft token and after the last."""
        text = [*self.committed, *self.draft_tokens] if self.sampling.penalizes else ()
        text_len = len(self.committed) + len(self.draft_tokens)
        num_rows = len(self.draft_tokens) + 1
        rows = masks.rows if masks is not None else None
        return Span(self.sampling, num_rows, text, self.prompt_len, self.stop_token_ids, text_len, rows, self.edits)

    def prompt_rows(self, num_read: int) -> PromptRows | None:
        """Returns the prompt tokens to report if the next `num_read` committed tokens are read, or None."""
        start, num_top = self.sequence.length, self.logprobs.prompt_logprobs
        end = min(start + num_read, self.prompt_len - 1)
        if num_top is None or end <= start:
            return None
        text = self.committed[: end + 1]
        mode, stops = self.logprobs.mode, self.stop_token_ids
        return PromptRows(text, end - start, num_top, mode, self.sampling, stops, self.edits)


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


@dataclass(frozen=True, slots=True)
class StillReading:
    """Only part of the committed tokens was read: chunked prefill."""

    prompt: PromptPart | None = None
    """As in `Judgement`."""


JudgingOutcome = Judgement | StillReading | DraftwireError
"""An error concerns one sequence alone, whose cache is unchanged: UnavailableError for logits after the committed
tokens that are not finite, InvalidRequestError if the form of its text cannot be followed."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A batch of blocks that a rule decided in a step."""

    members: list[int]
    """Indices of the step's judgings."""
    blocks: BlockBatch
    lacks_next: list[bool]
    """For each block, whether the row after its last token is not a distribution; a placeholder stands there. If the
    block is accepted as a whole, its last token takes the place of the extra one. Whoever derives the law of the text
    from `blocks`, as `tests/enumeration.py` does, needs it: the length of a block whose own rows are all good does not
    show it."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step."""

    outcomes: list[JudgingOutcome]
    """One for each judging."""
    decided: list[Decided]
    """One batch for each rule in the step, or two if it had both dense and sparse draft distributions."""
    num_tokens: int = 0
    """Tokens that the forward pass read."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A block with its rows of the target's distributions."""

    index: int
    judging: Judging
    draft: DraftRows
    first_row: int
    """First of its `draft_len + 1` rows."""
    num_good: int = 0
    """How many of these rows are distributions before the first one that is not."""

    @property
    def end_row(self) -> int:
        """The row after its last one."""
        return self.first_row + len(self.judging.draft_tokens) + 1

    @property
    def num_judged(self) -> int:
        """Draft tokens that are judged. The block ends behind the first one whose following row is not a distribution.

        That depends on this token and those before it alone, so that the law of the text stays exact. To drop the block
        because of that row would be to drop tokens because of their values.
        """
        return min(self.num_good, len(self.judging.draft_tokens))

    @property
    def lacks_next(self) -> bool:
        """Whether the row after the last token that is judged is not a distribution."""
        return self.num_good <= len(self.judging.draft_tokens)

    def with_rows(self, is_good: list[bool]) -> "_Scored":
        """Returns this with `num_good`, from whether each row over the vocabulary is a distribution."""
        own = is_good[self.first_row : self.end_row]
        return replace(self, num_good=own.index(False) if False in own else len(own))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt tokens of one sequence that this step reads and reports."""

    index: int
    first_row: int
    """Its first row among all kept logits."""
    rows: PromptRows

    def read_off(self, logits: Tensor) -> PromptPart:
        """Returns the log-probabilities, from all kept logits."""
        own = logits[self.first_row : self.first_row + self.rows.num_rows]
        return PromptPart(len(self.rows.text) - self.rows.num_rows, of_prompt(own, self.rows))


@dataclass(slots=True)
class _Plan:
    """Readings of a step, and the owners of the rows of its logits."""

    readings: list[Reading] = field(default_factory=list)
    scored: list[_Scored] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Rows of all kept logits that belong to `scored`; `_Scored.first_row` is an index into this list."""
    prompts: list[_Prompt] = field(default_factory=list)
    num_kept: int = 0

    def add(self, index: int, judging: Judging, vocab_size: int) -> None:
        """Adds one sequence's part."""
        unread = judging.committed[judging.sequence.length :]
        is_partial = judging.max_read is not None and len(unread) > judging.max_read
        if is_partial:
            unread = unread[: judging.max_read]
        prompt = judging.prompt_rows(len(unread))
        token_ids = unread if is_partial else unread + judging.draft_tokens
        num_scored = 0 if is_partial else len(judging.draft_tokens) + 1
        if not is_partial:
            self.scored.append(_Scored(index, judging, judging.draft or no_rows(vocab_size), len(self.rows)))
        if prompt is not None:
            self.prompts.append(_Prompt(index, self.num_kept, prompt))
        keep = num_scored if prompt is None else len(token_ids)
        self.readings.append(Reading(judging.sequence, token_ids, keep))
        self.num_kept += keep
        self.rows.extend(range(self.num_kept - num_scored, self.num_kept))


@torch.inference_mode()
def judge(model: SequenceModel, judgings: Sequence[Judging]) -> StepOutcome:
    """Scores blocks after their committed tokens and decides which of their tokens to accept.

    Probabilities stay on the model's device, where the rules run; only decisions and requested log-probabilities are
    transferred to the host.
    """
    if not judgings:
        return StepOutcome([], [])
    plan = _Plan()
    # Sequences that report prompts come last, so that the rows of all others are contiguous and not copied.
    for index in sorted(range(len(judgings)), key=lambda index: judgings[index].logprobs.prompt_logprobs is not None):
        plan.add(index, judgings[index], model.vocab_size)
    lengths = [judging.sequence.length for judging in judgings]
    logits = model.read(plan.readings)
    masks, failures = _masks(plan.scored)  # overlaps with the forward pass on a GPU
    prompts = {one.index: one.read_off(logits) for one in plan.prompts}
    is_bad = {index for index, part in prompts.items() if any(math.isnan(token.logprob) for token in part.tokens)}
    if plan.rows == list(range(len(plan.rows))):
        logits = logits[: len(plan.rows)]
    else:
        logits = logits.index_select(0, upload(plan.rows, logits.device, torch.int64))
    outcomes: dict[int, JudgingOutcome] = {index: StillReading(prompts.get(index)) for index in range(len(judgings))}
    batches: list[Decided] = []
    if plan.scored:
        near_tie = NEAR_TIES.get(logits.dtype, NEAR_TIE)
        raw = _RawRows.of(logits, plan.scored)  # before the probabilities overwrite the logits
        spans = [one.judging.span(masks.get(one.index)) for one in plan.scored]
        target_probs = probabilities_of_spans(logits, spans)
        is_good = is_distribution(target_probs).tolist()
        if not all(is_good):
            _hold_places(target_probs, is_good)
        scored = [one.with_rows(is_good) for one in plan.scored]
        is_bad.update(one.index for one in scored if one.num_good == 0)
        decided: dict[int, Judgement] = {}
        for members in _groups([one for one in scored if one.index not in is_bad | failures.keys()]):
            batches.append(_batch(members, target_probs))
            decided.update(_decide(model, members, batches[-1].blocks, near_tie))
        failures |= _faults(masks, decided)
        _report(scored, decided, raw, target_probs)
        outcomes.update(decided)
        outcomes.update(
            {index: replace(decided[index], prompt=prompts[index]) for index in prompts if index in decided}
        )
    failures |= {index: UnavailableError("the target gave no finite logits") for index in is_bad}
    for index, failure in failures.items():
        outcomes[index] = failure
        model.cache.truncate(judgings[index].sequence, lengths[index])
    num_tokens = sum(len(reading.token_ids) for reading in plan.readings)
    return StepOutcome([outcomes[index] for index in range(len(judgings))], batches, num_tokens)


def _masks(scored: list[_Scored]) -> tuple[dict[int, BlockMasks], dict[int, DraftwireError]]:
    """Returns the masks of the sequences with a form, and the errors of those whose form cannot be followed."""
    masks: dict[int, BlockMasks] = {}
    failures: dict[int, DraftwireError] = {}
    for one in scored:
        try:
            own = one.judging.masks()
        except InvalidRequestError as error:
            failures[one.index] = error
        else:
            if own is not None:
                masks[one.index] = own
    return masks, failures


def _faults(masks: dict[int, BlockMasks], decided: dict[int, Judgement]) -> dict[int, DraftwireError]:
    """Returns the errors of sequences whose extra token was drawn where their form cannot be followed. Plain decoding
    reaches such a position with the same probability and fails there too.
    """
    return {
        index: own.fault
        for index, own in masks.items()
        if own.fault is not None and index in decided and decided[index].num_accepted >= own.num_places
    }


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
    """First row of each such judging."""

    @classmethod
    def of(cls, logits: Tensor, scored: list[_Scored]) -> "_RawRows | None":
        """Computes the rows; None if no sequence requests them."""
        starts: dict[int, int] = {}
        rows: list[int] = []
        for one in scored:
            wanted = one.judging.logprobs
            if wanted.logprobs is not None and wanted.mode is LogprobsMode.RAW:
                starts[one.index] = len(rows)
                rows.extend(range(one.first_row, one.end_row))
        return cls(log_softmax_of(logits, rows), starts) if rows else None


def _report(scored: list[_Scored], decided: dict[int, Judgement], raw: _RawRows | None, target_probs: Tensor) -> None:
    """Adds requested log-probabilities to the judgements. Row n of a block is for the token after n draft tokens."""
    emitted: dict[int, EmittedRows] = {}
    for one in scored:
        num_top, mode = one.judging.logprobs.logprobs, one.judging.logprobs.mode
        if num_top is not None and one.index in decided:
            token_ids = decided[one.index].token_ids
            first = raw.starts[one.index] if raw is not None and mode is LogprobsMode.RAW else one.first_row
            emitted[one.index] = EmittedRows(range(first, first + len(token_ids)), token_ids, num_top, mode)
    if not emitted:
        return
    reported = of_emitted(raw.log_probs if raw is not None else None, target_probs, list(emitted.values()))
    for index, tokens in zip(emitted, reported, strict=True):
        decided[index] = replace(decided[index], logprobs=tokens)


def _decide(model: SequenceModel, members: list[_Scored], blocks: BlockBatch, bound: float) -> dict[int, Judgement]:
    """Applies the members' rule and truncates their sequences to the accepted tokens; `bound` is for near-ties."""
    judgings = [one.judging for one in members]
    positions = [len(judging.committed) for judging in judgings]
    noise = KeyedNoise([judging.key for judging in judgings], positions, blocks.target_probs.device)
    verified = verify(judgings[0].rule, blocks, noise)
    bounds = [[bound / max(judging.sampling.temperature, SMALLEST)] for judging in judgings]
    near_ties = verified.num_near_ties(upload(bounds, blocks.target_probs.device, torch.float32))
    decisions = torch.stack([verified.num_accepted, verified.extra_tokens, near_ties]).tolist()  # one transfer
    outcomes: dict[int, Judgement] = {}
    for one, num_accepted, extra, num_near_ties in zip(members, *decisions, strict=True):
        judging = one.judging
        if one.lacks_next and num_accepted == one.num_judged:
            # All are accepted, and nothing can follow. The next round fails on that row, as plain decoding does.
            num_accepted, extra = num_accepted - 1, judging.draft_tokens[num_accepted - 1]
        token_ids = [*judging.draft_tokens[:num_accepted], extra]
        outcomes[one.index] = Judgement(token_ids, num_accepted, num_near_ties)
        model.cache.truncate(judging.sequence, len(judging.committed) + num_accepted)
        # Published only now: finite logits show that the cached keys and values are finite too.
        model.cache.publish(judging.sequence, judging.committed)
    return outcomes


def _groups(scored: list[_Scored]) -> list[list[_Scored]]:
    """Groups blocks that can be verified together: of one rule, with all dense or all sparse distributions."""
    groups: dict[tuple[int, bool], list[_Scored]] = {}
    for one in scored:
        groups.setdefault((id(one.judging.rule), isinstance(one.draft, DenseRows)), []).append(one)
    return list(groups.values())


def _batch(members: list[_Scored], target_probs: Tensor) -> Decided:
    """Returns the members' blocks, as far as they are judged, as a batch; the target's rows are not copied."""
    blocks = BlockBatch.packed(
        target_probs,
        [one.draft for one in members],
        [one.judging.draft_tokens for one in members],
        [one.first_row for one in members],
    )
    lacks_next = [one.lacks_next for one in members]
    if any(lacks_next):
        blocks = blocks.cut(upload([one.num_judged for one in members], target_probs.device, torch.int64))
    return Decided([one.index for one in members], blocks, lacks_next)
