"""vLLM's engine by itself: what is read, reused and freed; preemption, room, failures and forms."""

import random
from typing import Any
from unittest import mock

import pytest
import torch

from draftwire.errors import NoRoomError, UnavailableError
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import Verdict
from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary
from draftwire.requests.logprobs import LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.verification import deciding
from draftwire.verification.deciding import Judgement, StillReading
from draftwire_verifier.vllm.vllm_engine import CUT
from on_vllm.duel import PERMIT_KEY, SAMPLINGS, Duel
from on_vllm.models import CONTEXT_LENGTH, ENGINE, RANKS, VOCAB_SIZE

PROMPT = list(range(40, 80))


def duel_of(own: Any, vllm: Any, **given: Any) -> Duel:
    return Duel(own, vllm.engine, random.Random(5), **given)


class Alone:
    """vLLM's engine under the scheduler, without another one."""

    def __init__(self, vllm: Any, own: Any, **given: Any) -> None:
        self.duel = duel_of(own, vllm, **given)
        self.scheduler, self.engine = self.duel.scheduler, vllm.engine

    def open(self, session_id: int, prompt: list[int] = PROMPT, **given: Any) -> Any:
        return self.duel.open(session_id, prompt, **given)

    def close(self, session: Any) -> None:
        self.scheduler.close(*session.key)
        self.engine.forget(session.key)

    def step(self) -> list[Any]:
        step = self.scheduler.next_step()
        return [] if step is None else self.scheduler.complete(step, self.engine.step(step))

    def run(self, limit: int = 2000) -> list[Any]:
        events = []
        for _ in range(limit):
            if not self.scheduler._ready:
                return events
            events += self.step()
        raise AssertionError("sessions never end")


def texts_of(events: list[Any]) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for session, event in events:
        assert isinstance(event, Verdict), event
        texts.setdefault(session.spec.session_id, []).extend(event.token_ids)
    return texts


def test_warm_up_leaves_nothing_behind(vllm) -> None:
    costs = vllm.engine.warm_up()
    assert [num_tokens for num_tokens, _ in costs] == [2, 64]
    assert not vllm.engine._scheduler.requests


def test_model_is_described(vllm, folder) -> None:
    description = vllm.card.description
    assert (description.vocab_size, description.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert description.dtype == "float32"
    assert len(description.weights_fingerprint) == 32


def test_prefix_is_reused_within_a_salt_and_not_across_salts(vllm, own) -> None:
    alone = Alone(vllm, own)
    prompt = [index % 256 for index in range(300)]
    block_size = vllm.engine._scheduler.block_size
    reused = []
    for number, salt in enumerate(["one", "one", "two", "", "", "two"], 1):
        session = alone.open(number, prompt, plain_rounds=1, cache_salt=salt)
        (event,) = [event for _, event in alone.run()]
        reused.append(event.num_cached_tokens)
        alone.close(session)
    hit = 299 // block_size * block_size
    assert hit > 0
    assert reused == [0, hit, 0, 0, hit, hit]


def test_prompts_with_reported_logprobs_are_read_whole(vllm, own) -> None:
    alone = Alone(vllm, own)
    prompt = [index % 256 for index in range(300)]
    for number in (1, 2):
        session = alone.open(number, prompt, plain_rounds=1, logprobs=LogprobsRequest(prompt_logprobs=1))
        events = [event for _, event in alone.run()]
        positions = [
            event.part.first_position + index
            for event in events
            if not isinstance(event, Verdict)
            for index in range(len(event.part.tokens))
        ]
        assert positions == list(range(1, 300)), "each token once"
        alone.close(session)


@pytest.mark.parametrize("length", [1, 2, 40, 300])
def test_block_that_is_there_when_the_session_opens_is_decided(vllm, own, length: int) -> None:
    duel = duel_of(own, vllm)
    session = duel.open(1, [index % 256 for index in range(length)], sampling=SAMPLINGS[0])
    duel.offer(session, duel.block(session, 4, Encoding.ONE_HOT))
    ((_, verdict),) = duel.step()
    assert verdict.num_draft_tokens == 4
    assert verdict.num_accepted_tokens > 0, "greedy drafts, nearly of the target itself"
    assert not duel.parted
    duel.close(session)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_held_block_whose_text_comes_true_is_judged_unasked(vllm, own, sampling: SamplingParams) -> None:
    """Blocks of the next round for two texts: the verdict makes one of them true, or none, on either engine alike."""
    duel = duel_of(own, vllm)
    num_held = 0
    for number in range(1, 21):
        session = duel.open(number, PROMPT, sampling=sampling, max_held_blocks=3)
        block = duel.block(session, 2, Encoding.DENSE_FLOAT32)
        duel.offer(session, block)
        text = [*session.committed.ids, *block.token_ids]
        likeliest = int(duel.logits(text).argmax())
        for token in (likeliest, (likeliest + 1) % VOCAB_SIZE):
            assert duel.scheduler.offer_block(duel.block_ahead(session, [*block.token_ids, token], 2)) is None
        ((_, verdict),) = duel.step()
        if verdict.ahead is not None and verdict.ahead.next_is_held:
            num_held += 1
            assert verdict.token_ids[:2] == block.token_ids
            ((_, following),) = duel.step()
            assert following.num_draft_tokens == 2
        assert not session.queued
        duel.close(session)
    assert 0 < num_held < 20, "some come true, and some do not"
    assert not duel.parted


def test_session_that_waits_reads_nothing(vllm, own) -> None:
    alone = Alone(vllm, own)
    waiting, busy = alone.open(1, plain_rounds=1), alone.open(2, plain_rounds=20)
    alone.run()
    assert len(waiting.committed) == len(PROMPT) + 1
    assert len(busy.committed) == len(PROMPT) + 20
    request = alone.engine._scheduler.requests[alone.engine._names[waiting.key]]
    assert request.num_tokens == len(PROMPT) + 1
    for session in (waiting, busy):
        alone.close(session)


def test_session_can_be_closed_in_the_middle_of_its_prompt(vllm, own) -> None:
    alone = Alone(vllm, own, pacer_tokens=16)
    free = alone.engine._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    session = alone.open(1, [index % 256 for index in range(300)], plain_rounds=1)
    assert alone.step() == []
    assert 0 < session.num_unread < 300
    alone.close(session)
    other = alone.open(2, plain_rounds=2)
    assert len(texts_of(alone.run())[2]) == 2
    alone.close(other)
    assert alone.engine._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_moved_session_goes_on_with_the_same_text(vllm, own) -> None:
    """By ids, with the next round's number and a later epoch: the numbers that decide are the same."""
    alone = Alone(vllm, own)
    whole = alone.open(1, plain_rounds=12, sampling=SamplingParams(1.0))
    expected = texts_of(alone.run())[1]
    alone.close(whole)
    first = alone.open(1, plain_rounds=5, sampling=SamplingParams(1.0))
    begun = texts_of(alone.run())[1]
    alone.close(first)
    moved = alone.open(
        1,
        PROMPT + begun,
        prompt_len=len(PROMPT),
        epoch=1,
        first_round=5,
        plain_rounds=7,
        sampling=SamplingParams(1.0),
        max_len=len(PROMPT) + 120,
    )
    assert begun + texts_of(alone.run())[1] == expected
    alone.close(moved)


def test_text_ends_at_its_longest(vllm, own) -> None:
    alone = Alone(vllm, own)
    prompt = [index % 256 for index in range(CONTEXT_LENGTH - 3)]
    session = alone.open(1, prompt, plain_rounds=9, max_len=CONTEXT_LENGTH)
    assert len(texts_of(alone.run())[1]) == 3
    alone.close(session)
    session = alone.open(2, plain_rounds=1)
    assert len(texts_of(alone.run())[2]) == 1, "the engine goes on"
    alone.close(session)


def test_forced_preemption_leaves_texts_unchanged(vllm, own) -> None:
    """Sessions that nobody admitted take more blocks than there are: vLLM preempts, reads again, and decides alike."""

    def write(num_sessions: int) -> dict[int, list[int]]:
        alone = Alone(vllm, own)
        alone.scheduler.room.kv_cache_tokens = 10**6  # whoever comes is admitted
        for number in range(1, num_sessions + 1):
            alone.open(number, [number, *PROMPT * 6], plain_rounds=40, max_len=500)
        events = []
        while alone.scheduler.sessions:
            events += alone.step()
            for session in list(alone.scheduler.sessions.values()):
                if not session.queued:  # done: those that wait hold their blocks
                    alone.close(session)
        return texts_of(events)

    scheduler = vllm.engine._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    expected = {n: text for n in range(1, 9) for n, text in write_one(vllm, own, n).items()}
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 17)  # 8 sessions of 241 + 40 tokens take 3 each
    preempted = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **more: (preempted.append(1), original(request, *rest, **more))[
        1
    ]
    try:
        assert write(8) == expected
    finally:
        scheduler._preempt_request = original
        pool.free_blocks(held)
    assert preempted, "there was something to see"


def write_one(vllm: Any, own: Any, number: int, prompt: list[int] | None = None) -> dict[int, list[int]]:
    alone = Alone(vllm, own)
    session = alone.open(number, prompt or [number, *PROMPT * 6], plain_rounds=40, max_len=500)
    texts = texts_of(alone.run())
    alone.close(session)
    return texts


def test_full_room_never_preempts(vllm, own) -> None:
    """As many sessions as are admitted, each to its longest text with whole blocks: nobody is evicted. The longest text
    is a little more than whole blocks of vLLM's: in smaller ones, as our own engine has, more would be admitted.
    """
    alone = Alone(vllm, own)
    alone.scheduler.room = vllm.engine.room(ENGINE.max_sessions, vllm.engine.num_cached_tokens)
    scheduler = vllm.engine._scheduler
    sessions: list[Any] = []

    def fill() -> None:
        for number in range(1, 100):
            prompt = [number, *([7] * 251)]
            sessions.append(alone.open(number, prompt, plain_rounds=3, max_len=260, sampling=SAMPLINGS[1]))

    with pytest.raises(NoRoomError):
        fill()
    assert len(sessions) > 40
    with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        alone.run()
        for session in sessions:
            if len(session.committed) + 4 < session.spec.max_len:
                alone.duel.offer(session, alone.duel.block(session, 4, Encoding.ONE_HOT))
        alone.run()
    assert not preempt.call_count
    assert alone.scheduler.room.num_free_blocks * alone.scheduler.room.block_size < 384
    for session in sessions:
        alone.close(session)


@pytest.mark.skipif(RANKS > 1, reason="the logits of another process")
def test_logits_that_are_not_finite_fail_their_session_and_are_not_reused(
    vllm, own, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(vllm, own)
    prompt = [index % 256 for index in range(200)]
    bad, good = alone.open(1, prompt, plain_rounds=1), alone.open(2, plain_rounds=1)
    probabilities = deciding.probabilities_of_spans

    def broken(logits: torch.Tensor, spans: Any) -> torch.Tensor:
        logits[0] = torch.nan
        return probabilities(logits, spans)

    monkeypatch.setattr(deciding, "probabilities_of_spans", broken)
    events = dict(alone.step())
    assert isinstance(events[bad], UnavailableError)
    assert isinstance(events[good], Verdict)
    monkeypatch.undo()
    alone.close(bad)
    again = alone.open(3, prompt, plain_rounds=1)
    ((_, verdict),) = alone.run()
    assert verdict.num_cached_tokens == 0
    for session in (again, good):
        alone.close(session)


@pytest.mark.skipif(RANKS > 1, reason="the fault is injected into this process")
@pytest.mark.parametrize("where", ["deciding", "forward pass"])
def test_step_that_fails_leaves_the_engine_usable(vllm, own, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Its blocks are in the prefix cache before they are computed: what a failed step left there is read by nobody."""
    prompt = [9, *PROMPT * 8]
    assert len(prompt) > 2 * vllm.engine._scheduler.block_size
    expected = write_one(vllm, own, 9, prompt)
    vllm.engine.core.reset_prefix_cache()
    alone = Alone(vllm, own)
    session, other = alone.open(1, plain_rounds=1), alone.open(9, prompt, plain_rounds=40, max_len=500)
    runner = vllm.engine.core.model_executor.driver_worker.worker.model_runner
    if where == "deciding":
        monkeypatch.setattr(deciding, "probabilities_of_spans", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(runner, "_model_forward", lambda *_, **__: 1 / 0)
    step = alone.scheduler.next_step()
    with pytest.raises((UnavailableError, ZeroDivisionError)):
        alone.engine.step(step)
    monkeypatch.undo()
    for one in (session, other):  # as the service does
        alone.close(one)
    alone = Alone(vllm, own)
    again = alone.open(9, prompt, plain_rounds=40, max_len=500)
    events = alone.run()
    assert events[0][1].num_cached_tokens == 0
    assert texts_of(events) == expected
    alone.close(again)


def test_forms_are_followed(vllm, own) -> None:
    form = StructuredOutput.regex("[ab]{60}")
    card = vllm.card
    compiler = FormCompiler(
        FormVocabulary.of(card.tokenizer, card.description.vocab_size, card.description.stop_token_ids)
    )
    duel = duel_of(own, vllm)
    for number in range(1, 9):
        session = duel.open(
            number,
            PROMPT,
            automaton=compiler.compile(form),
            sampling=SamplingParams(structured_output=form),
            plain_rounds=number % 2,
        )
        for _ in range(8):
            if not session.queued:
                duel.offer(session, duel.block(session, 2, Encoding.DENSE_FLOAT32))
            duel.step()
        assert len(session.committed) >= len(PROMPT) + 8
        assert set(session.committed.ids[len(PROMPT) :]) <= set(b"ab")
        duel.close(session)
    assert not duel.parted


def test_full_cache_fails_the_step_instead_of_waiting_for_ever(vllm, own) -> None:
    alone = Alone(vllm, own)
    pool = vllm.engine._scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks())
    session = alone.open(1, plain_rounds=1)
    ((_, event),) = alone.step()
    assert isinstance(event, UnavailableError)
    pool.free_blocks(held)
    alone.close(session)


def test_block_of_which_vllm_takes_a_part_is_reported_in_words(vllm, own, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument that does so is refused; whatever else does must not have the step repeated for ever."""
    alone = Alone(vllm, own)
    session = alone.open(1, plain_rounds=1)
    alone.run()
    alone.duel.offer(session, alone.duel.block(session, 4, Encoding.ONE_HOT))
    monkeypatch.setattr(vllm.engine._scheduler, "max_num_scheduled_tokens", 3)
    ((_, event),) = alone.step()
    assert isinstance(event, UnavailableError)
    assert str(event) == CUT
    alone.close(session)


def test_outcomes_are_typed(vllm, own) -> None:
    alone = Alone(vllm, own, pacer_tokens=16)
    session = alone.open(1, plain_rounds=1)
    kinds = []
    while (step := alone.scheduler.next_step()) is not None:
        result = alone.engine.step(step)
        kinds.append((type(result.outcomes[0]), result.num_unread[0], result.num_tokens))
        alone.scheduler.complete(step, result)
    assert kinds == [(StillReading, 24, 16), (StillReading, 8, 16), (Judgement, 1, 8)]
    assert PERMIT_KEY
    alone.close(session)
