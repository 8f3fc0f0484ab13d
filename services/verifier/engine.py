"""Runs the target. Everything here runs on the torch thread."""

import time

from draftwire.models.loading import LoadedModel
from draftwire.randomness import KEY_BYTES, DrawKey
from draftwire.sampling import SamplingParams
from draftwire.services.leases import SessionKey
from draftwire.services.verifier.scheduler import Step, StepResult
from draftwire.verification import rule_named
from draftwire.verification.target_sequence import TargetSequence


class TargetEngine:
    """The target model with one cached sequence per session."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Takes a loaded model."""
        self._loaded = loaded
        self._sequences: dict[SessionKey, TargetSequence] = {}

    def warm_up(self) -> None:
        """Decodes a token once, so that no user pays for lazy initialisation."""
        rule, key = rule_named("block"), DrawKey(bytes(KEY_BYTES), 0, 0)
        self._new_sequence().judge([0] * 4, [], None, SamplingParams(), rule, key)

    def step(self, step: Step) -> StepResult:
        """Judges a step's block, or decodes one token where there is none.

        Raises:
            InvalidRequestError: the block's distributions are none, or do not fit its tokens. Nothing has changed.
        """
        started = time.perf_counter()
        session, spec, block = step.session, step.session.spec, step.block
        sequence = self._sequences.get(session.key)
        if sequence is None:
            sequence = self._sequences[session.key] = self._new_sequence()
        judgement = sequence.judge(
            committed=session.committed.ids,
            draft_tokens=block.token_ids if block else [],
            distributions=block.distributions if block else None,
            sampling=spec.sampling,
            rule=rule_named(spec.rule),
            key=DrawKey(spec.verifying_key, spec.choice, session.round, block.attempt if block else 0),
        )
        verify_us = int((time.perf_counter() - started) * 1e6)
        return StepResult(judgement.token_ids, judgement.num_accepted, verify_us)

    def forget(self, key: SessionKey) -> None:
        """Frees a session's cache."""
        self._sequences.pop(key, None)

    def _new_sequence(self) -> TargetSequence:
        return TargetSequence(self._loaded.model, self._loaded.description.vocab_size)
