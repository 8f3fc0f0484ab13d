"""Sources of blocks that a verifier is given from outside: scheduler and engine know them by their interface alone."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from session_specs import target_spec
from tiny_models import tiny_network
from verdict_parts import strategy_of

from draftwire.engine.admission import Room
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.target_session import NO_DRAFTER, DraftOrder, LocalSource, OrderedBlocks, TargetSession
from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import LocalDraft, PlainRun, ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.local_sources import LocalSources
from draftwire_verifier.scheduler import Scheduler

torch.set_num_threads(1)

VOCAB_SIZE, CACHE_TOKENS, NUM_TOKENS = 7, 512, 24
PROMPT = [1, 2, 3]
NAME = "beside"
"""A language model in the verifier's process."""


def model_of(seed: int) -> CachedModel:
    return torch_model(decoder_of(tiny_network("llama", VOCAB_SIZE, seed=seed), "lean"), CACHE_TOKENS)


class ModelSource(LocalSource):
    """Orders blocks of the model for one session."""

    @classmethod
    def open(cls, _: TargetSessionSpec, strategy: str) -> "ModelSource | None":
        return cls(strategy) if strategy == NAME else None

    def order(self, session: TargetSession) -> DraftOrder | None:
        num_tokens = min(self.num_draft_tokens, session.spec.max_len - len(session.committed) - 1)
        return DraftOrder(session, NAME, num_tokens) if num_tokens > 0 else None


class ModelDrafts:
    """A `StepDrafter`: the likeliest tokens of the model. It keeps nothing of a session."""

    def __init__(self) -> None:
        self.model = model_of(2)
        self.batches: list[int] = []

    def draft(self, orders: Sequence[DraftOrder], targets: Mapping[SessionKey, CachedSequence]) -> OrderedBlocks:
        self.batches.append(len(orders))
        unread = [list(order.session.committed.ids) for order in orders]
        sequences, drafted = [self.model.cache.open() for _ in orders], [list[int]() for _ in orders]
        for _ in range(max(order.num_draft_tokens for order in orders)):
            logits = self.model.read([Reading(*each, 1) for each in zip(sequences, unread, strict=True)])
            unread = [[token] for token in logits.argmax(-1).tolist()]
            for tokens, new in zip(drafted, unread, strict=True):
                tokens += new
        for sequence in sequences:
            self.model.cache.close(sequence)
        parts = zip(orders, drafted, strict=True)
        return OrderedBlocks({order.session.key: block_of(order, tokens) for order, tokens in parts}, 0.001)

    def rehearse(self, targets: Sequence[CachedSequence], num_tokens: int, context_length: int) -> None:
        raise AssertionError("nothing is warmed up here")

    def forget(self, key: SessionKey) -> None:
        self.batches.append(0)


def block_of(order: DraftOrder, tokens: list[int]) -> ReceivedBlock:
    tokens = tokens[: order.num_draft_tokens]
    decoded = decode_one(Claim(tokens, DraftDistributions(Encoding.ONE_HOT, VOCAB_SIZE)), VOCAB_SIZE)
    return ReceivedBlock(order.session.fence, tokens, decoded, True, NO_DRAFTER, local_strategy=order.strategy)


class Verifier:
    def __init__(self) -> None:
        self.drafts = ModelDrafts()
        self.engine = TargetEngine(model_of(1), CACHE_TOKENS, {NAME: self.drafts})
        self.scheduler = Scheduler(
            context_length=CACHE_TOKENS,
            vocab_size=VOCAB_SIZE,
            max_draft_tokens=8,
            room=Room(8, CACHE_TOKENS),
            pacer=PrefillPacer(1.0),
            local=LocalSources([ModelSource.open]).find,
        )

    def texts(self, num_draft_tokens: int, num_sessions: int = 2) -> tuple[list[list[int]], list[Verdict]]:
        """Returns greedy texts of some sessions, and their verdicts."""
        sessions = [
            self.scheduler.open(
                target_spec(
                    session_id=number,
                    token_ids=[*PROMPT, number],
                    plain_rounds=1,
                    max_draft_tokens=4,
                    max_len=len(PROMPT) + 1 + NUM_TOKENS,
                    sampling=SamplingParams(0.0),
                    stop_token_ids=frozenset(),
                ),
                lease_id=0,
            )
            for number in range(num_sessions)
        ]
        verdicts = self._decide()
        draft = LocalDraft(NAME, num_draft_tokens) if num_draft_tokens else None
        for session in sessions:
            self.scheduler.run_plain(PlainRun(session.fence, NUM_TOKENS, draft))
        verdicts += self._decide()
        for session in sessions:
            self.scheduler.close(*session.key)
        return [session.committed.ids for session in sessions], verdicts

    def _decide(self) -> list[Verdict]:
        verdicts = []
        while (step := self.scheduler.next_step()) is not None:
            for _, event in self.scheduler.complete(step, self.engine.step(step)):
                assert isinstance(event, Verdict)
                verdicts.append(event)
        return verdicts


def test_model_in_the_verifiers_process_drafts_for_all_sessions_of_a_step() -> None:
    verifier = Verifier()
    texts, verdicts = verifier.texts(3)
    plain, undrafted = Verifier().texts(0)
    assert texts == plain
    assert {strategy_of(verdict) for verdict in verdicts if verdict.num_draft_tokens} == {NAME}
    assert not any(verdict.num_draft_tokens for verdict in undrafted)
    assert verifier.drafts.batches[0] == 2, "in one call"
    assert sum(verdict.num_draft_tokens for verdict in verdicts) > NUM_TOKENS
    verifier.engine.forget((0, 0))
    assert verifier.drafts.batches[-1] == 0, "it may forget the session too"


def test_strategy_that_nothing_drafts_by_is_refused() -> None:
    verifier = Verifier()
    session = verifier.scheduler.open(target_spec(token_ids=PROMPT, plain_rounds=0), lease_id=0)
    with pytest.raises(InvalidRequestError, match="nothing drafts by the name 'other'"):
        verifier.scheduler.run_plain(PlainRun(session.fence, 1, LocalDraft("other", 1)))
    assert partial(ModelSource.open, session.spec)("other") is None
