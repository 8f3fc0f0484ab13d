"""The engine of the drafter: runs the drafting strategy, on the torch thread."""

import time

from draftwire.drafting.strategy import Draft, Drafting, DraftingStrategy, DraftRequest, DraftSequence
from draftwire.engine.leases import SessionKey
from draftwire.engine.step_engine import StepEngine
from draftwire.errors import DraftwireError
from draftwire.method.draw_key import DrawKey
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import DraftBlock, DraftTimings
from draftwire.requests.parameters import SamplingParams
from draftwire_drafter.scheduler import DraftOutcome, Step, StepItem, StepResult


class DraftEngine(StepEngine[Step, StepResult]):
    """A drafting strategy with one sequence per session."""

    def __init__(self, strategy: DraftingStrategy) -> None:
        """Starts without sessions; `strategy` is loaded."""
        self.strategy = strategy
        self._sequences: dict[SessionKey, DraftSequence] = {}

    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        request = DraftRequest(2, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), vocab_size=2**31)
        sequence = self.strategy.open([0] * min(num_tokens, self.strategy.context_length - 2))
        done = self.strategy.step([Drafting(sequence, request)])
        sequence.close()
        return done.num_read, done.calibration_s

    def step(self, step: Step) -> StepResult:
        """Runs a step: prefill, calibration to the committed tokens, drafting of blocks."""
        started = time.perf_counter()
        draftings = [self._drafting(item) for item in step.items]
        prepared_s = time.perf_counter() - started
        done = self.strategy.step(draftings)
        timings = DraftTimings(int((prepared_s + done.calibration_s) * 1e6), int(done.draft_s * 1e6))
        return StepResult(
            outcomes=[_outcome(item, draft, timings) for item, draft in zip(step.items, done.drafts, strict=True)],
            num_unread=[drafting.sequence.num_unread for drafting in draftings],
            num_reused=[drafting.sequence.num_reused for drafting in draftings],
            num_read=done.num_read,
            calibration_s=done.calibration_s,
            draft_s=done.draft_s,
            num_passes=done.num_passes,
        )

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.close()

    def _drafting(self, item: StepItem) -> Drafting:
        session, calibration, parameters = item.session, item.calibration, item.session.spec.parameters
        sequence = self._sequences.get(session.key)
        if sequence is None:
            sequence = self.strategy.open(
                session.spec.token_ids, parameters.cache_salt, shares_text=parameters.shares_text
            )
            self._sequences[session.key] = sequence
        if item.token_ids or calibration is not None:
            sequence.calibrate(item.base_len, item.token_ids)
        if calibration is None:
            return Drafting(sequence, None, item.max_read)
        spec = session.spec
        key = DrawKey(spec.drafting_key, parameters.choice, calibration.fence.round, calibration.attempt)
        request = DraftRequest(
            calibration.num_draft_tokens,
            parameters.sampling,
            key,
            spec.target_vocab_size,
            is_coupled=parameters.rule.is_coupled,
            needs_probs=parameters.rule.needs_draft_probs,
            prompt_len=parameters.prompt_len,
            stop_token_ids=parameters.stop_token_ids,
            automaton=session.automaton,
            is_cut=lambda: session.cut_at == (calibration.fence.round, calibration.attempt),
        )
        return Drafting(sequence, request, item.max_read)


def _outcome(item: StepItem, draft: Draft | DraftwireError | None, timings: DraftTimings) -> DraftOutcome:
    if item.calibration is None or not isinstance(draft, Draft):
        return draft if isinstance(draft, DraftwireError) else None
    fence, attempt = item.calibration.fence, item.calibration.attempt
    return DraftBlock(fence, draft.token_ids, draft.distributions, attempt, timings)
