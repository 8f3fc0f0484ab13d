"""Our own engine and vLLM's under one scheduler: the same steps, and what each of them makes of them."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from session_specs import target_spec
from torch import Tensor

from draftwire.audit import AuditSums
from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.target_session import Step, StepResult, TargetSession
from draftwire.errors import BlockViolationError
from draftwire.method.distributions import quantize, race
from draftwire.method.encoding import (
    Claim,
    Decoded,
    DraftDistributions,
    Supports,
    decode_one,
    encode_dense,
    encode_sparse,
)
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials
from draftwire.method.rounds import CommittedTokens, PlainRun, ReceivedBlock
from draftwire.models.sequence_model import Reading
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.deciding import Judgement, StillReading
from draftwire_verifier import scheduler as verifying
from draftwire_verifier.draft_waits import DraftWaits
from on_vllm.models import CONTEXT_LENGTH, VOCAB_SIZE

PERMIT_KEY = bytes(range(16))
DRAFTER = 7
MOST_STEPS = 200
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=40),
    SamplingParams(0.9, 0, 0.8),
    SamplingParams(1.4, min_p=0.05, logit_bias=((1, 1.5), (5, -2.0))),
    SamplingParams(1.2, repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.3),
    SamplingParams(1.0, frequency_penalty=-0.4, allowed_token_ids=frozenset(range(64)), min_tokens=7),
    SamplingParams(0.0, repetition_penalty=1.8, presence_penalty=1.0, min_tokens=4),
]


class TightPacer(PrefillPacer):
    """Reads so many prompt tokens in a step."""

    tokens: int = 512

    def budget(self, unread: Sequence[int], sessions_run: bool, is_alone: bool = False) -> int:
        return self.tokens


@dataclass(slots=True)
class Duel:
    """Steps of one scheduler, run by both engines. The text goes on as our own engine decides."""

    own: Any
    vllm: Any
    generator: random.Random
    pacer_tokens: int = 512
    parted: list[tuple[Judgement, Judgement]] = field(default_factory=list)
    """Decisions that differ."""
    rounds: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    """Largest differences of what is reported."""
    scheduler: verifying.Scheduler = field(init=False)

    def __post_init__(self) -> None:
        pacer = TightPacer(1.0)
        pacer.tokens = self.pacer_tokens
        self.scheduler = verifying.Scheduler(
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            max_draft_tokens=8,
            room=Room(64, 16_384, 128, 9),
            pacer=pacer,
            waits=DraftWaits(float),
            report_of=LogprobsReport.of,
        )

    def open(self, session_id: int, prompt: list[int], automaton: Any = None, **given: Any) -> TargetSession:
        spec = target_spec(
            session_id=session_id,
            token_ids=prompt,
            permit_key=PERMIT_KEY,
            verifying_key=session_id.to_bytes(KEY_BYTES, "little"),
            **{"max_len": min(CONTEXT_LENGTH, len(prompt) + 120), **given},
        )
        return self.scheduler.open(spec, lease_id=0, automaton=automaton)

    def close(self, session: TargetSession) -> None:
        self.scheduler.close(*session.key)
        self.own.forget(session.key)
        self.vllm.forget(session.key)

    def plain(self, session: TargetSession, num_rounds: int = 1) -> None:
        self.scheduler.run_plain(PlainRun(session.fence, num_rounds))

    def logits(self, text: list[int]) -> Tensor:
        """Returns the target's logits after a text, `[vocab]`, which drafts are made from."""
        cache = self.own.model.cache
        sequence = cache.open()
        logits = self.own.model.read([Reading(sequence, text, 1)])[0].clone()
        cache.close(sequence)
        return logits

    def block(self, session: TargetSession, num_tokens: int, encoding: Encoding, is_used: bool = True) -> ReceivedBlock:
        """Returns a block that is drawn from what it states: the target's logits, made less sure."""
        tokens, decoded = self._drafted(session, list(session.committed.ids), num_tokens, encoding)
        has_distributions = encoding is not Encoding.NONE
        return ReceivedBlock(session.fence, tokens, decoded, has_distributions, DRAFTER, is_used=is_used)

    def block_ahead(self, session: TargetSession, added: list[int], num_tokens: int) -> ReceivedBlock:
        """Returns a block of the next round, for the text that is longer by these tokens."""
        text = CommittedTokens([*session.committed.ids, *added])
        fence = replace(session.fence, round=session.round + 1, prefix_len=len(text), prefix_hash=text.hash)
        tokens, decoded = self._drafted(session, list(text.ids), num_tokens, Encoding.DENSE_FLOAT32)
        return ReceivedBlock(fence, tokens, decoded, True, DRAFTER)

    def _drafted(
        self, session: TargetSession, text: list[int], num_tokens: int, encoding: Encoding
    ) -> tuple[list[int], Decoded | BlockViolationError]:
        rows, tokens = [], []
        parameters = session.spec.parameters
        words = torch.tensor([DrawKey(session.spec.verifying_key, parameters.choice, 0).text_words])
        seed = torch.Generator().manual_seed(self.generator.getrandbits(32))
        for _ in range(num_tokens):
            logits = self.logits(text)
            temperature = max(parameters.sampling.temperature, 0.05)
            probs = torch.softmax(logits / temperature + 0.5 * torch.randn(len(logits), generator=seed), -1)
            if encoding is Encoding.SPARSE_UINT16:
                quantized = quantize(probs.unsqueeze(0), Quantization(Encoding.SPARSE_UINT16))
                weights = quantized.weights[0].double()
                token = int(quantized.token_ids[0][int(torch.multinomial(weights, 1, generator=seed))])
                rows.append(quantized)
            elif encoding is Encoding.NONE:
                noise = exponentials(words, torch.tensor([len(text)]), len(logits))
                token = int(race(probs.unsqueeze(0), noise).winners[0])
            elif encoding is Encoding.ONE_HOT:
                token = int(probs.argmax())
            else:
                token = int(torch.multinomial(probs.double(), 1, generator=seed))
                rows.append(probs)
            tokens.append(token)
            text.append(token)
        return tokens, decode_one(Claim(tokens, _stated(encoding, rows)), VOCAB_SIZE)

    def offer(self, session: TargetSession, block: ReceivedBlock) -> None:
        session.drafter_id, session.permit_number = DRAFTER, 0
        assert self.scheduler.offer_block(block) is session
        if not block.is_used:
            self.scheduler.set_aside(session)

    def step(self) -> list[verifying.Completed]:
        """Runs the next step on both engines, compares, and completes it by our own engine's result."""
        step = self.scheduler.next_step()
        if step is None:
            return []
        own = self.own.step(step)
        theirs = self.decided(step, own)
        for index, (mine, other) in enumerate(zip(own.outcomes, theirs.outcomes, strict=True)):
            self._compare(step, index, mine, other, own, theirs)
        return self.scheduler.complete(step, own)

    def decided(self, step: Step, own: StepResult) -> StepResult:
        """Runs a step on vLLM until it has decided what our own engine has: it may need one step more."""
        outcomes: list[Any] = [None] * len(step.items)
        audits: list[Any] = [None] * len(step.items)
        prompts: list[list[Any]] = [[] for _ in step.items]
        left = list(range(len(step.items)))
        for _ in range(MOST_STEPS):
            result = self.vllm.step(Step([step.items[index] for index in left], step.started_at))
            self.seen["steps"] += 1
            for index, outcome, sums in zip(left, result.outcomes, result.audit(), strict=True):
                outcomes[index], audits[index] = outcome, sums
                prompts[index] += (getattr(outcome, "prompt", None) and outcome.prompt.tokens) or []
            left = [
                index
                for index in left
                if isinstance(outcomes[index], StillReading) and not isinstance(own.outcomes[index], StillReading)
            ]
            if not left:
                break
        assert not left, "vLLM decides what our own engine does"
        result = StepResult(outcomes, own.num_unread, own.num_reused, own.num_tokens, 0, lambda: audits)
        self._prompts = prompts
        return result

    _prompts: list[list[Any]] = field(default_factory=list)

    def _compare(self, step: Step, index: int, mine: Any, other: Any, own: StepResult, theirs: StepResult) -> None:
        if isinstance(mine, Judgement | StillReading) and mine.prompt is not None:
            self.seen["prompt tokens"] += len(mine.prompt.tokens)
            self._differ("prompt logprobs", mine.prompt.tokens, self._prompts[index])
        if not isinstance(mine, Judgement):
            assert type(mine) is type(other), (mine, other)
            return
        self.rounds += 1
        block = step.items[index].block
        self.seen["accepted"] += mine.num_accepted
        self.seen["drafted"] += len(block.token_ids) if block else 0
        self.seen["rounds with drafts"] += bool(block)
        assert isinstance(other, Judgement), other
        if mine.token_ids != other.token_ids or mine.num_accepted != other.num_accepted:
            self.parted.append((mine, other))
            session = step.items[index].session
            self.vllm.forget(session.key)  # it is opened again, with the text as our own engine has it
            return
        self.seen["near ties"] += mine.num_near_ties
        self.seen["near ties of vLLM"] += other.num_near_ties
        self._differ("logprobs", mine.logprobs, other.logprobs)
        # A block without draft tokens has sums of zero where it is decided together with others, else none.
        sums, other_sums = own.audit()[index] or AuditSums(), theirs.audit()[index] or AuditSums()
        assert sums.num_positions == other_sums.num_positions
        if sums.num_positions:
            self.seen["audits"] += 1
            for name in ("acceptance_sum", "acceptance_variance", "surprise_sum", "surprise_variance"):
                self._note("audit sums", getattr(sums, name), getattr(other_sums, name))

    def _differ(self, what: str, mine: list[Any], other: list[Any]) -> None:
        assert [token.token_id for token in mine] == [token.token_id for token in other]
        for token, theirs in zip(mine, other, strict=True):
            self.seen[what] += 1
            self._note(what, token.logprob, theirs.logprob)
            for (_, value), (_, other_value) in zip(token.top, theirs.top, strict=True):
                self._note(what, value, other_value)

    def _note(self, what: str, mine: float, other: float) -> None:
        if mine != other:  # infinities are equal
            self.largest[what] = max(self.largest[what], abs(mine - other))


def _stated(encoding: Encoding, rows: list[Any]) -> DraftDistributions:
    if encoding is Encoding.SPARSE_UINT16:
        ids, weights = (torch.cat([getattr(row, name) for row in rows]).numpy() for name in ("token_ids", "weights"))
        supports = Supports(ids, weights, VOCAB_SIZE)
        return encode_sparse(supports, [len(rows)])[0]
    if encoding in (Encoding.NONE, Encoding.ONE_HOT):
        return DraftDistributions(encoding, VOCAB_SIZE)
    return encode_dense(encoding, torch.stack(rows).numpy())
