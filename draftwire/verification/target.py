"""The target's side of a step: scores the blocks of many sequences in one forward pass, and applies their rules.

Runs on the torch thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.devices import upload
from draftwire.distributions import DenseRows, DraftRows, no_rows
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.models.cached_model import Reading, SequenceModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.randomness import DrawKey
from draftwire.sampling import SMALLEST, SamplingParams, Span, is_distribution, probabilities_of_spans
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import KeyedNoise, VerificationRule, verify

NEAR_TIE = 1e-4
"""Logits that are closer may be ordered otherwise by a forward pass of another shape: ten times what those differ by in
float32."""

NEAR_TIES = {torch.bfloat16: 0.25, torch.float16: 0.03}
"""The same for models of lower precision."""


@dataclass(frozen=True, slots=True)
class Judging:
    """One sequence's part in a step: reads what the cache lacks of the committed tokens and decides the next round."""

    sequence: CachedSequence
    committed: list[int]
    """All committed ids."""
    draft_tokens: list[int]
    """The block; empty is plain decoding."""
    draft: DraftRows | None
    """What its tokens were drawn from, a row for each; None for an empty block."""
    sampling: SamplingParams
    """Makes the target's distribution from its logits, at every position alike."""
    rule: VerificationRule
    key: DrawKey
    """Names the random numbers to decide with."""
    prompt_len: int = 0
    """How many of the committed ids are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` keeps away."""
    max_read: int | None = None
    """If the cache lacks more committed tokens than this, only so many are read and nothing is decided."""

    @property
    def span(self) -> Span:
        """The places before each draft token and after the last."""
        text = [*self.committed, *self.draft_tokens] if self.sampling.penalizes else ()
        text_len = len(self.committed) + len(self.draft_tokens)
        num_rows = len(self.draft_tokens) + 1
        return Span(self.sampling, num_rows, text, self.prompt_len, self.stop_token_ids, text_len)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one block."""

    token_ids: list[int]
    """The accepted draft tokens, then the extra one."""
    num_accepted: int
    num_near_ties: int = 0
    """Tokens that rounding could have changed, as far as the rule counts them."""


@dataclass(frozen=True, slots=True)
class StillReading:
    """The committed tokens were read in part."""


Outcome = Judgement | StillReading | DraftwireError
"""An error concerns one sequence alone, whose cache has not changed: UnavailableError if the model gave no finite
logits for it."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What a rule saw of a step."""

    members: list[int]
    """Which of the step's judgings."""
    blocks: BlockBatch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step decided."""

    outcomes: list[Outcome]
    """One for each judging."""
    decided: list[Decided]
    """A batch for each rule in the step, and one more where it had both dense and sparse draft distributions."""
    num_tokens: int = 0
    """Tokens that the forward pass read."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A block with the target's distributions."""

    index: int
    judging: Judging
    draft: DraftRows
    first_row: int
    """Of the `draft_len + 1` rows over the vocabulary that are its own."""


@torch.inference_mode()
def judge(model: SequenceModel, judgings: Sequence[Judging]) -> StepOutcome:
    """Scores blocks after their committed tokens and decides which of their tokens to keep.

    Probabilities stay on the model's device, where the rules are computed; only decisions leave it.
    """
    outcomes: dict[int, Outcome] = {}
    readings: list[Reading] = []
    scored: list[_Scored] = []
    num_rows = 0
    for index, judging in enumerate(judgings):
        unread = judging.committed[judging.sequence.length :]
        if judging.max_read is not None and len(unread) > judging.max_read:
            outcomes[index] = StillReading()
            readings.append(Reading(judging.sequence, unread[: judging.max_read], 0))
            continue
        scored.append(_Scored(index, judging, judging.draft or no_rows(model.vocab_size), num_rows))
        num_rows += len(judging.draft_tokens) + 1
        readings.append(Reading(judging.sequence, unread + judging.draft_tokens, len(judging.draft_tokens) + 1))
    if not judgings:
        return StepOutcome([], [])
    lengths = [judging.sequence.length for judging in judgings]
    logits = model.read(readings)
    batches: list[Decided] = []
    if scored:
        near_tie = NEAR_TIES.get(logits.dtype, NEAR_TIE)
        target_probs = probabilities_of_spans(logits, [one.judging.span for one in scored])
        is_good = is_distribution(target_probs).tolist()
        for one in scored:
            if not all(is_good[one.first_row : one.first_row + len(one.judging.draft_tokens) + 1]):
                outcomes[one.index] = UnavailableError("the target gave no finite logits")
                model.cache.truncate(one.judging.sequence, lengths[one.index])
        for members in _groups([one for one in scored if one.index not in outcomes]):
            blocks = _batch(members, target_probs)
            batches.append(Decided([one.index for one in members], blocks))
            outcomes.update(_decide(model, members, blocks, near_tie))
    num_tokens = sum(len(reading.token_ids) for reading in readings)
    return StepOutcome([outcomes[index] for index in range(len(judgings))], batches, num_tokens)


def _decide(model: SequenceModel, members: list[_Scored], blocks: BlockBatch, bound: float) -> dict[int, Outcome]:
    """Applies the members' rule and makes their sequences end with what it kept; `bound` is that of a near-tie."""
    judgings = [one.judging for one in members]
    positions = [len(judging.committed) for judging in judgings]
    noise = KeyedNoise([judging.key for judging in judgings], positions, blocks.target_probs.device)
    verified = verify(judgings[0].rule, blocks, noise)
    bounds = [[bound / max(judging.sampling.temperature, SMALLEST)] for judging in judgings]
    near_ties = verified.num_near_ties(upload(bounds, blocks.target_probs.device, torch.float32))
    decisions = torch.stack([verified.num_accepted, verified.extra_tokens, near_ties]).tolist()  # one transfer
    outcomes: dict[int, Outcome] = {}
    for one, num_accepted, extra, num_near_ties in zip(members, *decisions, strict=True):
        judging = one.judging
        token_ids = [*judging.draft_tokens[:num_accepted], extra]
        outcomes[one.index] = Judgement(token_ids, num_accepted, num_near_ties)
        model.cache.truncate(judging.sequence, len(judging.committed) + num_accepted)
        # Only now: logits that are finite show that nothing in the cache is not.
        model.cache.publish(judging.sequence, judging.committed)
    return outcomes


def _groups(scored: list[_Scored]) -> list[list[_Scored]]:
    """Returns what can be verified together: blocks of one rule whose distributions are all dense or all sparse."""
    groups: dict[tuple[int, bool], list[_Scored]] = {}
    for one in scored:
        groups.setdefault((id(one.judging.rule), isinstance(one.draft, DenseRows)), []).append(one)
    return list(groups.values())


def _batch(members: list[_Scored], target_probs: Tensor) -> BlockBatch:
    """Returns the members' blocks; copies no row of the target's."""
    return BlockBatch.packed(
        target_probs,
        [one.draft for one in members],
        [one.judging.draft_tokens for one in members],
        [one.first_row for one in members],
    )
