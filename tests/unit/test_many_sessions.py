"""Many sessions in the same steps write, each of them, what it would write alone.

The schedulers and engines of verifier and drafter are joined without transport by a small gateway. Models are float64,
so that the rounding of differently shaped batches cannot change a token: tokens are compared for equality. (A draw
that lies within 1e-12 of a border would differ; about one in 10^8 runs of this file draws one.)
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from session_specs import draft_spec, target_spec
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.errors import BlockViolationError, NoRoomError, Violation
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.distributions import draw, race, rows_of
from draftwire.method.encoding import Claim, DraftDistributions, decode, decode_one
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    Fence,
    FenceVerdict,
    Permit,
    PlainRun,
    ReceivedBlock,
    SendDrafted,
    Verdict,
)
from draftwire.method.sampling import SMALLEST, Span, probabilities_of_spans
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, BlockBatch, KeyedNoise, rule_named, verify
from draftwire.verification.deciding import NEAR_TIE, StillReading
from draftwire.verification.target import judge
from draftwire_drafter import scheduler as drafting
from draftwire_drafter.engine import DraftEngine
from draftwire_verifier import engine as target_engine
from draftwire_verifier import scheduler as verifying
from draftwire_verifier.draft_waits import DraftWaits
from tests.cache_integrity import check_integrity
from tests.tiny_models import save_tiny_model, with_exact_norms

torch.set_num_threads(1)

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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Models]:
    """Pairs whose drafters know as many tokens as the target, fewer, and more."""
    sizes = (VOCAB_SIZE, VOCAB_SIZE - 2, VOCAB_SIZE + 2)
    return [load_pair(tmp_path_factory.mktemp("pair"), size) for size in sizes]


@pytest.fixture(scope="module")
def models(pairs: list[Models]) -> Models:
    return pairs[0]


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
    choice: int = 0
    """Which of a request's texts it writes; each draws with numbers of its own."""

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

    def budget(self, unread: Sequence[int], sessions_run: bool, is_alone: bool = False) -> int:
        return self.tokens


def limits_of(room: int, budget: int) -> dict:
    """What a scheduler keeps to."""
    admitted = {"context_length": CONTEXT_LENGTH, "max_draft_tokens": MAX_DRAFT_TOKENS, "room": Room(64, room)}
    return {**admitted, "pacer": TightPacer(1.0, tokens=budget)}


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
            check_integrity(self.cache)
            for key in self._posted:
                self.engine.forget(key)
            self._posted.clear()
        else:
            completed = self.scheduler.complete(self._step, self._result)
            self._step = self._result = None
            return completed
        check_integrity(self.cache)
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
        check_integrity(self.cache)

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
        self.target_probs: dict[tuple[bytes, int], Tensor] = {}
        """What the rules saw, by verifying key and round."""
        self.corrupt_next_block = False
        target, drafter = (
            torch_model(decoder_of(models.target), target_room),
            torch_model(decoder_of(models.drafter), drafter_room),
        )
        self.target = Half(
            verifying.Scheduler(vocab_size=VOCAB_SIZE, waits=DraftWaits(float), **limits_of(target_room, budget)),
            target_engine.TargetEngine(target, CONTEXT_LENGTH),
            target.cache,
        )
        self.drafter = Half(
            drafting.Scheduler(**limits_of(drafter_room, budget)),
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
        spec = target_spec(
            session_id=client.session_id,
            epoch=client.epoch,
            first_round=len(client.rounds),
            choice=plan.choice,
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
        spec = draft_spec(
            session_id=client.session_id,
            epoch=client.epoch,
            choice=plan.choice,
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

    def corrupt_block(self) -> None:
        self.corrupt_next_block = True

    def hold_block(self) -> None:
        """Lets the oldest block be overtaken by the others, if its drafter was replaced."""
        if self.blocks and self.blocks[0][1] < self.clients[self.blocks[0][0].fence.session_id].permit_number:
            self.blocks.rotate(-1)

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
        client.asked = 0
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
            self.drafter.scheduler.send_drafted(SendDrafted(client.session_id, client.epoch, len(client.rounds)))

    def lose_drafter(self, client: Client) -> None:
        """Goes on without a drafter, whose block may still be on its way."""
        if client.has_drafter:
            client.has_drafter = False
            self.drafter.close(client.session_id, client.epoch)
            if client.asked:
                self.race(client)

    def ask_again(self, client: Client) -> None:
        """Asks for the block of a round again: a drafter that was asked before has nothing more to do for it."""
        if client.has_drafter and client.asked:
            self.drafter.scheduler.calibrate(Calibration(client.fence, len(client.committed), [], client.asked))

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
                    self.target_probs[key.key, key.round] = rows[row, : len(judging.draft_tokens) + 1]
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
            *(block.timings, block.permit),
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
        distributions = block.distributions if block else None
        prefix_len = len(client.committed)
        client.rounds.append(Decided(prefix_len, drafted, distributions, verdict.token_ids, verdict.num_near_ties))
        client.committed.append(verdict.token_ids)
        client.asked = 0
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
            seen = self.target_probs[plan.key(Role.VERIFYING), number]
            assert (seen - target_probs).abs().max() < 1e-9, "the rule saw the target's own rows"
            draft_probs = target_probs.new_zeros(length, VOCAB_SIZE)
            if done.distributions is not None:
                rows = [plan.probs(draft_logits[number, end - 1], readable_text[:end]) for end in places[:-1]]
                drawn_from = torch.stack(rows).float()  # as it would be sent
                key = DrawKey(plan.key(Role.DRAFTING), plan.choice, number)
                if rule.is_coupled:
                    words = torch.tensor([key.text_words] * length)
                    times = exponentials(words, torch.tensor(places[:-1]), drawn_from.shape[1])
                    assert race(drawn_from, times).winners.tolist() == done.draft_tokens
                else:
                    assert draw(drawn_from, uniforms([key], length)[0]).tolist() == done.draft_tokens
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
            key = DrawKey(plan.key(Role.VERIFYING), plan.choice, number)
            outcome = verify(rule, blocks, KeyedNoise([key], [done.prefix_len], device))
            accepted = done.draft_tokens[: int(outcome.num_accepted)]
            assert done.token_ids == [*accepted, int(outcome.extra_tokens)]
            bound = NEAR_TIE / max(plan.sampling.temperature, SMALLEST)
            assert done.num_near_ties == int(outcome.num_near_ties(bound))


PIECES = [[generator.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)] for generator in map(random.Random, range(3))]
TEXTS = [[token for piece in order for token in PIECES[piece]] for order in ([0, 1, 2, 0], [0, 2, 1, 1], [1, 1, 0, 2])]
"""Prompts are beginnings of these, so that many of them share blocks, and have equal blocks after other beginnings."""


def mixed_plans(count: int) -> list[Plan]:
    """Returns requests of all kinds, whose prompts begin alike or not."""
    plans = []
    for index in range(count):
        generator = random.Random(index)
        num_shared = generator.choice([0, 5, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
        shared = TEXTS[index % 2][:num_shared]
        own = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 20))]
        plans.append(
            Plan(
                prompt=(*shared, *own),
                max_tokens=generator.randint(8, 40),
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                rule=list(RULES)[index % len(RULES)],
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


def test_sessions_together_write_what_each_writes_in_one_process(models: Models) -> None:
    plans = mixed_plans(20)
    stack = Stack(models, budget=24)
    for plan in plans[:4]:
        stack.open(plan)
    for _ in range(6):
        stack.turn_all()
    stack.finish(plans[4:])  # finds what the first ones have read
    for plan, text in zip(plans, texts_of(stack), strict=True):
        target, drafter = (
            torch_model(decoder_of(models.target), CONTEXT_LENGTH),
            torch_model(decoder_of(models.drafter), CONTEXT_LENGTH),
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


def test_second_turn_of_a_chat_reuses_what_the_first_has_written(models: Models) -> None:
    stack = Stack(models)
    first = stack.open(Plan(tuple(TEXTS[2][: BLOCK_SIZE + 4]), 2 * BLOCK_SIZE, SamplingParams(), block_lengths=(5,)))
    assert first is not None
    stack.finish()
    second = stack.open(Plan((*first.committed.ids, 3, 1), 20, SamplingParams(), block_lengths=(5,), seed=1))
    assert second is not None
    stack.finish()
    for client in (first, second):
        stack.check(client)
    for half in (stack.target, stack.drafter):
        assert half.scheduler.prefix_tokens["reused"] == len(first.committed) // BLOCK_SIZE * BLOCK_SIZE


LOSSLESS = [name for name, one in RULES.items() if one.is_lossless]


@pytest.mark.parametrize("rule", [LOSSLESS[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in LOSSLESS[1:])])
def test_session_moved_again_and_again_writes_what_it_would_have_unmoved(models: Models, rule: str) -> None:
    """Whatever counts from the prompt, as penalties and min_tokens do, or by rounds, as random numbers do."""
    plans = [
        Plan(
            tuple(TEXTS[number % 3][: 18 + number]),
            24,
            replace(sampling, min_tokens=15),
            rule,
            block_lengths=(5, 3, 0),
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


ACTIONS = {
    "open": 4,
    "turn_target": 8,
    "turn_drafter": 12,
    "deliver_block": 3,
    "deliver_event": 6,
    "corrupt_block": 4,
    "hold_block": 2,
    "close": 1,
    "ask_again": 1,
    "race": 2,
    "lose_drafter": 1,
    "send_drafted": 8,
    "move": 1,
    "replace_drafter": 4,
}
"""What may happen next, and how likely; from `close` on, to one session."""
OF_A_SESSION = list(ACTIONS)[7:]
EVENTS = {
    *("together", "reused", "read in part", "refused", "refused by the drafter", "closed in a step", "moved"),
    *("drafter replaced", "block current", "block stale", "block refused"),
    *("block shorter than wanted",),
}
"""What schedules must have been through to prove anything."""


def random_plan(generator: random.Random, seed: int) -> Plan:
    """A request of any kind; prompts often share whole blocks with others."""
    choice = generator.choice
    shared = choice(TEXTS)[: choice([0, 1, 16, 17, 32, 40, 48])]
    own = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(not shared, 24))]
    return Plan(
        prompt=(*shared, *own),
        max_tokens=generator.randint(1, 30),
        sampling=choice(SAMPLINGS),
        rule=choice(list(RULES)),
        salt=choice(["", "", "", "a"]),
        block_lengths=tuple(generator.randint(0, MAX_DRAFT_TOKENS) for _ in range(generator.randint(1, 4))),
        plain_rounds=generator.randint(1, 3),
        opens_plain=choice([True, False]),
        stop_token_ids=choice([frozenset(), frozenset(), frozenset({3})]),
        continues=choice([False, False, True]),
        seed=seed,
        choice=seed % 3,
    )


def carry_out(stack: Stack, action: str, which: int, left: deque[Plan]) -> None:
    """Does one thing, if it can be done now, to one of the open sessions."""
    clients = stack.open_clients
    if action == "open":
        if left and stack.open(stack.resolve(left[0])) is not None:
            left.popleft()
    elif action not in OF_A_SESSION:
        getattr(stack, action)()
    elif clients:
        getattr(stack, action)(clients[which % len(clients)])


SLOW_SEEDS = [pytest.param(range(first, first + 24), marks=pytest.mark.slow) for first in (16, 40, 64)]


@pytest.mark.parametrize("seeds", [range(16), *SLOW_SEEDS], ids=str)
def test_random_schedules_change_no_token_of_any_session(pairs: list[Models], seeds: range) -> None:
    """Whatever is opened, moved, cancelled, asked twice, refused, cut, lost or late, and in whichever order."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        generator = random.Random(seed)
        rooms = [generator.randint(160, 600) for _ in range(2)]
        stack = Stack(generator.choice(pairs), *rooms, generator.choice([1, 3, 16, 40, 512]))
        left = deque(random_plan(generator, number) for number in range(generator.randint(4, 10)))
        for action in generator.choices(list(ACTIONS), list(ACTIONS.values()), k=generator.randint(100, 300)):
            carry_out(stack, action, generator.randrange(10), left)
        stack.corrupt_next_block = False
        stack.finish(left)
        for client in stack.clients:
            stack.check(client)
        seen.update(stack.seen)
        seen["together"] += sum(count for size, count in stack.target.sizes.items() if size > 1)
    assert (+seen).keys() >= EVENTS, f"the schedules are too tame: {seen}"
