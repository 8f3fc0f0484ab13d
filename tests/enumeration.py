"""Exact laws by enumeration in float64: of one block, and of texts that are decoded in rounds of `judge`."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from draftwire.checking.toy_models import Pair
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.models.sequence_model import SequenceModel
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import BlockBatch, LawRule
from draftwire.verification.blocks import cut_impossible
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import judge
from tests.judged import judging_of

Law = dict[tuple[int, ...], float]

FAILED = -1
"""In the place of a token: the text ends there because the target has no distribution."""


def single_block(target: Tensor, draft: Tensor, tokens: list[int] | tuple[int, ...]) -> BlockBatch:
    """Returns a batch of one block."""
    drawn = torch.tensor([tokens], dtype=torch.int64).reshape(1, len(tokens))
    return BlockBatch.padded(target.unsqueeze(0), draft.unsqueeze(0), drawn, torch.tensor([len(tokens)]))


def outcome_law(rule: LawRule, target: Tensor, draft: Tensor, tokens: list[int] | tuple[int, ...]) -> Tensor:
    """Returns the probability of accepting i tokens and then emitting y, `[len(tokens) + 1, vocab]`, for this block."""
    blocks = cut_impossible(single_block(target, draft, tokens))
    law = rule.stop_law(blocks)
    result = torch.zeros(len(tokens) + 1, target.shape[1], dtype=torch.float64)
    for accepted in range(int(blocks.lengths[0]) + 1):
        weights = rule.extra_weights(blocks, law, torch.tensor([accepted]))[0]
        result[accepted] = law.accepted_probs[0, accepted] * weights / weights.sum()
    return result


def law_of_target(pair: Pair, length: int) -> Law:
    """Returns the law of texts of so many tokens that the target of a pair of tables draws."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): mass * float(pair.target[text[-1] if text else pair.vocab_size, token])
            for text, mass in law.items()
            for token in range(pair.vocab_size)
        }
    return law


def law_of_judged_rounds(
    model: SequenceModel,
    rule: LawRule,
    params: SamplingParams,
    block_length: int,
    prompt: list[int],
    draft_rows: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    ended: Callable[[tuple[int, ...]], tuple[tuple[int, ...], bool]],
    **options: object,
) -> Law:
    """Returns the law of texts that are decoded in rounds of `judge`, every block of which is tried. A text that cannot
    go on ends with `FAILED`.

    Args:
        model: the target.
        rule: that judges.
        params: of the text.
        block_length: of every round.
        prompt: before the text.
        draft_rows: what the drafter draws from, after a text, at the places of a block.
        ended: cuts a text that was emitted, and says whether it is finished.
        options: further fields of `Judging`.

    Raises:
        DraftwireError: a text failed for another reason than that it has no distribution.
    """
    finished: Law = defaultdict(float)
    growing: Law = {(): 1.0}
    while growing:
        following: Law = defaultdict(float)
        tries, judgings = [], []
        for text, tokens in product(growing, product(range(model.vocab_size), repeat=block_length)):
            rows, committed = draft_rows(text, tokens), [*prompt, *text]
            drawn = growing[text] * float(rows.double().gather(1, torch.tensor([tokens], dtype=torch.int64).T).prod())
            if drawn > 0.0:
                tries.append((text, tokens, drawn))
                place = model.cache.open(committed), committed, list(tokens), DenseRows(rows)
                given = {"prompt_len": len(prompt)} | options
                judgings.append(judging_of(*place, params, rule, DrawKey(bytes(16), 0, 0), **given))  # type: ignore[arg-type]
        step = judge(model, judgings)
        for judging in judgings:
            model.cache.close(judging.sequence)
        for (text, _, drawn), outcome in zip(tries, step.outcomes, strict=True):
            if isinstance(outcome, UnavailableError):
                finished[(*text, FAILED)] += drawn
            elif isinstance(outcome, DraftwireError):
                raise outcome
        if not step.decided:
            break
        (decided,) = step.decided
        assert len(decided.members) == sum(isinstance(outcome, Judgement) for outcome in step.outcomes)
        lengths = decided.blocks.lengths.tolist()
        law = rule.stop_law(decided.blocks)
        for accepted in range(block_length + 1):
            stop = decided.blocks.lengths.clamp(max=accepted)
            weights = rule.extra_weights(decided.blocks, law, stop)
            total = weights.sum(dim=1, keepdim=True)
            probs = law.accepted_probs.gather(1, stop[:, None])
            outcomes = (probs * weights / torch.where(total > 0.0, total, 1.0)).tolist()
            for member, length, lacks_next, row in zip(
                decided.members, lengths, decided.lacks_next, outcomes, strict=True
            ):
                text, tokens, drawn = tries[member]
                if accepted > length:
                    continue
                if accepted == length and lacks_next:  # nothing follows; `judge` is held to it by tests of its own
                    emitted, is_over = ended((*text, *tokens[:accepted]))
                    (finished if is_over else following)[emitted] += drawn * sum(row)
                    continue
                for extra, prob in enumerate(row):
                    if prob > 0.0:
                        emitted, is_over = ended((*text, *tokens[:accepted], extra))
                        (finished if is_over else following)[emitted] += drawn * prob
        growing = following
    return finished


def largest_deviation(law: Law, expected: Law) -> float:
    """Returns the largest difference of two laws in one outcome."""
    return max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in law.keys() | expected.keys())
