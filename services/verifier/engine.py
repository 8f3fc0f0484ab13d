"""Runs the target. Everything here runs on the torch thread."""

import time

import torch
from torch import Tensor

from draftwire.models.cached_model import CachedSequence
from draftwire.models.loading import LoadedModel
from draftwire.randomness import DrawKey
from draftwire.rounds import DraftBlock
from draftwire.sampling import probabilities
from draftwire.services.verifier.scheduler import SessionKey, Step, StepResult
from draftwire.verification import BlockBatch, rule_named, verify


class TargetEngine:
    """The target model with one cached sequence per session."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Takes a loaded model."""
        self._model = loaded.model
        self._vocab_size = loaded.description.vocab_size
        self._sequences: dict[SessionKey, CachedSequence] = {}

    def warm_up(self) -> None:
        """Runs the shapes of a first request once, so that no user pays for lazy initialisation."""
        sequence = CachedSequence(self._model)
        sequence.extend([0] * 4)
        sequence.extend([0] * 5, keep=5)

    def step(self, step: Step) -> StepResult:
        """Scores a step's block (or none) in one forward pass and applies the session's rule.

        The cache then holds the committed tokens up to the accepted ones; the extra token is read by the next step.

        Raises:
            InvalidRequestError: the block's distributions are none, or do not fit its tokens. Nothing has changed.
        """
        started = time.perf_counter()
        session, spec = step.session, step.session.spec
        draft_tokens = step.block.token_ids if step.block else []
        draft_probs = self._draft_probs(step.block)
        sequence = self._sequences.setdefault(session.key, CachedSequence(self._model))
        unread = session.committed.ids[sequence.length :]
        logits = sequence.extend(unread + draft_tokens, keep=len(draft_tokens) + 1)
        blocks = BlockBatch(
            target_probs=probabilities(logits, spec.sampling).cpu().unsqueeze(0),
            draft_probs=draft_probs.unsqueeze(0),
            draft_tokens=torch.tensor([draft_tokens], dtype=torch.int64),
            lengths=torch.tensor([len(draft_tokens)]),
        )
        attempt = step.block.attempt if step.block else 0
        key = DrawKey(spec.verifying_key, spec.choice, session.round, attempt)
        outcome = verify(rule_named(spec.rule), blocks, key.uniforms(2).unsqueeze(0))
        num_accepted = int(outcome.num_accepted[0])
        sequence.truncate(len(session.committed) + num_accepted)
        token_ids = [*draft_tokens[:num_accepted], int(outcome.extra_tokens[0])]
        return StepResult(token_ids, num_accepted, int((time.perf_counter() - started) * 1e6))

    def forget(self, key: SessionKey) -> None:
        """Frees a session's cache."""
        self._sequences.pop(key, None)

    def _draft_probs(self, block: DraftBlock | None) -> Tensor:
        if block is None:
            return torch.zeros(0, self._vocab_size)
        return block.distributions.rows(block.token_ids, self._vocab_size)
