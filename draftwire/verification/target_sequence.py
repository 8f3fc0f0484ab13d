"""The target's side of one sequence: scores blocks in one forward pass and applies a rule. Runs on the torch thread."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.distributions import DraftDistributions
from draftwire.models.cached_model import CachedSequence
from draftwire.randomness import DrawKey
from draftwire.sampling import SamplingParams, probabilities
from draftwire.verification.rule import BlockBatch, VerificationRule, verify


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one block."""

    token_ids: list[int]
    """The accepted draft tokens, then the extra one."""
    num_accepted: int
    blocks: BlockBatch
    """What the rule saw: a batch of one."""


class TargetSequence:
    """The committed tokens of one session in the target's cache, all but the last."""

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        """Starts empty.

        Args:
            model: the target, in evaluation mode.
            vocab_size: rows of its output.
        """
        self._cached = CachedSequence(model)
        self._vocab_size = vocab_size

    def judge(
        self,
        committed: list[int],
        draft_tokens: list[int],
        distributions: DraftDistributions | None,
        sampling: SamplingParams,
        rule: VerificationRule,
        key: DrawKey,
    ) -> Judgement:
        """Scores a block after the committed tokens and decides which of its tokens to keep.

        Args:
            committed: all committed ids; those that the cache lacks are read in the same forward pass.
            draft_tokens: the block; empty is plain decoding.
            distributions: what its tokens were drawn from; None for an empty block.
            sampling: makes the target's distribution from its logits, at every position alike.
            rule: how to decide.
            key: names the random numbers to decide with.

        Raises:
            InvalidRequestError: the distributions are none, or do not fit the tokens. Nothing has changed.
        """
        draft_probs = self._draft_probs(draft_tokens, distributions)
        unread = committed[self._cached.length :]
        logits = self._cached.extend(unread + draft_tokens, keep=len(draft_tokens) + 1)
        blocks = BlockBatch(
            target_probs=probabilities(logits, sampling).cpu().unsqueeze(0),
            draft_probs=draft_probs.unsqueeze(0),
            draft_tokens=torch.tensor([draft_tokens], dtype=torch.int64),
            lengths=torch.tensor([len(draft_tokens)]),
        )
        outcome = verify(rule, blocks, key.uniforms(2).unsqueeze(0))
        num_accepted = int(outcome.num_accepted[0])
        self._cached.truncate(len(committed) + num_accepted)
        return Judgement([*draft_tokens[:num_accepted], int(outcome.extra_tokens[0])], num_accepted, blocks)

    def _draft_probs(self, draft_tokens: list[int], distributions: DraftDistributions | None) -> Tensor:
        if distributions is None:
            return torch.zeros(0, self._vocab_size)
        return distributions.rows(draft_tokens, self._vocab_size)
