"""Speculative decoding in one process: the whole method on one page, for reading, measuring and experiments.

The services do the same, with the drafter and the target on different machines.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from draftwire.drafting.strategy import Drafting, DraftingStrategy, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.models.cached_model import SequenceModel
from draftwire.randomness import DrawKey, Role, derive_key
from draftwire.sampling import SamplingParams
from draftwire.verification import GreedyBlockRule, new_rule
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.target import Judgement, Judging, judge


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What to generate and how."""

    sampling: SamplingParams
    num_tokens: int
    block_length: int
    """Draft tokens per round."""
    rule: str
    """One that servers offer, or `greedy_block`, whose blocks are all of one length: its last round may be too long."""
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` keeps away; none ends the run."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    token_ids: list[int]
    """The tokens that it committed."""
    num_accepted: int
    """How many of them were drafted."""
    blocks: BlockBatch
    """What the rule saw: a batch of one."""


def speculate(
    target: SequenceModel, drafter: DraftingStrategy, prompt_ids: list[int], run: LocalRun
) -> Iterator[Round]:
    """Yields round after round until `run.num_tokens` tokens are committed.

    Args:
        target: the model whose law the tokens follow.
        drafter: guesses.
        prompt_ids: at least one token.
        run: what to generate.
    """
    rule = new_rule(run.rule)
    drafting_key, verifying_key = derive_key(run.seed, Role.DRAFTING), derive_key(run.seed, Role.VERIFYING)
    if rule.is_coupled:
        drafting_key = verifying_key = derive_key(run.seed, Role.COUPLING)
    committed, drafter_knows = list(prompt_ids), len(prompt_ids)
    with ExitStack() as cleanup:
        judged, drafted = target.cache.open(committed), drafter.open(committed)
        cleanup.callback(target.cache.close, judged)
        cleanup.callback(drafted.close)
        end, round_number = len(prompt_ids) + run.num_tokens, 0
        while len(committed) < end:
            block_length = run.block_length
            if not isinstance(rule, GreedyBlockRule):
                block_length = min(block_length, end - len(committed) - 1)
            tokens, distributions = [], None
            if block_length:
                drafted.calibrate(drafter_knows, committed[drafter_knows:])
                drafter_knows = len(committed)
                key = DrawKey(drafting_key, 0, round_number)
                request = DraftRequest(
                    block_length,
                    run.sampling,
                    key,
                    target.vocab_size,
                    is_coupled=rule.is_coupled,
                    needs_probs=rule.needs_draft_probs,
                    prompt_len=len(prompt_ids),
                    stop_token_ids=run.stop_token_ids,
                )
                (draft,) = drafter.step([Drafting(drafted, request)]).drafts
                if isinstance(draft, DraftwireError):
                    raise draft
                assert draft is not None, "a step without a limit drafts"
                tokens, distributions = draft.token_ids, draft.distributions
            key = DrawKey(verifying_key, 0, round_number)
            judging = Judging(
                judged,
                committed,
                tokens,
                distributions,
                run.sampling,
                rule,
                key,
                prompt_len=len(prompt_ids),
                stop_token_ids=run.stop_token_ids,
            )
            step = judge(target, [judging])
            (judgement,) = step.outcomes
            if isinstance(judgement, DraftwireError):
                raise judgement
            assert isinstance(judgement, Judgement), "a step without a limit decides"
            committed += judgement.token_ids
            round_number += 1
            yield Round(judgement.token_ids, judgement.num_accepted, step.decided[0].blocks)
