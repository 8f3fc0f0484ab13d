"""Many sessions in the same steps write, each of them, what it would write alone.

The schedulers and engines of verifier and drafter are joined without transport by a small gateway. Models are float64,
so that the rounding of differently shaped batches cannot change a token: tokens are compared for equality. (A draw
that lies within 1e-12 of a border would differ; about one in 10^8 runs of this file draws one.)
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.distributions import draw, race, rows_of
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.encoding import Claim, DraftDistributions, decode, decode_one
from draftwire.errors import BlockViolationError, NoRoomError, Violation
from draftwire.keys import Role, derive_key
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding, Quantization
from draftwire.randomness import DrawKey, exponentials
from draftwire.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftSessionSpec,
    Fence,
    FenceVerdict,
    Permit,
    PlainRun,
    ReceivedBlock,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
)
from draftwire.sampling import SMALLEST, Span, probabilities_of_spans
from draftwire.services.admission import Room
from draftwire.services.drafter import scheduler as drafting
from draftwire.services.drafter.engine import DraftEngine
from draftwire.services.prefill import PrefillPacer
from draftwire.services.verifier import engine as target_engine
from draftwire.services.verifier import scheduler as verifying
from draftwire.verification import RULES, BlockBatch, KeyedNoise, rule_named, verify
from draftwire.verification.target import NEAR_TIE, StillReading, judge
from tests.tiny_models import save_tiny_model, with_exact_norms

VOCAB_SIZE = 7
CONTEXT_LENGTH = 160
MAX_DRAFT_TOKENS = 5
LEASE = 1
SUBSTITUTE = 0
PERMIT_KEY = bytes(range(16))
DENSE = Quantization(Encoding.DENSE_FLOAT32)
GREEDY = SamplingParams(0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=3),
    SamplingParams(0.9, 0, 0.8),
    SamplingParams(1.4, min_p=0.15, logit_bias=((1, 1.5), (5, -2.0))),
    SamplingParams(1.2, repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.3),
    SamplingParams(2.0, frequency_penalty=-0.4, allowed_token_ids=(0, 1, 3, 4, 6), min_tokens=7),
    SamplingParams(0.0, repetition_penalty=1.8, presence_penalty=1.0, min_tokens=4),
]
UNTIL_DONE = 3_000
"""Turns that all sessions of a test can take at most."""


@dataclass(frozen=True, slots=True)
class Models:
    """A pair, as the services wrap it and, for reference, as transformers has it. `target` and `drafter` are paged."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    reference_target: PreTrainedModel
    reference_drafter: PreTrainedModel


def load_pair(folder: Path, drafter_vocab_size: int = VOCAB_SIZE) -> Models:
    target = save_tiny_model(folder / "target", VOCAB_SIZE, seed=6, context_length=CONTEXT_LENGTH)
    drafter = save_tiny_model(folder / "drafter", drafter_vocab_size, seed=9, context_length=CONTEXT_LENGTH)
    *own, reference_target, reference_drafter = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (target, drafter) * 2
    )
    return Models(*own, with_exact_norms(reference_target), with_exact_norms(reference_drafter))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_pair(tmp_path_factory.mktemp("pair"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for, and how its gateway will go about it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    rule: str = "block"
    salt: str = ""
    block_lengths: tuple[int, ...] = (4,)
    """Draft tokens in round 0, 1, 2 and so on, over and over; 0 is a plain run."""
    plain_rounds: int = 1
    """Length of plain runs."""
    opens_plain: bool = True
    """Whether it begins with a plain run on the verifier, as the real gateway does, or with a block."""
    stop_token_ids: frozenset[int] = frozenset()
    continues: bool = False
    """Whether its prompt follows what another session has written, as the next turn of a chat does."""
    seed: int = 0

    @property
    def max_len(self) -> int:
        return len(self.prompt) + self.max_tokens

    def key(self, role: Role) -> bytes:
        """Returns the drafter's or the verifier's key; under a coupled rule both have the same."""
        return derive_key(self.seed, Role.COUPLING if rule_named(self.rule).is_coupled else role)

    def probs(self, logits: Tensor, text: list[int]) -> Tensor:
        """Returns the law after a text from its logits, `[vocab]`, as if there were nothing else to process."""
        span = Span(self.sampling, 1, text, len(self.prompt), self.stop_token_ids)
        return probabilities_of_spans(logits.unsqueeze(0).clone(), [span])[0]


@dataclass(frozen=True, slots=True)
class Decided:
    """One round of a session, as it came out."""

    prefix_len: int
    draft_tokens: list[int]
    distributions: DraftDistributions | None
    attempt: int
    token_ids: list[int]
    num_near_ties: int


@dataclass(slots=True)
class Client:
    """The gateway's side of a session."""

    session_id: int
    plan: Plan
    committed: CommittedTokens
    drafter_knows: int
    epoch: int = 0
    permit_number: int = 0
    """Of its drafter, whose process is named by it as well."""
    has_drafter: bool = True
    is_open: bool = True
    is_done: bool = False
    """Ended by itself."""
    asked: int = 0
    """Draft tokens that were asked of the drafter for the current round."""
    attempt: int = 0
    offered: DraftBlock | None = None
    """The block that the verifier took for the current round."""
    rounds: list[Decided] = field(default_factory=list)

    @property
    def fence(self) -> Fence:
        return Fence(self.session_id, self.epoch, len(self.rounds), len(self.committed), self.committed.hash)

    @property
    def generated(self) -> list[int]:
        return self.committed.ids[len(self.plan.prompt) :]


@dataclass(slots=True)
class TightPacer(PrefillPacer):
    """Reads so many prompt tokens in a step, however long that takes."""

    tokens: int = 1

    def budget(self, sessions_run: bool, is_alone: bool = False) -> int:
        return self.tokens


class Half:
    """A scheduler with its engine: one of the two services. A step is begun, carried out and completed one by one."""

    def __init__(self, scheduler, engine, cache) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.cache = cache
        self.sizes: Counter[int] = Counter()
        """Steps by number of sessions."""
        self._step = None
        self._result = None
        self._posted = []

    @property
    def step_runs(self) -> bool:
        return self._step is not None

    def turn(self) -> list:
        """Goes one of the three ways on; returns what a completed step gave."""
        if self._step is None:
            self._step = self.scheduler.next_step()
            if self._step is not None:
                self.sizes[len(self._step.items)] += 1
        elif self._result is None:
            self._result = self.engine.step(self._step)
            self.cache.check_integrity()
            for key in self._posted:
                self.engine.forget(key)
            self._posted.clear()
        else:
            completed = self.scheduler.complete(self._step, self._result)
            self._step = self._result = None
            return completed
        self.cache.check_integrity()
        return []

    def close(self, session_id: int, epoch: int) -> None:
        """Closes a session. As on the torch thread, its cache is freed behind the step that runs."""
        session = self.scheduler.close(session_id, epoch)
        if session is None:
            return
        if self._step is not None and self._result is None:
            self._posted.append(session.key)
        else:
            self.engine.forget(session.key)
        self.cache.check_integrity()

    def check_empty(self) -> None:
        assert not self.scheduler.sessions
        assert self.scheduler.room.usage == 0.0
        assert not self.cache.sequences
        assert self.cache.num_free_blocks == self.cache.num_blocks


class Stack:
    """Verifier, drafter and gateway in one process. Whatever happens next is for the test to say."""

    def __init__(self, models: Models, target_room: int = 4096, drafter_room: int = 4096, budget: int = 512) -> None:
        """Takes rooms of the two caches in tokens, and the prompt tokens that each step may read."""
        self.models = models
        self.clients: list[Client] = []
        self.blocks: deque[tuple[DraftBlock, int]] = deque()
        """On their way to the verifier, with the drafters that sent them."""
        self.events: deque = deque()
        """On their way to the gateway."""
        self.seen: Counter[str] = Counter()
        self.target_probs: dict[tuple[bytes, int, int], Tensor] = {}
        """What the rules saw, by verifying key, round and attempt."""
        self.corrupt_next_block = False
        target, drafter = (
            CachedModel(decoder_of(models.target), target_room),
            CachedModel(decoder_of(models.drafter), drafter_room),
        )
        self.target = Half(
            verifying.Scheduler(
                CONTEXT_LENGTH, VOCAB_SIZE, MAX_DRAFT_TOKENS, Room(64, target_room), TightPacer(1.0, tokens=budget)
            ),
            target_engine.TargetEngine(target, CONTEXT_LENGTH),
            target.cache,
        )
        self.drafter = Half(
            drafting.Scheduler(
                CONTEXT_LENGTH, MAX_DRAFT_TOKENS, Room(64, drafter_room), TightPacer(1.0, tokens=budget)
            ),
            DraftEngine(LanguageModelDrafter(drafter, CONTEXT_LENGTH, SUBSTITUTE, DENSE)),
            drafter.cache,
        )

    @property
    def open_clients(self) -> list[Client]:
        return [client for client in self.clients if client.is_open]

    def open(self, plan: Plan) -> Client | None:
        """Opens a session, without a drafter where that has no room; None if the verifier has none."""
        client = Client(len(self.clients), plan, CommittedTokens(list(plan.prompt)), len(plan.prompt))
        is_room = blocks_for(plan.max_len) <= self.target.scheduler.room.num_free_blocks
        try:
            self._open_target(client, min(plan.plain_rounds, plan.max_tokens) if plan.opens_plain else 0)
        except NoRoomError:
            assert not is_room
            self.seen["refused"] += 1
            return None
        self.clients.append(client)
        self._open_drafter(client)
        if not plan.opens_plain:
            self._ask(client)
        return client

    def _open_target(self, client: Client, plain_rounds: int) -> None:
        plan = client.plan
        spec = TargetSessionSpec(
            session_id=client.session_id,
            epoch=client.epoch,
            first_round=len(client.rounds),
            choice=0,
            token_ids=client.committed.ids,
            prompt_len=len(plan.prompt),
            sampling=plan.sampling,
            rule=plan.rule,
            verifying_key=plan.key(Role.VERIFYING),
            permit_key=PERMIT_KEY,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            plain_rounds=plain_rounds,
            stop_token_ids=plan.stop_token_ids,
            max_len=plan.max_len,
            cache_salt=plan.salt,
        )
        self.target.scheduler.open(spec, LEASE)

    def _open_drafter(self, client: Client) -> None:
        """Opens a session on a drafter, which knows what is committed; without one if there is no room."""
        plan = client.plan
        spec = DraftSessionSpec(
            session_id=client.session_id,
            epoch=client.epoch,
            choice=0,
            token_ids=client.committed.ids,
            prompt_len=len(plan.prompt),
            sampling=plan.sampling,
            rule=plan.rule,
            drafting_key=plan.key(Role.DRAFTING),
            stop_token_ids=plan.stop_token_ids,
            verifier_address="",
            target_vocab_size=VOCAB_SIZE,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            max_len=plan.max_len,
            permit=Permit.make(PERMIT_KEY, client.permit_number),
            cache_salt=plan.salt,
        )
        client.drafter_knows = len(client.committed)
        try:
            self.drafter.scheduler.open(spec, LEASE)
            client.has_drafter = True
        except NoRoomError:
            client.has_drafter = False
            self.seen["refused by the drafter"] += 1

    def close(self, client: Client) -> None:
        client.is_open = False
        self._close(client)

    def _close(self, client: Client) -> None:
        self.seen["closed in a step"] += self.target.step_runs + self.drafter.step_runs
        self.target.close(client.session_id, client.epoch)
        self.drafter.close(client.session_id, client.epoch)

    def move(self, client: Client) -> None:
        """Goes on on another verifier, with whatever was committed, and with a drafter that begins anew."""
        self._close(client)
        client.epoch += 1
        client.asked = client.attempt = 0
        client.offered = None
        self._open_target(client, 0)
        self._open_drafter(client)
        self.seen["moved"] += 1
        self._ask(client)

    def replace_drafter(self, client: Client) -> None:
        """Goes on with another drafter, while blocks of the old one may still be on their way."""
        if not client.has_drafter:
            return
        self.drafter.close(client.session_id, client.epoch)
        client.permit_number += 1
        self._open_drafter(client)
        self.seen["drafter replaced"] += 1
        if client.asked and client.has_drafter:
            self.ask_again(client)
        elif client.asked:
            self.race(client)

    def send_drafted(self, client: Client) -> None:
        """Asks for the block under way as far as it is drawn."""
        if client.asked:
            self.drafter.scheduler.send_drafted(
                SendDrafted(client.session_id, client.epoch, len(client.rounds), client.attempt)
            )

    def lose_drafter(self, client: Client) -> None:
        """Goes on without a drafter, whose block may still be on its way."""
        if client.has_drafter:
            client.has_drafter = False
            self.drafter.close(client.session_id, client.epoch)
            if client.asked:
                self.race(client)

    def ask_again(self, client: Client) -> None:
        """Asks for another block for a round, though the first one may still come."""
        if client.has_drafter and client.asked:
            client.attempt += 1
            base_len = len(client.committed)
            calibration = Calibration(client.fence, base_len, [], client.asked, client.attempt)
            self.drafter.scheduler.calibrate(calibration)

    def race(self, client: Client) -> None:
        """Asks for a plain round where a block was asked for; whichever comes first is decided."""
        if client.asked:
            verdict = self.target.scheduler.run_plain(PlainRun(client.fence, 1))
            assert verdict is not FenceVerdict.VIOLATION

    def turn_target(self) -> None:
        def recording(model, judgings):
            done = judge(model, judgings)
            for decided in done.decided:
                rows = decided.blocks.padded_target_probs()
                for row, member in enumerate(decided.members):
                    judging = judgings[member]
                    key = judging.key
                    self.target_probs[key.key, key.round, key.attempt] = rows[row, : len(judging.draft_tokens) + 1]
            for outcome in done.outcomes:
                if isinstance(outcome, StillReading):
                    self.seen["read in part"] += 1
            return done

        with mock.patch.object(target_engine, "judge", recording):
            self.events += self.target.turn()

    def turn_drafter(self) -> None:
        for done in self.drafter.turn():
            if done.outcome is not None:
                self.blocks.append((done.outcome, self.clients[done.session.spec.session_id].permit_number))

    def deliver_block(self) -> None:
        """Brings the oldest block to the verifier."""
        if not self.blocks:
            return
        block, drafter_id = self.blocks.popleft()
        if self.corrupt_next_block:
            self.corrupt_next_block = False
            data = block.distributions.data[:-4] or b"none"
            block = replace(block, distributions=replace(block.distributions, data=data))
        (draft,) = decode([Claim(block.token_ids, block.distributions)], VOCAB_SIZE)
        is_told = block.distributions.encoding is not Encoding.NONE
        received = ReceivedBlock(
            *(block.fence, block.token_ids, draft, is_told, drafter_id),
            *(block.attempt, block.timings, block.permit),
        )
        session = self.target.scheduler.sessions.get((block.fence.session_id, block.fence.epoch))
        try:
            self.target.scheduler.take_permit(received)
            self.target.scheduler.offer_block(received)
        except BlockViolationError as error:
            assert session is not None
            if error.violation is Violation.PEER:
                assert drafter_id < self.clients[block.fence.session_id].permit_number
                self.seen["block of a replaced drafter"] += 1
            else:
                self.events.append((session, error))
            return
        is_current = session is not None and session.block is received
        self.seen["block current" if is_current else "block stale"] += 1
        if is_current:
            client = self.clients[block.fence.session_id]
            client.offered = block
            self.seen["block shorter than wanted"] += len(block.token_ids) < client.asked

    def deliver_event(self) -> None:
        """Brings the verifier's oldest message to the gateway."""
        if not self.events:
            return
        session, event = self.events.popleft()
        client = self.clients[session.spec.session_id]
        if not client.is_open or session.spec.epoch != client.epoch:
            return
        if isinstance(event, Verdict):
            self._commit(client, event)
        else:
            assert isinstance(event, BlockViolationError)
            self.seen["block refused"] += 1
            self.race(client)

    def turn_all(self) -> None:
        """Brings everything a good deal further."""
        for _ in range(3):
            self.turn_drafter()
        while self.blocks:
            self.deliver_block()
        for _ in range(3):
            self.turn_target()
        while self.events:
            self.deliver_event()

    def finish(self, waiting: Sequence[Plan] = ()) -> None:
        """Runs everything to its end, and opens what waits as soon as there is room."""
        left = deque(waiting)
        for _ in range(UNTIL_DONE):
            while left and self.open(self.resolve(left[0])) is not None:
                left.popleft()
            if not left and not self.open_clients and not (self.target.step_runs or self.drafter.step_runs):
                break
            self.turn_all()
        else:
            pytest.fail("some session does not get on")
        self.target.check_empty()
        self.drafter.check_empty()

    def resolve(self, plan: Plan) -> Plan:
        """Puts what another session has written before a prompt that continues it."""
        if not plan.continues or not self.clients:
            return plan
        written = self.clients[plan.seed % len(self.clients)].committed.ids
        room = CONTEXT_LENGTH - plan.max_len
        return replace(plan, prompt=(*written[:room], *plan.prompt), continues=False)

    def _commit(self, client: Client, verdict: Verdict) -> None:
        assert verdict.fence == client.fence
        block = client.offered if verdict.num_draft_tokens else None
        drafted = block.token_ids if block else []
        assert len(drafted) == verdict.num_draft_tokens
        distributions, attempt = (block.distributions, block.attempt) if block else (None, 0)
        prefix_len = len(client.committed)
        client.rounds.append(
            Decided(prefix_len, drafted, distributions, attempt, verdict.token_ids, verdict.num_near_ties)
        )
        client.committed.append(verdict.token_ids)
        client.asked = client.attempt = 0
        client.offered = None
        assert len(client.committed) <= client.plan.max_len
        stopped = not client.plan.stop_token_ids.isdisjoint(verdict.token_ids)
        if stopped or len(client.committed) == client.plan.max_len:
            client.is_done = True
            self.seen["reused"] += verdict.num_cached_tokens
            self.close(client)
        elif verdict.plain_rounds_left == 0:
            self._ask(client)

    def _ask(self, client: Client) -> None:
        left = client.plan.max_len - len(client.committed)
        lengths = client.plan.block_lengths
        wanted = min(lengths[len(client.rounds) % len(lengths)], left - 1)
        if wanted == 0 or not client.has_drafter:
            run = PlainRun(client.fence, min(client.plan.plain_rounds, left))
            assert self.target.scheduler.run_plain(run) is FenceVerdict.CURRENT
            return
        base_len, client.drafter_knows = client.drafter_knows, len(client.committed)
        client.asked = wanted
        calibration = Calibration(client.fence, base_len, client.committed.ids[base_len:], wanted)
        self.drafter.scheduler.calibrate(calibration)

    @torch.inference_mode()
    def check(self, client: Client) -> None:
        """Makes sure that every round is what the session alone would have done: a proof by induction over rounds.

        The reference is transformers with neither cache nor batch of sessions; the rows are the session's own rounds.
        """
        if not client.rounds:
            return
        plan, models = client.plan, self.models
        texts = [client.committed.ids[: done.prefix_len] + done.draft_tokens for done in client.rounds]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])  # causal: what follows is not seen
        target_logits = models.reference_target(input_ids=ids).logits
        drafter_vocab_size = models.reference_drafter.config.vocab_size
        readable = torch.where(ids < drafter_vocab_size, ids, SUBSTITUTE)
        draft_logits = models.reference_drafter(input_ids=readable).logits[..., :VOCAB_SIZE]
        rule, device = rule_named(plan.rule), torch.device("cpu")
        for number, done in enumerate(client.rounds):
            length, text, readable_text = len(done.draft_tokens), texts[number], readable[number].tolist()
            places = range(done.prefix_len, done.prefix_len + length + 1)
            target_probs = torch.stack([plan.probs(target_logits[number, end - 1], text[:end]) for end in places])
            seen = self.target_probs[plan.key(Role.VERIFYING), number, done.attempt]
            assert (seen - target_probs).abs().max() < 1e-9, "the rule saw the target's own rows"
            draft_probs = target_probs.new_zeros(length, VOCAB_SIZE)
            if done.distributions is not None:
                rows = [plan.probs(draft_logits[number, end - 1], readable_text[:end]) for end in places[:-1]]
                drawn_from = torch.stack(rows).float()  # as it would be sent
                key = DrawKey(plan.key(Role.DRAFTING), 0, number, done.attempt)
                if rule.is_coupled:
                    words = torch.tensor([key.text_words] * length)
                    times = exponentials(words, torch.tensor(places[:-1]), drawn_from.shape[1])
                    assert race(drawn_from, times).winners.tolist() == done.draft_tokens
                else:
                    assert draw(drawn_from, key.uniforms(length)).tolist() == done.draft_tokens
                draft_probs = pad(drawn_from, (0, VOCAB_SIZE - drawn_from.shape[1]))
                is_told = done.distributions.encoding is not Encoding.NONE
                assert is_told == rule.needs_draft_probs
                if is_told:
                    sent = rows_of(decode_one(Claim(done.draft_tokens, done.distributions), VOCAB_SIZE)).dense()
                    assert (sent - draft_probs).abs().max() < 1e-6, "the drafter sent its own rows"
            blocks = BlockBatch.padded(
                target_probs.unsqueeze(0),
                draft_probs.unsqueeze(0),
                torch.tensor([done.draft_tokens], dtype=torch.int64),
                torch.tensor([length]),
            )
            key = DrawKey(plan.key(Role.VERIFYING), 0, number, done.attempt)
            outcome = verify(rule, blocks, KeyedNoise([key], [done.prefix_len], device))
            accepted = done.draft_tokens[: int(outcome.num_accepted)]
            assert done.token_ids == [*accepted, int(outcome.extra_tokens)]
            bound = NEAR_TIE / max(plan.sampling.temperature, SMALLEST)
            assert done.num_near_ties == int(outcome.num_near_ties(bound))


PIECES = [[generator.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)] for generator in map(random.Random, range(3))]
TEXTS = [[token for piece in order for token in PIECES[piece]] for order in ([0, 1, 2, 0], [0, 2, 1, 1], [1, 1, 0, 2])]
"""Prompts are beginnings of these, so that many of them share blocks, and have equal blocks after other beginnings."""


def mixed_plans(count: int, salts: Sequence[str] = ("",)) -> list[Plan]:
    """Returns requests of all kinds, whose prompts begin alike or not."""
    plans = []
    for index in range(count):
        generator = random.Random(index)
        shared = TEXTS[index % 2][: generator.choice([0, 5, 16, 17, 33, 48])]
        own = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 20))]
        plans.append(
            Plan(
                prompt=(*shared, *own),
                max_tokens=generator.randint(8, 40),
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                rule=list(RULES)[index % len(RULES)],
                salt=salts[index % len(salts)],
                block_lengths=(generator.randint(0, MAX_DRAFT_TOKENS),),
                plain_rounds=generator.randint(1, 3),
                opens_plain=False,
                stop_token_ids=frozenset({3}) if index % 4 == 1 else frozenset(),
                seed=index,
            )
        )
    return plans


def texts_of(stack: Stack) -> list[list[int]]:
    return [client.generated for client in stack.clients]


def test_sessions_together_write_what_the_loop_in_one_process_writes_for_each(models: Models) -> None:
    plans = mixed_plans(20)
    stack = Stack(models, budget=24)
    for plan in plans[:4]:
        stack.open(plan)
    for _ in range(6):
        stack.turn_all()
    stack.finish(plans[4:])  # finds what the first ones have read
    for plan, text in zip(plans, texts_of(stack), strict=True):
        target, drafter = (
            CachedModel(decoder_of(models.target), CONTEXT_LENGTH),
            CachedModel(decoder_of(models.drafter), CONTEXT_LENGTH),
        )
        block_length = plan.block_lengths[0]
        run = LocalRun(plan.sampling, plan.max_tokens, block_length, plan.rule, plan.seed, plan.stop_token_ids)
        rounds = speculate(
            target, LanguageModelDrafter(drafter, CONTEXT_LENGTH, quantization=DENSE), list(plan.prompt), run
        )
        alone: list[int] = []
        for done in rounds:
            alone += done.token_ids
            if not plan.stop_token_ids.isdisjoint(done.token_ids):
                break
        assert text == alone
    assert max(stack.target.sizes) >= 12, "most sessions took part in the same steps"
    assert max(stack.drafter.sizes) >= 8
    reused = [half.scheduler.prefix_tokens["reused"] for half in (stack.target, stack.drafter)]
    assert min(reused) >= 3 * BLOCK_SIZE, "some prompts were read once for several sessions"
    assert stack.seen["read in part"] > 10, "prompts were read in pieces"


def test_reuse_of_prefixes_changes_no_token_and_happens_only_where_salts_are_equal(models: Models) -> None:
    plans = mixed_plans(12)
    texts = []
    for salts in ([""], ["one", "other"], [str(index) for index in range(len(plans))]):
        stack = Stack(models, budget=64)
        for plan, salted in zip(plans, mixed_plans(len(plans), salts), strict=True):
            assert replace(salted, salt="") == plan
            stack.open(salted)
            stack.turn_all()  # so that the next one finds what this one has read
        stack.finish()
        texts.append(texts_of(stack))
        for half in (stack.target, stack.drafter):
            assert half.scheduler.prefix_tokens["queried"] == sum(len(plan.prompt) for plan in plans)
            assert (half.scheduler.prefix_tokens["reused"] > 0) == (len(salts) < len(plans))
    assert texts[0] == texts[1] == texts[2]


def test_second_turn_of_a_chat_reuses_what_the_first_has_written(models: Models) -> None:
    stack = Stack(models)
    first = stack.open(Plan(tuple(TEXTS[2][:20]), 40, SamplingParams(), block_lengths=(5,)))
    assert first is not None
    stack.finish()
    second = stack.open(Plan((*first.committed.ids, 3, 1), 20, SamplingParams(), block_lengths=(5,), seed=1))
    assert second is not None
    stack.finish()
    for client in (first, second):
        stack.check(client)
    for half in (stack.target, stack.drafter):
        assert half.scheduler.prefix_tokens["reused"] == len(first.committed) // BLOCK_SIZE * BLOCK_SIZE


def test_room_for_the_reservations_is_enough_and_who_has_none_is_refused(models: Models) -> None:
    plan = Plan(tuple(TEXTS[2][:30]), 34, block_lengths=(5,))  # greedy, so that all are at their fullest at once
    room = 3 * plan.max_len
    assert room == 3 * blocks_for(plan.max_len) * BLOCK_SIZE, "a block more would not fit"
    stack = Stack(models, room, room, budget=16)
    for seed in range(3):
        assert stack.open(replace(plan, salt=str(seed), seed=seed)) is not None
    assert stack.open(replace(plan, seed=3)) is None
    fullest = 0
    while len(stack.open_clients) == 3:
        stack.turn_all()
        fullest = max(fullest, stack.target.cache.num_blocks - stack.target.cache.num_free_blocks)
    assert fullest == stack.target.cache.num_blocks, "all of the cache was in use"
    assert stack.open(replace(plan, seed=3)) is not None
    stack.finish([replace(plan, salt=str(seed), seed=seed) for seed in range(4, 9)])
    assert stack.seen["refused"] > 1
    assert all(client.is_done for client in stack.clients)
    for client in stack.clients:
        stack.check(client)


def test_sessions_that_the_drafter_has_no_room_for_are_decoded_without_it(models: Models) -> None:
    plan = Plan(tuple(TEXTS[2][:30]), 34, SamplingParams(), block_lengths=(5,))
    stack = Stack(models, 4096, plan.max_len)
    first, second = (stack.open(replace(plan, salt=str(seed), seed=seed)) for seed in range(2))
    assert first is not None
    assert second is not None
    assert (first.has_drafter, second.has_drafter) == (True, False)
    stack.finish()
    assert stack.seen["refused by the drafter"] == 1
    for client in (first, second):
        stack.check(client)


def test_block_that_is_no_good_costs_its_session_the_drafter_and_nobody_a_token(models: Models) -> None:
    stack = Stack(models)
    for plan in mixed_plans(6):
        stack.open(replace(plan, block_lengths=(5,)))
    stack.turn_all()
    stack.corrupt_next_block = True
    stack.finish()
    assert stack.seen["block refused"] >= 1
    for client in stack.clients:
        stack.check(client)


def test_block_that_is_asked_for_while_an_older_one_is_drafted_is_drafted_too(models: Models) -> None:
    stack = Stack(models)
    client = stack.open(Plan(tuple(TEXTS[0][:20]), 20, SamplingParams(), opens_plain=False))
    assert client is not None
    for _ in range(4):  # the prompt is read, and a step that drafts the first block has begun
        stack.turn_drafter()
    stack.race(client)
    for _ in range(3):
        stack.turn_target()
    stack.deliver_event()
    assert stack.drafter.step_runs
    assert client.asked
    stack.finish()
    assert stack.seen["block stale"] == 1
    assert [len(done.draft_tokens) for done in client.rounds[:2]] == [0, 4]
    stack.check(client)


LOSSLESS = [name for name, one in RULES.items() if one.is_lossless]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("block_lengths", [(0,), (5, 3, 0)], ids=["plain", "drafted"])
def test_session_that_is_moved_again_and_again_writes_what_it_would_have_written_where_it_was(
    models: Models, rule: str, block_lengths: tuple[int, ...]
) -> None:
    """Whatever counts from the prompt, as penalties and min_tokens do, or by rounds, as random numbers do."""
    plans = [
        Plan(
            tuple(TEXTS[number % 3][: 18 + number]),
            24,
            replace(sampling, min_tokens=15),
            rule,
            block_lengths=block_lengths,
            opens_plain=False,
            stop_token_ids=frozenset({3}),
            seed=number,
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]
    texts = []
    for is_moved in (False, True):
        stack = Stack(models)
        for plan in plans:
            stack.open(plan)
        for number in range(12):
            stack.turn_all()
            for client in stack.open_clients if is_moved else ():
                if (number + client.session_id) % 3 == 0:
                    stack.move(client)
        stack.finish()
        texts.append(texts_of(stack))
        assert all(client.epoch >= 2 for client in stack.clients) == is_moved
        for client in stack.clients:
            stack.check(client)
    assert texts[0] == texts[1]


def test_drafter_that_takes_over_is_believed_and_the_late_blocks_of_the_old_one_are_not(models: Models) -> None:
    stack = Stack(models)
    client = stack.open(Plan(tuple(TEXTS[0][:20]), 30, SamplingParams(), block_lengths=(4,), opens_plain=False))
    assert client is not None
    for _ in range(2):
        stack.turn_all()
    while not stack.blocks:  # of the old drafter, without a permit
        stack.turn_drafter()
        stack.turn_target()
        stack.deliver_event()
    late = stack.blocks.popleft()
    stack.replace_drafter(client)
    while not stack.blocks:
        stack.turn_drafter()
    stack.blocks.append(late)
    assert [(sender, block.permit is not None) for block, sender in stack.blocks] == [(1, True), (0, False)]
    stack.deliver_block()
    stack.deliver_block()
    assert stack.seen["block of a replaced drafter"] + stack.seen["block stale"] == 1
    stack.finish()
    assert any(done.attempt == 1 and done.draft_tokens for done in client.rounds)
    stack.check(client)


def test_block_that_is_sent_as_far_as_it_is_drawn_is_judged_as_any_other(models: Models) -> None:
    stack = Stack(models)
    for plan in mixed_plans(6):
        stack.open(replace(plan, block_lengths=(5,)))
    for _ in range(200):
        stack.turn_drafter()
        for client in stack.open_clients[::2]:
            stack.send_drafted(client)
        while stack.blocks:
            stack.deliver_block()
        stack.turn_target()
        while stack.events:
            stack.deliver_event()
    stack.finish()
    assert stack.seen["block shorter than wanted"] >= 10
    for client in stack.clients:
        stack.check(client)


@pytest.mark.parametrize("drafter_vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 2])
def test_vocabularies_of_different_sizes_work_in_the_same_steps(tmp_path: Path, drafter_vocab_size: int) -> None:
    stack = Stack(load_pair(tmp_path, drafter_vocab_size), budget=32)
    stack.finish(mixed_plans(8))
    for client in stack.clients:
        stack.check(client)


class Action(Enum):
    """What may happen next. The likelier ones have several numbers."""

    OPEN = range(0, 4)
    TURN_TARGET = range(4, 13)
    TURN_DRAFTER = range(13, 20)
    DELIVER_BLOCK = range(20, 25)
    DELIVER_EVENT = range(25, 31)
    CANCEL = range(31, 32)
    ASK_AGAIN = range(32, 33)
    RACE = range(33, 36)
    LOSE_DRAFTER = range(36, 37)
    CORRUPT_BLOCK = range(37, 38)
    SEND_DRAFTED = range(38, 42)
    MOVE = range(42, 43)
    REPLACE_DRAFTER = range(43, 44)


ACTIONS = [action for action in Action for _ in action.value]


@st.composite
def plans(draw_from: st.DrawFn) -> Plan:
    """Requests of all kinds; their prompts often share whole blocks with others."""
    shared = draw_from(st.sampled_from(TEXTS))[: draw_from(st.sampled_from([0, 1, 16, 17, 32, 40, 48]))]
    own = draw_from(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=not shared, max_size=24))
    return Plan(
        prompt=(*shared, *own),
        max_tokens=draw_from(st.integers(1, 30)),
        sampling=draw_from(st.sampled_from(SAMPLINGS)),
        rule=draw_from(st.sampled_from(list(RULES))),
        salt=draw_from(st.sampled_from(["", "", "", "a"])),
        block_lengths=tuple(draw_from(st.lists(st.integers(0, MAX_DRAFT_TOKENS), min_size=1, max_size=4))),
        plain_rounds=draw_from(st.integers(1, 3)),
        opens_plain=draw_from(st.booleans()),
        stop_token_ids=draw_from(st.sampled_from([frozenset(), frozenset(), frozenset({3})])),
        continues=draw_from(st.sampled_from([False, False, True])),
    )


def carry_out(stack: Stack, action: Action, which: int, left: deque[Plan]) -> None:
    """Does one thing, if it can be done now, to one of the open sessions."""
    clients = stack.open_clients
    client = clients[which % len(clients)] if clients else None
    match action:
        case Action.OPEN if left:
            if stack.open(stack.resolve(left[0])) is not None:
                left.popleft()
        case Action.TURN_TARGET:
            stack.turn_target()
        case Action.TURN_DRAFTER:
            stack.turn_drafter()
        case Action.DELIVER_BLOCK:
            stack.deliver_block()
        case Action.DELIVER_EVENT:
            stack.deliver_event()
        case Action.CANCEL if client is not None:
            stack.close(client)
        case Action.ASK_AGAIN if client is not None:
            stack.ask_again(client)
        case Action.RACE if client is not None:
            stack.race(client)
        case Action.LOSE_DRAFTER if client is not None:
            stack.lose_drafter(client)
        case Action.SEND_DRAFTED if client is not None:
            stack.send_drafted(client)
        case Action.MOVE if client is not None:
            stack.move(client)
        case Action.REPLACE_DRAFTER if client is not None:
            stack.replace_drafter(client)
        case Action.CORRUPT_BLOCK:
            stack.corrupt_next_block = True


def test_random_schedules_change_no_token_of_any_session(models: Models) -> None:
    """Whatever is opened, moved, cancelled, asked twice, refused, cut, lost or late, and in whichever order."""
    seen: Counter[str] = Counter()

    @given(
        requests=st.lists(plans(), min_size=1, max_size=10),
        actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), min_size=80, max_size=250),
        rooms=st.tuples(st.integers(160, 600), st.integers(160, 600)),
        budget=st.sampled_from([1, 3, 16, 40, 512]),
    )
    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    def check(requests: list[Plan], actions: list[tuple[Action, int]], rooms: tuple[int, int], budget: int) -> None:
        stack = Stack(models, *rooms, budget)
        left = deque(replace(plan, seed=seed) for seed, plan in enumerate(requests))
        for action, which in actions:
            carry_out(stack, action, which, left)
        stack.corrupt_next_block = False
        stack.finish(left)
        for client in stack.clients:
            stack.check(client)
        seen.update(stack.seen)
        seen["together"] += sum(count for size, count in stack.target.sizes.items() if size > 1)

    check()
    expected = {
        "together",
        "reused",
        "read in part",
        "refused",
        "closed in a step",
        "block current",
    }  # rarer events, which a run may miss, have tests of their own
    assert expected <= (+seen).keys(), f"the schedules are too tame: {seen}"
