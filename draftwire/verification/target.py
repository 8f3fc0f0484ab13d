"""The target's side of a step: scores the blocks of many sequences in one forward pass, and applies their rules.

Runs on the torch thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftwire.distributions import DraftDistributions
from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError
from draftwire.models.cached_model import Reading, SequenceModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.randomness import DrawKey
from draftwire.sampling import SamplingParams, probabilities_by_row
from draftwire.verification.rule import BlockBatch, VerificationRule, verify


@dataclass(frozen=True, slots=True)
class Judging:
    """One sequence's part in a step: reads what the cache lacks of the committed tokens and decides the next round."""

    sequence: CachedSequence
    committed: list[int]
    """All committed ids."""
    draft_tokens: list[int]
    """The block; empty is plain decoding."""
    distributions: DraftDistributions | None
    """What its tokens were drawn from; None for an empty block."""
    sampling: SamplingParams
    """Makes the target's distribution from its logits, at every position alike."""
    rule: VerificationRule
    key: DrawKey
    """Names the random numbers to decide with."""
    max_read: int | None = None
    """If the cache lacks more committed tokens than this, only so many are read and nothing is decided."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one block."""

    token_ids: list[int]
    """The accepted draft tokens, then the extra one."""
    num_accepted: int


@dataclass(frozen=True, slots=True)
class StillReading:
    """The committed tokens were read in part."""


Outcome = Judgement | StillReading | DraftwireError
"""An error concerns one sequence alone, whose cache has not changed: InvalidRequestError if its block is no good,
UnavailableError if the model gave no finite logits for it."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step decided."""

    outcomes: list[Outcome]
    """One for each judging."""
    blocks: list[BlockBatch]
    """What the rules saw, a batch for each rule in the step."""
    num_tokens: int = 0
    """Tokens that the forward pass read."""


def judge(model: SequenceModel, judgings: Sequence[Judging]) -> StepOutcome:
    """Scores blocks after their committed tokens and decides which of their tokens to keep."""
    outcomes: dict[int, Outcome] = {}
    readings: list[Reading] = []
    decided: list[int] = []  # which judgings get a decision
    draft_probs: dict[int, Tensor] = {}
    for index, judging in enumerate(judgings):
        unread = judging.committed[judging.sequence.length :]
        if judging.max_read is not None and len(unread) > judging.max_read:
            outcomes[index] = StillReading()
            readings.append(Reading(judging.sequence, unread[: judging.max_read], 0))
            continue
        try:
            draft_probs[index] = _draft_probs(judging, model.vocab_size)
        except InvalidRequestError as error:
            outcomes[index] = error
            continue
        decided.append(index)
        readings.append(Reading(judging.sequence, unread + judging.draft_tokens, len(judging.draft_tokens) + 1))
    if not readings:
        return StepOutcome([outcomes[index] for index in range(len(judgings))], [])
    lengths = [judging.sequence.length for judging in judgings]
    logits = model.read(readings)

    counts = [len(judgings[index].draft_tokens) + 1 for index in decided]
    rows = dict(zip(decided, logits.split(counts) if decided else (), strict=True))
    finite = torch.isfinite(logits.amax(dim=-1)).split(counts) if decided else ()
    for index, is_finite in zip(decided, finite, strict=True):
        if not bool(is_finite.all()):
            outcomes[index] = UnavailableError("the target gave no finite logits")
            model.cache.truncate(judgings[index].sequence, lengths[index])
    batches: list[BlockBatch] = []
    members_of: dict[str, list[int]] = {}
    for index in decided:
        if index not in outcomes:
            members_of.setdefault(judgings[index].rule.name, []).append(index)
    for members in members_of.values():
        blocks = _batch([judgings[i] for i in members], [rows[i] for i in members], [draft_probs[i] for i in members])
        batches.append(blocks)
        uniforms = torch.stack([judgings[index].key.uniforms(2) for index in members])
        verified = verify(judgings[members[0]].rule, blocks, uniforms)
        accepted_counts, extras = verified.num_accepted.tolist(), verified.extra_tokens.tolist()
        for index, num_accepted, extra in zip(members, accepted_counts, extras, strict=True):
            judging = judgings[index]
            outcomes[index] = Judgement([*judging.draft_tokens[:num_accepted], extra], num_accepted)
            model.cache.truncate(judging.sequence, len(judging.committed) + num_accepted)
            # Only now: logits that are finite show that nothing in the cache is not.
            model.cache.publish(judging.sequence, judging.committed)
    num_tokens = sum(len(reading.token_ids) for reading in readings)
    return StepOutcome([outcomes[index] for index in range(len(judgings))], batches, num_tokens)


def _draft_probs(judging: Judging, vocab_size: int) -> Tensor:
    if judging.distributions is None:
        return torch.zeros(0, vocab_size)
    return judging.distributions.rows(judging.draft_tokens, vocab_size)


def _batch(judgings: list[Judging], logits: list[Tensor], draft_probs: list[Tensor]) -> BlockBatch:
    """Pads blocks to the longest.

    Args:
        judgings: whose blocks.
        logits: `[draft_len + 1, vocab]` each.
        draft_probs: `[draft_len, vocab]` each.
    """
    params = [judging.sampling for judging, rows in zip(judgings, logits, strict=True) for _ in rows]
    target_probs = probabilities_by_row(torch.cat(logits), params).cpu().split([len(rows) for rows in logits])
    tokens = [torch.tensor(judging.draft_tokens, dtype=torch.int64) for judging in judgings]
    return BlockBatch(
        target_probs=pad_sequence(target_probs, batch_first=True),
        draft_probs=pad_sequence(draft_probs, batch_first=True),
        draft_tokens=pad_sequence(tokens, batch_first=True),
        lengths=torch.tensor([len(judging.draft_tokens) for judging in judgings]),
    )
