"""Speculative decoding in one process: the whole method on one page, for reading, benchmarks and experiments.

The services run the same method with the drafter and the target on different machines.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 3.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from draftwire.drafting.strategy import Drafting, DraftingStrategy, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.method.distributions import rows_of
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.sampling import TokenEdits
from draftwire.models.sequence_model import SequenceModel
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import SessionParameters
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.deciding import Judgement
from draftwire.verification.rule import facts_of
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
    """The name of a built-in rule, or the import path of another; see `load_rule`."""
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that `SamplingParams.min_tokens` masks; they do not end the run."""
    cuts_last_block: bool = True
    """Whether the last block is no longer than what is left to commit. A rule that remembers what it decided needs
    blocks of one length; then the last round may be too long."""


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
    target: SequenceModel, drafter: DraftingStrategy, prompt_ids: list[int], run: LocalRun
) -> Iterator[LoopRound]:
    """Yields round after round until `run.num_tokens` tokens are committed.

    Args:
        target: the model whose law the tokens follow.
        drafter: proposes the draft tokens. A round in which it drafts nothing is plain decoding.
        prompt_ids: at least one token.
        run: the settings.
    """
    rule = load_rule(run.rule)
    roles = (Role.COUPLING, Role.COUPLING) if rule.is_coupled else (Role.DRAFTING, Role.VERIFYING)
    drafting_key, verifying_key = (derive_key(run.seed, role) for role in roles)
    committed, num_prompt = list(prompt_ids), len(prompt_ids)
    parameters = SessionParameters(num_prompt, run.sampling, facts_of(rule), run.block_length, run.stop_token_ids)
    with ExitStack() as cleanup:
        judged = target.cache.open(committed)
        cleanup.callback(target.cache.close, judged)
        drafted, num_known = drafter.open(committed, parameters), len(committed)
        cleanup.callback(drafted.close)
        judging = Judging(
            sequence=judged,
            draft_tokens=[],
            draft=None,
            sampling=run.sampling,
            rule=rule,
            key=DrawKey(verifying_key, 0, 0),
            num_committed=num_prompt,
            committed=committed,
            prompt_len=num_prompt,
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
            prompt_len=num_prompt,
            stop_token_ids=run.stop_token_ids,
        )
        end = num_prompt + run.num_tokens
        for number in count():
            if len(committed) >= end:
                return
            key, num_committed = DrawKey(verifying_key, 0, number), len(committed)
            judging = replace(judging, draft_tokens=[], draft=None, key=key, num_committed=num_committed)
            left = end - len(committed) - 1
            block_length = min(run.block_length, left) if run.cuts_last_block else run.block_length
            started = time.perf_counter()
            if block_length:
                drafted.calibrate(num_known, committed[num_known:])
                num_known = len(committed)
                wanted = replace(request, num_tokens=block_length, key=DrawKey(drafting_key, 0, number))
                draft = _checked(drafter.step([Drafting(drafted, wanted)]).drafts[0])
                if draft is not None:
                    decoded = decode_one(Claim(draft.token_ids, draft.distributions), target.vocab_size)
                    judging = replace(judging, draft_tokens=draft.token_ids, draft=rows_of(decoded))
            draft_s = time.perf_counter() - started
            step = judge(target, [judging])
            judgement = _checked(step.outcomes[0])
            assert isinstance(judgement, Judgement), "a step without a limit decides"
            committed += judgement.token_ids
            yield LoopRound(judgement.token_ids, judgement.num_accepted, step.decided[0].blocks, draft_s)


def _checked(outcome: Result | DraftwireError) -> Result:
    if isinstance(outcome, DraftwireError):
        raise outcome
    return outcome
