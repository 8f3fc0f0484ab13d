"""The engine of the drafter: runs the drafting strategy, on the torch thread."""

import time
from collections.abc import Sequence
from dataclasses import replace

from draftwire.drafting.strategy import Draft, Drafting, DraftingStrategy, DraftRequest, DraftSequence
from draftwire.engine.draft_session import DraftOption, DraftOutcome, Step, StepItem, StepResult
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.engine.step_engine import StepEngine
from draftwire.errors import DraftwireError
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.rounds import DraftBlock, DraftTimings
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE

KEY = DrawKey(bytes(KEY_BYTES), 0, 0)
"""Key of what is drafted for nobody."""


class DraftEngine(StepEngine[Step, StepResult]):
    """A drafting strategy with one sequence per session."""

    def __init__(self, strategy: DraftingStrategy, options: Sequence[DraftOption] = ()) -> None:
        """Starts without sessions; `strategy` is loaded."""
        self.strategy = strategy
        self.options = options
        self.sequences: dict[SessionKey, DraftSequence] = {}

    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        request = DraftRequest(2, SamplingParams(), KEY, vocab_size=2**31)
        sequence = self.strategy.open([0] * min(num_tokens, self.strategy.context_length - 2), ALONE)
        for option in self.options:
            option.rehearse(sequence)
        done = self.strategy.step([Drafting(sequence, request)])
        sequence.close()
        return done.num_read, done.calibration_s

    def run_largest(self, num_sessions: int, num_draft_tokens: int) -> None:
        """Runs a step as large as any: a block for every session, beside a prompt."""
        context_length, open_one = self.strategy.context_length, self.strategy.open
        sampling = SamplingParams(temperature=1.0, top_p=0.95)
        request = DraftRequest(min(num_draft_tokens, context_length - 1), sampling, KEY, vocab_size=2**31)
        for option in self.options:
            request = option.largest(request)
        draftings = [Drafting(open_one([0], ALONE), request) for _ in range(num_sessions)]
        prompt = open_one([0] * min(LARGEST_CHUNK, context_length), ALONE)
        draftings.append(Drafting(prompt, None, LARGEST_CHUNK))
        self.strategy.step(draftings)
        for drafting in draftings:
            drafting.sequence.close()

    def step(self, step: Step) -> StepResult:
        """Runs a step: prefill, calibration to the committed tokens, drafting of blocks."""
        if step.spare is not None:
            return step.spare.run()
        started = time.perf_counter()
        draftings = [self._drafting(item) for item in step.items]
        prepared_s = time.perf_counter() - started
        done = self.strategy.step(draftings)
        num_drafted = sum(item.calibration is not None for item in step.items)
        timings = DraftTimings(int((prepared_s + done.calibration_s) * 1e6), int(done.draft_s * 1e6), num_drafted)
        return StepResult(
            outcomes=[_outcome(item, draft, timings) for item, draft in zip(step.items, done.drafts, strict=True)],
            num_unread=[drafting.sequence.num_unread for drafting in draftings],
            num_reused=[drafting.sequence.num_reused for drafting in draftings],
            num_read=done.num_read,
            calibration_s=done.calibration_s,
            draft_s=done.draft_s,
            num_passes=done.num_passes,
            guesses={index: draft.guesses for index, draft in enumerate(done.drafts) if isinstance(draft, Draft)},
        )

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence."""
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            sequence.close()

    def _drafting(self, item: StepItem) -> Drafting:
        session, calibration = item.session, item.calibration
        sequence = self.sequences.get(session.key)
        if sequence is None:
            sequence = self.strategy.open(session.spec.token_ids, session.spec.parameters)
            self.sequences[session.key] = sequence
        if item.token_ids or calibration is not None:
            sequence.calibrate(item.base_len, item.token_ids)
        if calibration is None:
            return Drafting(sequence, None, item.max_read)
        asked = calibration.fence.round
        request = session.request(asked, calibration.num_draft_tokens)
        request = replace(request, is_cut=lambda: session.cut_at == asked)
        for option in self.options:
            request = option.request(session, calibration, request)
        return Drafting(sequence, request, item.max_read)


def _outcome(item: StepItem, draft: Draft | DraftwireError | None, timings: DraftTimings) -> DraftOutcome:
    if item.calibration is None or not isinstance(draft, Draft):
        return draft if isinstance(draft, DraftwireError) else None
    block = DraftBlock(item.calibration.fence, draft.token_ids, draft.distributions, timings, parents=draft.parents)
    return replace(block, confidence_buckets=draft.confidence_buckets)
