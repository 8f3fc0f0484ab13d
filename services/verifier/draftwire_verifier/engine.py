"""The engine of the verifier: runs the target model, on the torch thread."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from typing_extensions import override

from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import OrderedBlocks, Step, StepDrafter, StepItem, StepResult, mask_us_of
from draftwire.errors import BlockViolationError
from draftwire.method.distributions import DenseRows, DraftRows, rows_of
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.rounds import ReceivedBlock
from draftwire.method.sampling import TokenEdits
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import SequenceModel
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import rule_named
from draftwire.verification.deciding import Judgement, reports_prompt
from draftwire.verification.target import Judging, judge
from draftwire_verifier.auditing import audits_of


class TargetEngine(StepEngine[Step, StepResult]):
    """The target model with one cached sequence per session.

    Attributes:
        model: the target.
        sequences: of its cache, by session.
    """

    def __init__(
        self,
        model: SequenceModel,
        context_length: int,
        drafters: Mapping[str, StepDrafter] | None = None,
        make_steps: Callable[[], Iterator[object]] | None = None,
    ) -> None:
        """Starts without sessions.

        Args:
            model: the target.
            context_length: of its texts, tokens.
            drafters: draft beside the model, each by the strategy that orders name.
            make_steps: makes the first steps of some sizes at the warm-up, and returns what makes others one by one.
        """
        self.model = model
        self.sequences: dict[SessionKey, CachedSequence] = {}
        self._drafters = dict(drafters or {})
        self._context_length = context_length
        self._edits: dict[SessionKey, TokenEdits] = {}
        self._make_steps = make_steps
        self._further: Iterator[object] = iter(())

    @override
    def warm_up(self) -> list[tuple[int, float]]:
        if self._make_steps is not None:
            self._further, self.is_prepared = self._make_steps(), False
        return super().warm_up()

    @override
    def prepare(self) -> None:
        self.is_prepared = next(self._further, None) is None

    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        rule, key = rule_named("block"), DrawKey(bytes(KEY_BYTES), 0, 0)
        started = time.perf_counter()
        sequence = self.model.cache.open()
        num_tokens = min(num_tokens, self._context_length - 1)
        sampling, prompt = SamplingParams(), [0] * num_tokens
        judge(self.model, [Judging([], None, sampling, rule, key, num_tokens, sequence=sequence, committed=prompt)])
        seconds = time.perf_counter() - started
        for drafter in self._drafters.values():
            drafter.rehearse([sequence], 1, self._context_length)
        self.model.cache.close(sequence)
        return num_tokens, seconds

    def run_largest(self, num_sessions: int, num_draft_tokens: int) -> None:
        """Runs a step as large as any: a block of every session, judged by what takes most memory, beside a prompt."""
        model, rule, key = self.model, rule_named("block"), DrawKey(bytes(KEY_BYTES), 0, 0)
        drafted = [0] * min(num_draft_tokens, self._context_length - 1)
        prompt = [0] * min(LARGEST_CHUNK, self._context_length)
        rows = DenseRows(torch.full((len(drafted), model.vocab_size), 1.0 / model.vocab_size))
        sampling = SamplingParams(temperature=1.0, top_p=0.95)
        sequences = [model.cache.open() for _ in range(num_sessions + 1)]
        blocks = [Judging(drafted, rows, sampling, rule, key, 1, sequence=one, committed=[0]) for one in sequences[:-1]]
        prefill = Judging([], None, sampling, rule, key, len(prompt), sequence=sequences[-1], committed=prompt)
        judge(model, [*blocks, prefill])
        for drafter in self._drafters.values():
            drafter.rehearse(sequences, len(drafted), self._context_length)
        for sequence in sequences:
            model.cache.close(sequence)

    def step(self, step: Step) -> StepResult:
        """Runs a step: verification of blocks, plain decoding, prefill."""
        started = time.perf_counter()
        ordered = self._draft(step.items)
        drafted = ordered.by_session
        judgings = [self._judging(item, drafted.get(item.session.key) or item.block) for item in step.items]
        done = judge(self.model, judgings)
        num_unread = [
            len(judging.committed) - judging.sequence.length if not isinstance(outcome, Judgement) else 1
            for judging, outcome in zip(judgings, done.outcomes, strict=True)
        ]
        return StepResult(
            outcomes=done.outcomes,
            num_unread=num_unread,
            num_reused=[judging.sequence.num_reused for judging in judgings],
            num_tokens=done.num_tokens,
            verify_us=int((time.perf_counter() - started) * 1e6),
            audit=partial(audits_of, done.decided, [judging.rule for judging in judgings], done.shaped),
            drafted=drafted,
            draft_s=ordered.seconds,
            mask_us=mask_us_of(step.items),
        )

    def _draft(self, items: Sequence[StepItem]) -> OrderedBlocks:
        """Carries out the orders of a step."""
        drafted = OrderedBlocks()
        for strategy, drafter in self._drafters.items():
            orders = [item.order for item in items if item.order is not None and item.order.strategy == strategy]
            if orders:
                own = drafter.draft(orders, self.sequences)
                by_session = {**drafted.by_session, **own.by_session}
                drafted = OrderedBlocks(by_session, drafted.seconds + own.seconds)
        return drafted

    def forget(self, key: SessionKey) -> None:
        """Frees a session's KV cache, and what drafters keep of it."""
        self._edits.pop(key, None)
        for drafter in self._drafters.values():
            drafter.forget(key)
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.model.cache.close(sequence)

    def _judging(self, item: StepItem, block: ReceivedBlock | None) -> Judging:
        """Returns an item's part in the forward pass. `block` is what the round is decided about."""
        session, spec = item.session, item.session.spec
        parameters = spec.parameters
        sequence = self.sequences.get(session.key)
        if sequence is None:
            # What is reported of a prompt needs every logit: no prefix is reused, since cached tokens give none.
            known = () if reports_prompt(session.report) else session.committed.ids
            sequence = self.model.cache.open(known, parameters.cache_salt)
            self.sequences[session.key] = sequence
            self._edits[session.key] = TokenEdits(parameters.sampling, parameters.stop_token_ids)
        return Judging(
            sequence=sequence,
            draft_tokens=block.token_ids if block else [],
            draft=_rows_of(block) if block else None,
            sampling=parameters.sampling,
            rule=session.rule,
            key=DrawKey(spec.verifying_key, parameters.choice, session.round),
            num_committed=len(session.committed),
            committed=session.committed.ids,
            prompt_len=parameters.prompt_len,
            stop_token_ids=parameters.stop_token_ids,
            max_read=item.max_read,
            report=session.report,
            automaton=session.automaton,
            made_masks=session.masks,
            edits=self._edits[session.key],
            tree=block.tree if block else None,
            is_used=block is None or block.is_used,
        )


def _rows_of(block: ReceivedBlock) -> DraftRows | None:
    """Returns the distributions of a block; None for a tree that was sent without."""
    if isinstance(block.draft, BlockViolationError) or (block.tree is not None and not block.has_distributions):
        return None
    return rows_of(block.draft)
