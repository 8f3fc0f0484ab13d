"""Speculative decoding in one process: the whole method on one page, for reading, benchmarks and experiments.

The services run the same method with the drafter and the target on different machines.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from draftwire.drafting.heads.head_drafter import HeadDrafter, HeadDrafting
from draftwire.drafting.strategy import Draft, Drafting, DraftingStrategy, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.method.distributions import rows_of
from draftwire.method.draw_key import DrawKey
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import Role, derive_key
from draftwire.method.sampling import TokenEdits
from draftwire.models.cached_model import SequenceModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.deciding import Judgement
from draftwire.verification.rule import is_stateful
from draftwire.verification.rule_loading import load_rule
from draftwire.verification.target import Judging, judge

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Settings of one run."""

    sampling: SamplingParams
    num_tokens: int
    block_length: int
    """Draft tokens per round."""
    rule: str
    """The name of a built-in rule, or the import path of another; see `load_rule`. Blocks of a rule that remembers are
    all of one length: its last round may be too long."""
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` masks; they do not end the run."""


@dataclass(frozen=True, slots=True)
class LoopRound:
    """Result of one round."""

    token_ids: list[int]
    """The tokens that the round committed."""
    num_accepted: int
    """How many of them are draft tokens."""
    blocks: BlockBatch
    """The rule's input: a batch of one."""
    draft_s: float
    """How long drafting took, what the drafter had to read for it included, seconds."""


def speculate(
    target: SequenceModel, drafter: DraftingStrategy | HeadDrafter[CachedSequence], prompt_ids: list[int], run: LocalRun
) -> Iterator[LoopRound]:
    """Yields round after round until `run.num_tokens` tokens are committed.

    Args:
        target: the model whose law the tokens follow.
        drafter: proposes the draft tokens; a head reads the features that the target keeps, and drafts as of the second
            round.
        prompt_ids: at least one token.
        run: the settings.
    """
    rule = load_rule(run.rule)
    roles = (Role.COUPLING, Role.COUPLING) if rule.is_coupled else (Role.DRAFTING, Role.VERIFYING)
    drafting_key, verifying_key = (derive_key(run.seed, role) for role in roles)
    committed = list(prompt_ids)
    with ExitStack() as cleanup:
        judged = target.cache.open(committed)
        cleanup.callback(target.cache.close, judged)
        is_head = isinstance(drafter, HeadDrafter)
        drafted = (
            _drafts_of_head(drafter, judged, committed, cleanup)
            if isinstance(drafter, HeadDrafter)
            else _drafts_of_strategy(drafter, committed, cleanup)
        )
        judging = Judging(
            sequence=judged,
            committed=committed,
            draft_tokens=[],
            draft=None,
            sampling=run.sampling,
            rule=rule,
            key=DrawKey(verifying_key, 0, 0),
            prompt_len=len(prompt_ids),
            stop_token_ids=run.stop_token_ids,
            edits=TokenEdits(run.sampling, run.stop_token_ids),
        )
        request = DraftRequest(
            num_tokens=run.block_length,
            sampling=run.sampling,
            key=DrawKey(drafting_key, 0, 0),
            vocab_size=target.vocab_size,
            is_coupled=rule.is_coupled,
            needs_probs=rule.needs_draft_probs,
            prompt_len=len(prompt_ids),
            stop_token_ids=run.stop_token_ids,
        )
        end = len(prompt_ids) + run.num_tokens
        for number in count():
            if len(committed) >= end:
                return
            judging = replace(judging, draft_tokens=[], draft=None, key=DrawKey(verifying_key, 0, number))
            left = end - len(committed) - 1
            block_length = run.block_length if is_stateful(rule) else min(run.block_length, left)
            started = time.perf_counter()
            if block_length and not (is_head and number == 0):
                draft = drafted(replace(request, num_tokens=block_length, key=DrawKey(drafting_key, 0, number)))
                decoded = decode_one(Claim(draft.token_ids, draft.distributions), target.vocab_size)
                judging = replace(judging, draft_tokens=draft.token_ids, draft=rows_of(decoded))
            draft_s = time.perf_counter() - started
            step = judge(target, [judging])
            judgement = _checked(step.outcomes[0])
            assert isinstance(judgement, Judgement), "a step without a limit decides"
            committed += judgement.token_ids
            yield LoopRound(judgement.token_ids, judgement.num_accepted, step.decided[0].blocks, draft_s)


def _drafts_of_strategy(
    drafter: DraftingStrategy, committed: list[int], cleanup: ExitStack
) -> Callable[[DraftRequest], Draft]:
    """Returns what drafts after the tokens that are in `committed` when it is called."""
    sequence, num_known = drafter.open(committed), len(committed)
    cleanup.callback(sequence.close)

    def draft(request: DraftRequest) -> Draft:
        nonlocal num_known
        sequence.calibrate(num_known, committed[num_known:])
        num_known = len(committed)
        found = _checked(drafter.step([Drafting(sequence, request)]).drafts[0])
        assert isinstance(found, Draft), "a step without a limit drafts"
        return found

    return draft


def _drafts_of_head(
    drafter: HeadDrafter[CachedSequence], judged: CachedSequence, committed: list[int], cleanup: ExitStack
) -> Callable[[DraftRequest], Draft]:
    """Returns what `_drafts_of_strategy` does; the target has read all that is committed but the last token."""
    sequence = drafter.open()
    cleanup.callback(drafter.close, sequence)

    def draft(request: DraftRequest) -> Draft:
        while True:  # until all that is committed is read
            found = _checked(drafter.draft([HeadDrafting(sequence, judged, committed, request)])[0])
            if found is not None:
                return found

    return draft


def _checked(outcome: Result | DraftwireError) -> Result:
    if isinstance(outcome, DraftwireError):
        raise outcome
    return outcome
