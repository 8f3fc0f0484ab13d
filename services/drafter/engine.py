"""Runs the drafting strategy. Everything here runs on the torch thread."""

import time

from draftwire.drafting.strategy import DraftingStrategy, DraftRequest, DraftSequence
from draftwire.randomness import DrawKey
from draftwire.rounds import DraftBlock, DraftTimings
from draftwire.services.drafter.scheduler import Step
from draftwire.services.leases import SessionKey


class DraftEngine:
    """A drafting strategy with one sequence per session."""

    def __init__(self, strategy: DraftingStrategy) -> None:
        """Takes a ready strategy."""
        self._strategy = strategy
        self._sequences: dict[SessionKey, DraftSequence] = {}

    def read_prompt(self, step: Step) -> None:
        """Starts a session's sequence with its prompt."""
        sequence = self._strategy.new_sequence()
        sequence.calibrate(0, step.session.spec.token_ids)
        self._sequences[step.session.key] = sequence

    def draft(self, step: Step) -> DraftBlock:
        """Brings a session's sequence to its committed tokens and drafts the block that the step asks for."""
        assert step.calibration is not None
        calibration, spec = step.calibration, step.session.spec
        sequence = self._sequences[step.session.key]
        started = time.perf_counter()
        sequence.calibrate(calibration.base_len, calibration.token_ids)
        calibrated = time.perf_counter()
        key = DrawKey(spec.drafting_key, spec.choice, calibration.fence.round, calibration.attempt)
        draft = sequence.draft(DraftRequest(calibration.num_draft_tokens, spec.sampling, key, spec.target_vocab_size))
        drafted = time.perf_counter()
        timings = DraftTimings(int((calibrated - started) * 1e6), int((drafted - calibrated) * 1e6))
        return DraftBlock(calibration.fence, draft.token_ids, draft.distributions, calibration.attempt, timings)

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence."""
        self._sequences.pop(key, None)
