"""Speculative decoding in one process: the whole method on one page, for reading, measuring and experiments.

The services do the same, with the drafter and the target on different machines.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from draftwire.drafting.strategy import DraftingStrategy, DraftRequest
from draftwire.randomness import DrawKey, Role, derive_key
from draftwire.sampling import SamplingParams
from draftwire.verification import rule_named
from draftwire.verification.target_sequence import Judgement, TargetSequence


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What to generate and how."""

    sampling: SamplingParams
    num_tokens: int
    block_length: int
    """Draft tokens per round."""
    rule: str
    seed: int


def speculate(
    target: PreTrainedModel, vocab_size: int, drafter: DraftingStrategy, prompt_ids: list[int], run: LocalRun
) -> Iterator[Judgement]:
    """Yields round after round until `run.num_tokens` tokens are committed.

    Args:
        target: the model whose law the tokens follow.
        vocab_size: rows of its output.
        drafter: guesses.
        prompt_ids: at least one token.
        run: what to generate.
    """
    rule = rule_named(run.rule)
    drafting_key, verifying_key = derive_key(run.seed, Role.DRAFTING), derive_key(run.seed, Role.VERIFYING)
    judged, drafted = TargetSequence(target, vocab_size), drafter.new_sequence()
    committed, drafter_knows = list(prompt_ids), 0
    end, round_number = len(prompt_ids) + run.num_tokens, 0
    while len(committed) < end:
        block_length = min(run.block_length, end - len(committed) - 1)
        tokens, distributions = [], None
        if block_length:
            drafted.calibrate(drafter_knows, committed[drafter_knows:])
            drafter_knows = len(committed)
            key = DrawKey(drafting_key, 0, round_number)
            draft = drafted.draft(DraftRequest(block_length, run.sampling, key, vocab_size))
            tokens, distributions = draft.token_ids, draft.distributions
        key = DrawKey(verifying_key, 0, round_number)
        judgement = judged.judge(committed, tokens, distributions, run.sampling, rule, key)
        committed += judgement.token_ids
        round_number += 1
        yield judgement
