"""The engines on scripted models: what they read, reuse and free, step by step, under the real schedulers."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import every
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_contract import SmallestPacer
from session_specs import changed, draft_spec, target_spec
from tiny_models import ExtendsByReading
from torch import Tensor

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import DraftingStrategy
from draftwire.engine.admission import Room
from draftwire.engine.prefill import SMALLEST_CHUNK
from draftwire.engine.target_session import REPORTED_CHUNK, StepResult, TargetSession
from draftwire.method.distributions import rows_of
from draftwire.method.encoding import Claim, decode, decode_one, encode_dense
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftTimings,
    Fence,
    Permit,
    PlainRun,
    ReceivedBlock,
    SendDrafted,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.models import scripted as scripted_models
from draftwire.models.kv_cache import BLOCK_SIZE, KvCache, blocks_for
from draftwire.models.script import Script, expected_tokens
from draftwire.models.scripted import ScriptedTarget
from draftwire.models.sequence_model import Reading
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.options.scripted import scripted_drafter as scripted_drafting
from draftwire.options.scripted.scripted_drafter import ScriptedDrafter
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.deciding import StillReading
from draftwire_drafter import scheduler as drafting
from draftwire_drafter.engine import DraftEngine
from draftwire_verifier import scheduler as verifying
from draftwire_verifier.engine import TargetEngine
from tests.cache_integrity import check_integrity

CACHE_TOKENS = 2048
CERTAIN = Script(acceptance=(1.0,))
"""All that is drafted is accepted."""
DRAFTER = 7
PERMIT_KEY = bytes(range(16))
PROMPT = list(range(40))
SHARED = list(range(5 * BLOCK_SIZE // 2))
"""Two blocks and a half."""


class Verifier:
    """Scheduler and engine in turn, with a look at the cache's accounts after every step."""

    def __init__(self, script: Script = CERTAIN, cache_tokens: int = CACHE_TOKENS) -> None:
        self.model = ScriptedTarget(script, cache_tokens)
        room, pacer = Room(8, cache_tokens), SmallestPacer()
        context = min(script.context_length, cache_tokens)
        self.engine = TargetEngine(self.model, context)
        self.scheduler = verifying.Scheduler(
            context_length=context, vocab_size=script.vocab_size, max_draft_tokens=8, room=room, pacer=pacer
        )

    def open(self, session_id: int = 1, token_ids: list[int] | None = None, **changes: Any) -> TargetSession:
        ids = PROMPT if token_ids is None else token_ids
        given = {"plain_rounds": 1, "max_len": len(ids) + 100, "rule": "block"} | changes
        spec = target_spec(
            session_id=session_id,
            epoch=0,
            first_round=0,
            choice=0,
            token_ids=ids,
            prompt_len=len(ids),
            sampling=SamplingParams(),
            verifying_key=bytes(KEY_BYTES),
            max_draft_tokens=8,
            stop_token_ids=frozenset(),
            permit_key=PERMIT_KEY,
            **given,
        )
        return self.scheduler.open(spec, lease_id=0)

    def close(self, session_id: int = 1) -> None:
        session = self.scheduler.close(session_id, 0)
        assert session is not None
        self.engine.forget(session.key)
        self.check()

    def steps(self, limit: int = 99) -> Iterator[tuple[StepResult, list[verifying.Completed]]]:
        for _ in range(limit):
            while (step := self.scheduler.next_step()) is None and self.scheduler.holds_for_s is not None:
                time.sleep(self.scheduler.holds_for_s)
            if step is None:
                return
            result = self.engine.step(step)
            self.check()
            yield result, self.scheduler.complete(step, result)

    def run(self) -> list[verifying.Completed]:
        return [completed for _, told in self.steps() for completed in told]

    def offer(self, session: TargetSession, token_ids: list[int], vocab_size: int = 320) -> None:
        rows = torch.zeros(len(token_ids), vocab_size)
        for row, token in zip(rows, token_ids, strict=True):
            row[token] = 1.0
        claim = Claim(token_ids, encode_dense(Encoding.DENSE_FLOAT32, rows.numpy()))
        (draft,) = decode([claim], self.model.vocab_size)
        permit = Permit.make(PERMIT_KEY, 0)
        block = ReceivedBlock(session.fence, token_ids, draft, True, DRAFTER, permit=permit)
        self.scheduler.take_permit(block)
        self.scheduler.offer_block(block)

    def check(self) -> None:
        check_integrity(self.model.cache)
        used = self.model.cache.num_blocks - self.model.cache.num_free_blocks
        reserved = self.model.cache.num_blocks - self.scheduler.room.num_free_blocks
        assert used <= reserved, "nobody uses more than was reserved"


def is_empty(cache: KvCache) -> bool:
    return not cache.sequences and cache.num_free_blocks == cache.num_blocks


# The target's engine


@pytest.mark.parametrize("cache_tokens", [BLOCK_SIZE, 5 * BLOCK_SIZE // 2, CACHE_TOKENS])
def test_warm_up_of_the_target_leaves_the_cache_empty(cache_tokens: int) -> None:
    model = ScriptedTarget(CERTAIN, cache_tokens)
    costs = TargetEngine(model, cache_tokens).warm_up()
    assert is_empty(model.cache)
    check_integrity(model.cache)
    assert all(1 <= size <= blocks_for(cache_tokens) * BLOCK_SIZE and seconds >= 0.0 for size, seconds in costs)


@pytest.mark.parametrize("cache_tokens", [80, CACHE_TOKENS])
def test_warm_up_of_the_target_tries_a_small_and_a_large_step(cache_tokens: int) -> None:
    costs = TargetEngine(ScriptedTarget(Script(read_us=200.0), cache_tokens), cache_tokens).warm_up()
    assert [size for size, _ in costs] == [2, 64]
    assert all(seconds >= 200e-6 * size for size, seconds in costs)


PARTS = 3
LONG_PROMPT = [200] * (SMALLEST_CHUNK * (PARTS - 1) + 1)
"""Takes so many steps beside a running session."""


def test_prompt_is_read_in_parts_beside_a_running_session() -> None:
    verifier = Verifier()
    running = verifier.open(1, plain_rounds=20)
    list(verifier.steps(limit=1))
    reader = verifier.open(2, LONG_PROMPT)
    results = [result for result, _ in verifier.steps(limit=PARTS)]
    waiting = [[type(outcome) is StillReading for outcome in result.outcomes].count(True) for result in results]
    assert waiting == [1] * (PARTS - 1) + [0]
    assert [result.num_tokens - 1 for result in results] == [SMALLEST_CHUNK] * (PARTS - 1) + [1]
    assert len(running.committed) == len(PROMPT) + 1 + PARTS
    assert len(reader.committed) == len(LONG_PROMPT) + 1
    assert (running.num_unread, reader.num_unread) == (1, 1)


def test_step_audits_just_the_blocks_of_rules_that_read_distributions() -> None:
    verifier = Verifier()
    rules = ("block", "typical", "token", "coupled", "block")
    sessions = [verifier.open(number, rule=rule) for number, rule in enumerate(rules)]
    verifier.run()
    for length, session in enumerate(sessions[:-1], start=1):
        verifier.offer(session, expected_tokens(len(session.committed), length))
    verifier.scheduler.run_plain(PlainRun(sessions[-1].fence, 1))
    ((result, _),) = verifier.steps()
    assert [sums is not None for sums in result.audit()] == [True, False, True, False, False]


@every("rule", ["block", "token"])
def test_block_that_is_set_aside_is_audited_and_its_round_is_a_plain_one(rule: str) -> None:
    """Beside one that is used, and one of the other rule. The rounds after it go on as usual."""
    verifier = Verifier()
    aside, used, other = (verifier.open(number, rule=each) for number, each in enumerate((rule, rule, "token")))
    verifier.run()
    for number in range(2):
        for session in (aside, used, other):
            verifier.offer(session, expected_tokens(len(session.committed), 4))
        if number == 0:
            verifier.scheduler.set_aside(aside)
        ((result, told),) = verifier.steps()
        assert all(sums is not None for sums in result.audit())
        verdicts = {session.spec.session_id: verdict for session, verdict in told if isinstance(verdict, Verdict)}
        counts = [(verdicts[each].num_draft_tokens, verdicts[each].num_accepted_tokens) for each in range(3)]
        assert counts == [(0, 0) if number == 0 else (4, 4), (4, 4), (4, 4)]
        if number == 0:
            plain = verdicts[0]
            assert (plain.extra, plain.plain_rounds_left, plain.timings) == (TokenSource.PLAIN, 0, DraftTimings())
            assert plain.token_ids == expected_tokens(len(aside.committed) - 1, 1)


@every("is_closed", [False, True])
@every(
    ("second", "salts", "reused"),
    [
        ([*SHARED[: 2 * BLOCK_SIZE + 1], 7, 8], ("", ""), 2 * BLOCK_SIZE),  # whole blocks
        (SHARED[: 2 * BLOCK_SIZE], ("", ""), BLOCK_SIZE),  # its last token is read in any case
        (SHARED, ("a", "a"), 2 * BLOCK_SIZE),
        (SHARED, ("a", "b"), 0),
        (SHARED, ("a", ""), 0),
    ],
)
def test_beginning_read_under_the_same_salt_is_reused_and_reported(
    second: list[int], salts: tuple[str, str], reused: int, is_closed: bool
) -> None:
    verifier = Verifier()
    verifier.open(1, SHARED, cache_salt=salts[0])
    verifier.run()
    if is_closed:
        verifier.close(1)
    verifier.open(2, second, cache_salt=salts[1])
    steps = list(verifier.steps())
    ((_, verdict),) = steps[-1][1]
    assert isinstance(verdict, Verdict)
    assert verdict.num_cached_tokens == reused
    assert sum(result.num_tokens for result, _ in steps) == len(second) - reused
    assert verifier.scheduler.prefix_tokens == {"queried": len(SHARED) + len(second), "reused": reused}


def test_sessions_that_were_admitted_never_run_out_of_cache() -> None:
    """Three sessions that fill the cache to the last block and decode to their ends."""
    verifier = Verifier(cache_tokens=12 * BLOCK_SIZE)
    sessions = [verifier.open(n, [n] * len(SHARED), plain_rounds=99, max_len=4 * BLOCK_SIZE) for n in (1, 2, 3)]
    assert verifier.scheduler.room.num_free_blocks == 0
    told = verifier.run()
    assert all(isinstance(result, Verdict) for _, result in told)
    assert [len(session.committed) for session in sessions] == [4 * BLOCK_SIZE] * 3


@settings(max_examples=40)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 9 * BLOCK_SIZE // 2), st.integers(0, 1)), min_size=1, max_size=6),
    acceptance=st.floats(0.0, 1.0),
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    leaves=st.integers(0, 12),
)
def test_accounts_of_the_target_add_up_whatever_sessions_do(
    prompts: list[tuple[int, int]], acceptance: float, lengths: list[int], leaves: int
) -> None:
    """`steps` checks the cache after each step; here, too, what each sequence holds."""
    verifier = Verifier(Script(acceptance=(acceptance,)))
    verifier.engine.forget((9, 9))  # which it has never seen
    waiting = list(enumerate(prompts))
    for round_number, length in enumerate(lengths):
        if waiting:
            session_id, (prompt_len, first) = waiting.pop()
            verifier.open(session_id, [first] * prompt_len)
        if round_number == leaves:
            left, _ = next(iter(verifier.scheduler.sessions))
            verifier.close(left)
            waiting.append((left, (5, 7)))  # and is opened anew
        list(verifier.steps(limit=1 + length))
        for session in list(verifier.scheduler.sessions.values()):
            if not session.queued and length:
                verifier.offer(session, expected_tokens(len(session.committed), length))
    verifier.run()
    assert sum(sequence.length for sequence in verifier.model.cache.sequences) == sum(
        len(session.committed) - 1 for session in verifier.scheduler.sessions.values()
    )
    for session_id, _ in list(verifier.scheduler.sessions):
        verifier.close(session_id)
    assert is_empty(verifier.model.cache)


# The drafter's engine


class DraftSide:
    """The drafter's scheduler and engine in turn; blocks are checked against what was asked for."""

    def __init__(self, strategy: DraftingStrategy, cache: KvCache | None = None) -> None:
        self.engine = DraftEngine(strategy)
        self.cache = cache or KvCache(CACHE_TOKENS)
        room, pacer = Room(8, CACHE_TOKENS), SmallestPacer()
        self.scheduler = drafting.Scheduler(context_length=CACHE_TOKENS, max_draft_tokens=8, room=room, pacer=pacer)

    def open(self, session_id: int = 1, token_ids: list[int] | None = None, cache_salt: str = "") -> None:
        ids = PROMPT if token_ids is None else token_ids
        spec = draft_spec(
            session_id=session_id,
            epoch=0,
            choice=0,
            token_ids=ids,
            prompt_len=len(ids),
            sampling=SamplingParams(),
            rule="block",
            drafting_key=bytes(KEY_BYTES),
            stop_token_ids=frozenset(),
            verifier_address="v:1",
            target_vocab_size=300,
            max_draft_tokens=8,
            max_len=len(ids) + 100,
            permit=Permit.make(PERMIT_KEY, 0),
            cache_salt=cache_salt,
        )
        self.scheduler.open(spec, lease_id=0)

    def calibrate(self, new: list[int], number: int, session_id: int = 1, num_draft_tokens: int = 4) -> Calibration:
        known = self.scheduler.sessions[session_id, 0].committed.ids
        committed = [*known, *new]
        fence = Fence(session_id, 0, number, len(committed), CommittedTokens(committed).hash)
        calibration = Calibration(fence, len(known), new, num_draft_tokens)
        self.scheduler.calibrate(calibration)
        return calibration

    def close(self, session_id: int = 1) -> None:
        session = self.scheduler.close(session_id, 0)
        assert session is not None
        self.engine.forget(session.key)
        check_integrity(self.cache)

    def steps(self, limit: int = 99) -> Iterator[tuple[drafting.StepResult, list[drafting.Completed]]]:
        for _ in range(limit):
            step = self.scheduler.next_step()
            if step is None:
                return
            result = self.engine.step(step)
            for item, outcome in zip(step.items, result.outcomes, strict=True):
                if outcome is not None:
                    check_block(outcome, item)
            check_integrity(self.cache)
            reserved = self.cache.num_blocks - self.scheduler.room.num_free_blocks
            assert self.cache.num_blocks - self.cache.num_free_blocks <= reserved
            yield result, self.scheduler.complete(step, result)

    def blocks(self) -> list[DraftBlock]:
        return [each.outcome for _, completed in self.steps() for each in completed if each.outcome is not None]


def check_block(block: DraftBlock, item: drafting.StepItem) -> None:
    asked, length = item.calibration, len(block.token_ids)
    assert block.fence == asked.fence
    assert block.token_ids == expected_tokens(asked.fence.prefix_len, length)
    assert length == asked.num_draft_tokens or item.session.cut_at == block.fence.round
    assert rows_of(decode_one(Claim(block.token_ids, block.distributions), 320)).dense().shape == (length, 320)


def scripted() -> DraftSide:
    return DraftSide(ScriptedDrafter(CERTAIN))


class ScriptedDraftModel(ExtendsByReading, ScriptedTarget):
    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        return super().read(readings)


def with_cache() -> DraftSide:
    """A real drafter, whose forward passes alone are scripted."""
    model = ScriptedDraftModel(CERTAIN, CACHE_TOKENS)
    return DraftSide(LanguageModelDrafter(model, CACHE_TOKENS), model.cache)


either_strategy = pytest.mark.parametrize("make", [scripted, with_cache])


@either_strategy
def test_warm_up_of_the_drafter_leaves_nothing_and_reports_what_was_read(make: Any) -> None:
    side = make()
    costs = side.engine.warm_up()
    assert [size for size, _ in costs] == [2, 64]
    assert all(seconds >= 0.0 for _, seconds in costs)
    assert is_empty(side.cache)
    check_integrity(side.cache)


@either_strategy
def test_drafter_reads_a_prompt_in_parts_beside_a_running_session(make: Any) -> None:
    side = make()
    side.open(1)
    side.blocks()
    side.open(2, LONG_PROMPT)
    opened = []
    for number in range(PARTS):
        side.calibrate([], number, 1)
        ((result, completed),) = side.steps(limit=1)
        assert result.num_read <= SMALLEST_CHUNK + 1
        assert [each.session.spec.session_id for each in completed if each.outcome is not None] == [1]
        opened.append([each.is_opened for each in completed].count(True))
    assert opened == [0] * (PARTS - 1) + [1]


@either_strategy
@pytest.mark.parametrize("is_reading", [False, True])
def test_block_that_is_wanted_before_its_step_has_one_token(make: Any, is_reading: bool) -> None:
    side = make()
    for session_id in (1, 2):
        side.open(session_id)
    if not is_reading:
        side.blocks()
    for session_id in (1, 2):
        side.calibrate([], 0, session_id)
    side.scheduler.send_drafted(SendDrafted(1, 0, 0))
    assert [len(block.token_ids) for block in side.blocks()] == [1, 4]
    for session_id in (1, 2):
        side.calibrate([50], 1, session_id)
    assert [len(block.token_ids) for block in side.blocks()] == [4, 4], "the wish was for one block"


@either_strategy
@pytest.mark.parametrize("num_drawn", [1, 2, 3])
def test_flushed_block_ends_after_the_token_under_way(
    make: Any, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wish comes during the forward pass before the second token and so on, or while a script waits for one."""
    side = make()
    for session_id in (1, 2):
        side.open(session_id)
    side.blocks()
    for session_id in (1, 2):
        side.calibrate([], 0, session_id)
    passes = 0

    def wish(seconds: float) -> None:
        nonlocal passes
        passes += 1
        if passes == num_drawn + 1:  # the first one reads
            side.scheduler.send_drafted(SendDrafted(2, 0, 0))

    for module in (scripted_models, scripted_drafting):
        monkeypatch.setattr(module, "wait", wish)
    blocks = side.blocks()
    # A model's forward pass comes before each token but the first, a script's waiting before each.
    cut = num_drawn + (side.cache.num_free_blocks < side.cache.num_blocks)
    assert [len(block.token_ids) for block in blocks] == [4, cut]


@pytest.mark.parametrize(("salts", "reused"), [(("a", "a"), 32), (("a", "b"), 0)])
def test_beginning_that_another_session_of_the_drafter_has_read_is_reused(salts: tuple[str, str], reused: int) -> None:
    side = with_cache()
    for session_id, salt in enumerate(salts):
        side.open(session_id, cache_salt=salt)
        results = [result for result, _ in side.steps()]
        assert list(results[0].num_reused) == [reused if session_id else 0]
        assert sum(result.num_read for result in results) == 40 - results[0].num_reused[0]
        side.calibrate([9], 1, session_id, 1)  # what was read is offered to others once it has given finite logits
        list(side.steps())
    assert side.scheduler.prefix_tokens == {"queried": 80, "reused": reused}


@settings(max_examples=40)
@given(
    make=st.sampled_from([scripted, with_cache]),
    prompts=st.lists(st.tuples(st.integers(1, 9 * BLOCK_SIZE // 2), st.integers(0, 1)), min_size=1, max_size=5),
    rounds=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=12),
    leaves=st.integers(0, 12),
)
def test_blocks_are_as_requested_and_the_drafters_accounts_add_up(
    make: Callable[[], DraftSide], prompts: list[tuple[int, int]], rounds: list[tuple[int, int, int]], leaves: int
) -> None:
    """Calibrations come before, between and after steps; `steps` checks the cache and the blocks after each."""
    side = make()
    side.engine.forget((9, 9))  # which it has never seen
    waiting = list(enumerate(prompts))
    for number, (num_new, num_draft_tokens, num_steps) in enumerate(rounds):
        if waiting:
            session_id, (prompt_len, first) = waiting.pop()
            side.open(session_id, [first] * prompt_len)
        if number == leaves:
            left, _ = next(iter(side.scheduler.sessions))
            side.close(left)
            waiting.append((left, (5, 7)))  # and is opened anew
        for session_id, _ in list(side.scheduler.sessions):
            length = len(side.scheduler.sessions[session_id, 0].committed)
            new = [*expected_tokens(length, num_new), 9][:num_new] if num_new % 2 else [9] * num_new
            side.calibrate(new, number, session_id, num_draft_tokens)
        list(side.steps(limit=num_steps))
    side.blocks()
    needed = sum(blocks_for(sequence.length) for sequence in side.cache.sequences)
    assert sum(len(sequence.blocks) for sequence in side.cache.sequences) == needed
    for session_id, _ in list(side.scheduler.sessions):
        side.close(session_id)
    assert is_empty(side.cache)


# Lists as long as the vocabulary


class CountedIds(frozenset[int]):
    """Counts how often it is gone through."""

    num_walks = 0

    def __iter__(self) -> Iterator[int]:
        self.num_walks += 1
        return super().__iter__()


def with_long_list(name: str, session: Any) -> CountedIds:
    """Gives a session a list of ids that no script emits, and returns it."""
    unused = CountedIds(range(200, 320))
    if name == "allowed_token_ids":
        unused, params = CountedIds(range(200)), SamplingParams(allowed_token_ids=frozenset({0}))
        object.__setattr__(params, "allowed_token_ids", unused)
        session.spec = changed(session.spec, sampling=params)
    else:
        min_tokens = 50 if name == "stop tokens before min_tokens" else 1
        params = SamplingParams(min_tokens=min_tokens)
        session.spec = changed(session.spec, sampling=params, stop_token_ids=unused)
    return unused


long_lists = every(
    ("name", "walks"), [("allowed_token_ids", 1), ("stop tokens before min_tokens", 1), ("stop tokens after it", 0)]
)


@long_lists
@every("num_rounds", [10, 20])
def test_long_lists_are_read_once_in_a_session_of_the_target(name: str, walks: int, num_rounds: int) -> None:
    verifier = Verifier()
    session = verifier.open(plain_rounds=num_rounds)
    token_ids = with_long_list(name, session)
    if not walks:
        session.spec = changed(session.spec, prompt_len=len(PROMPT) - 1)  # so one was generated before
    told = verifier.run()
    assert [type(result) for _, result in told] == [Verdict] * num_rounds
    assert token_ids.num_walks == walks


@long_lists
@every("num_rounds", [5, 10])
def test_long_lists_are_read_once_in_a_session_of_the_drafter(name: str, walks: int, num_rounds: int) -> None:
    side = with_cache()
    side.open()
    session = side.scheduler.sessions[1, 0]
    token_ids = with_long_list(name, session)
    if not walks:
        session.spec = changed(session.spec, prompt_len=len(PROMPT) - 1)
    for number in range(num_rounds):
        side.calibrate([9] if number else [], number)
        assert [len(block.token_ids) for block in side.blocks()] == [4]
    assert token_ids.num_walks == walks


@every("num_parts", [2, 4])
def test_long_lists_are_read_once_for_all_parts_of_a_processed_prompt(
    num_parts: int,
) -> None:
    verifier = Verifier()
    prompt = PROMPT * (num_parts * REPORTED_CHUNK // len(PROMPT))
    session = verifier.open(token_ids=prompt)
    token_ids = with_long_list("allowed_token_ids", session)
    session.report = LogprobsReport(LogprobsRequest(prompt_logprobs=1, mode=LogprobsMode.PROCESSED))
    assert len(verifier.run()) > num_parts
    assert token_ids.num_walks == 1


@either_strategy
def test_masks_of_a_session_end_with_it(make: Any) -> None:
    verifier, side = Verifier(), make()
    verifier.open()
    side.open()
    verifier.run()
    side.blocks()
    verifier.close()
    side.close()
    assert not verifier.engine._edits
