"""Log-probabilities of a step are those of a plain forward pass over the text, whatever else is in the step."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from cases import every
from definitions import defined_law
from hypothesis import given
from hypothesis import strategies as st
from session_specs import changed, target_spec
from test_target import KEY, REFERENCE, VOCAB_SIZE, WatchedModel, certain, fresh_model, random_ids
from torch import Tensor

from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.target_session import REPORTED_CHUNK
from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import LogprobsPart
from draftwire.method.rounds import (
    CommittedTokens,
    Fence,
    Permit,
    PromptRead,
    ReceivedBlock,
    TargetSessionSpec,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.options.logprobs import reported_logprobs as reading
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.requests.logprobs import MAX_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire.requests.packed_logprobs import PackedTop, pack_top, unpack_top
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime import messages
from draftwire.v1 import session_pb2
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement, StillReading
from draftwire.verification.target import Judging, judge
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.scheduler import Scheduler
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

RAW, PROCESSED = LogprobsMode.RAW, LogprobsMode.PROCESSED
TOLERANCE = 1e-4
SAMPLINGS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(0.0),
    "greedy with penalties": SamplingParams(0.0, repetition_penalty=1.8, presence_penalty=1.0),
    "cold": SamplingParams(0.3),
    "hot": SamplingParams(5.0),
    "top-k": SamplingParams(2.0, top_k=3),
    "top-k 1": SamplingParams(2.0, top_k=1),
    "top-p": SamplingParams(2.0, top_p=0.8),
    "min-p": SamplingParams(3.0, min_p=0.3),
    "bias": SamplingParams(2.0, logit_bias=((3, 2.0), (7, -5.0))),
    "allowed": SamplingParams(2.0, allowed_token_ids=frozenset({0, 1, 4, 5, 9, 10})),
    "min tokens": SamplingParams(2.0, min_tokens=4),
    "repetition": SamplingParams(2.0, repetition_penalty=1.5),
    "presence": SamplingParams(2.0, presence_penalty=1.6),
    "frequency": SamplingParams(2.0, frequency_penalty=0.9),
    "all": SamplingParams(3.0, 8, 0.95, 0.05, 1.3, 0.5, -0.4, ((2, 1.0),), frozenset(range(1, 11)), 5),
}
STOP_TOKENS = frozenset({4, 9})
salts = itertools.count()


model = pytest.fixture(fresh_model)


@torch.inference_mode()
def logits_of(text: Sequence[int]) -> Tensor:
    """A plain forward pass of transformers, `[len(text), vocab] float64`."""
    return REFERENCE(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].double()


def check(token: TokenLogprob, expected: Tensor, token_id: int, num_top: int) -> None:
    """Compares what is said of one token with the log-probabilities in its place."""
    assert token.token_id == token_id
    assert token.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
    best = expected.sort(descending=True).values
    assert len(token.top) == min(num_top, int((expected > -math.inf).sum()))
    for place, (one, value) in enumerate(token.top):
        assert value == pytest.approx(float(expected[one]), abs=TOLERANCE)
        assert value == pytest.approx(float(best[place]), abs=TOLERANCE)
    assert len({one for one, _ in token.top}) == len(token.top)


def check_all(tokens: list[TokenLogprob], start: int, text: Sequence[int], num_top: int, one: Judging) -> None:
    """Compares what is said of the tokens of a text from position `start` on."""
    logits = logits_of(text)
    for position, token in enumerate(tokens, start):
        expected = logits[position - 1].log_softmax(0)
        if wanted_by(one).mode is PROCESSED:
            prompt_len = min(one.prompt_len, position)
            law = defined_law(logits[position - 1].tolist(), one.sampling, text[:position], prompt_len, STOP_TOKENS)
            expected = torch.tensor(law).log()
        check(token, expected, text[position], num_top)


def wanted_by(one: Judging) -> LogprobsRequest:
    assert isinstance(one.report, LogprobsReport)
    return one.report.wanted


def told(verdict: Verdict) -> list[TokenLogprob]:
    return (verdict.logprobs or LogprobsPart()).target


def through_the_wire(tokens: list[TokenLogprob]) -> list[TokenLogprob]:
    """Returns what a gateway receives of a verdict."""
    fence = Fence(1, 0, 0, 1, 1)
    verdict = Verdict(
        fence, [token.token_id for token in tokens], 0, 0, TokenSource.PLAIN, 0, logprobs=LogprobsPart(tokens)
    )
    sent = messages.verdict_to_proto(verdict).SerializeToString()
    return told(messages.verdict_from_proto(session_pb2.Verdict.FromString(sent)))


def make(
    model: WatchedModel, generator: random.Random, committed: list[int], length: int, **changes: object
) -> Judging:
    """A part of a step whose block is made of likely tokens, so that rules accept some."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(int(logits_of(committed + tokens)[-1].argmax()))
    sequence = model.cache.open((), f"logprobs {next(salts)}")
    given = {"prompt_len": generator.randint(1, len(committed)), "stop_token_ids": STOP_TOKENS} | changes
    key = DrawKey(KEY, generator.randrange(10**6), 0)
    rule = given.pop("rule", RULES["block"])
    sampling = given.pop("sampling", SamplingParams())
    return judging_of(sequence, committed, tokens, certain(tokens) if tokens else None, sampling, rule, key, **given)


@every("name", SAMPLINGS)
def test_reported_tokens_match_a_plain_pass_and_reporting_changes_nothing(
    name: str,
) -> None:
    """Every rule, both modes, blocks of 0 to 4 and numbers of likeliest tokens in one step, through the wire."""
    model, others = fresh_model(), list(SAMPLINGS.values())
    generator = random.Random(name)
    parts = [
        make(
            model,
            generator,
            random_ids(generator, generator.randint(1, 20)),
            length,
            rule=rule,
            sampling=sampling,
            report=LogprobsReport(
                LogprobsRequest(generator.choice(numbers), mode=generator.choice(list(LogprobsMode)))
            ),
        )
        for rule in RULES.values()
        for length in range(5)
        for sampling, numbers in ((SAMPLINGS[name], [0, 1, 5, 20]), (generator.choice(others), [None, 0, 3]))
    ]
    silent = [replace(one, sequence=model.cache.open(()), report=None) for one in parts]
    counts = set()
    for one, outcome, untold in zip(parts, judge(model, parts).outcomes, judge(model, silent).outcomes, strict=True):
        assert isinstance(outcome, Judgement)
        assert replace(outcome, logprobs=[]) == untold
        num_top = wanted_by(one).logprobs
        if num_top is None:
            assert outcome.logprobs == []
            continue
        tokens = through_the_wire(outcome.logprobs)
        assert [token.token_id for token in tokens] == outcome.token_ids
        check_all(tokens, len(one.committed), one.committed + outcome.token_ids, num_top, one)
        counts.add(outcome.num_accepted - len(one.draft_tokens))
    assert 0 in counts, "bonus tokens"


def test_nothing_is_computed_for_those_who_do_not_ask(model: WatchedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    taken, reported = Mock(wraps=reading.log_softmax_of), Mock(wraps=reading.reported)
    monkeypatch.setattr(reading, "log_softmax_of", taken)
    monkeypatch.setattr(reading, "reported", reported)
    parts = [make(model, generator, random_ids(generator, 8), length) for length in (0, 3, 2, 4)]
    judge(model, parts)
    assert not taken.called
    assert not reported.called
    assert sum(reading.keep for reading in model.readings) == 1 + 4 + 3 + 5
    parts = [replace(one, sequence=model.cache.open(())) for one in parts]
    parts[1] = replace(parts[1], report=LogprobsReport(LogprobsRequest(3)))
    parts[2] = replace(parts[2], report=LogprobsReport(LogprobsRequest(0, mode=PROCESSED)))
    first, second, third, _ = judge(model, parts).outcomes
    ((_, rows), _), ((rows_read_off, *_), _) = taken.call_args, reported.call_args
    assert (taken.call_count, len(rows)) == (1, 4), "the raw rows of the one who asks for them"
    assert reported.call_count == 1, "of both together, at once"
    assert len(rows_read_off) == len(second.token_ids) + len(third.token_ids)
    assert first.logprobs == []


@every(("chunk", "mode", "num_generated"), [(1, RAW, 0), (7, PROCESSED, 5), (64, RAW, 5), (500, PROCESSED, 0)])
def test_every_token_of_a_prompt_but_the_first_is_reported_once(
    chunk: int, mode: LogprobsMode, num_generated: int
) -> None:
    """However it is read, beside others, and also if a text that goes on elsewhere is longer than its prompt."""
    model = fresh_model()
    generator = random.Random(chunk)
    prompt_len = 150 if chunk > 1 else 12
    committed = random_ids(generator, prompt_len + num_generated)
    for name in ("plain", "all", "greedy", "repetition"):
        wanted = LogprobsRequest(2, 4, mode)
        one = make(
            model,
            generator,
            committed,
            3,
            prompt_len=prompt_len,
            sampling=SAMPLINGS[name],
            report=LogprobsReport(wanted),
            max_read=chunk,
        )
        parts: list[PromptPart] = []
        while True:
            other = make(model, generator, random_ids(generator, 9), 2, report=LogprobsReport(LogprobsRequest(1)))
            outcome, beside = judge(model, [one, other] if chunk % 2 else [other, one]).outcomes[
                :: 1 if chunk % 2 else -1
            ]
            assert isinstance(beside, Judgement)
            check_all(beside.logprobs, 9, other.committed + beside.token_ids, 1, other)
            assert isinstance(outcome, Judgement | StillReading)
            parts += [outcome.prompt] if outcome.prompt is not None else []
            if isinstance(outcome, Judgement):
                break
        assert [part.first_position for part in parts] == [
            1 + sum(len(part.tokens) for part in parts[:index]) for index in range(len(parts))
        ]
        tokens = [token for part in parts for token in part.tokens]
        assert len(tokens) == prompt_len - 1
        check_all(tokens, 1, committed, 4, one)
        check_all(outcome.logprobs, len(committed), committed + outcome.token_ids, 2, one)


def test_prompt_of_one_token_has_nothing_to_report(model: WatchedModel) -> None:
    one = make(model, random.Random(0), [3], 2, report=LogprobsReport(LogprobsRequest(prompt_logprobs=2)))
    (outcome,) = judge(model, [one]).outcomes
    assert isinstance(outcome, Judgement)
    assert (outcome.prompt, outcome.logprobs) == (None, [])


@every("max_read", [10, None])
@every("number", [math.nan, math.inf])
@every("mode", LogprobsMode)
def test_bad_logits_in_a_prompt_fail_its_session_alone(max_read: int | None, number: float, mode: LogprobsMode) -> None:
    model = fresh_model()
    generator = random.Random(2)
    report = LogprobsReport(LogprobsRequest(1, 1, mode))
    one, other = (make(model, generator, random_ids(generator, 20), 0, prompt_len=20, report=report) for _ in range(2))
    model.bad[one.sequence] = (5, number)
    failed, outcome = judge(model, [replace(one, max_read=max_read), other]).outcomes
    assert isinstance(failed, UnavailableError)
    assert one.sequence.length == one.sequence.num_published == 0
    assert isinstance(outcome, Judgement)
    check_all(outcome.logprobs, 20, other.committed + outcome.token_ids, 1, other)
    check_integrity(model.cache)


# Sessions


def make_spec(session_id: int, prompt: list[int], **changes: object) -> TargetSessionSpec:
    spec = target_spec(
        session_id=session_id,
        epoch=0,
        first_round=0,
        choice=0,
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=SamplingParams(),
        rule="block",
        verifying_key=KEY,
        max_draft_tokens=4,
        plain_rounds=3,
        stop_token_ids=frozenset(),
        max_len=len(prompt) + 10,
        permit_key=KEY,
    )
    return changed(spec, **changes)


def make_scheduler() -> Scheduler:
    room, pacer = Room(8, 4096), PrefillPacer(1.0)
    return Scheduler(
        context_length=400,
        vocab_size=VOCAB_SIZE,
        max_draft_tokens=4,
        room=room,
        pacer=pacer,
        report_of=LogprobsReport.of,
    )


def run(scheduler: Scheduler, engine: TargetEngine) -> Iterator[tuple[int, Verdict | PromptRead]]:
    """Yields all events of all sessions, until there is nothing to do."""
    while (step := scheduler.next_step()) is not None:
        for session, event in scheduler.complete(step, engine.step(step)):
            assert isinstance(event, Verdict | PromptRead)
            yield session.spec.session_id, event


def test_reported_prompt_reuses_nothing_and_precedes_the_first_verdict(model: WatchedModel) -> None:
    scheduler = make_scheduler()
    engine = TargetEngine(model, 400)
    prompt = random_ids(random.Random(5), 300)
    scheduler.open(make_spec(1, prompt), 1)
    assert all(isinstance(event, Verdict) and event.logprobs is None for _, event in run(scheduler, engine))
    scheduler.open(make_spec(2, prompt), 1)
    assert [event.num_cached_tokens for _, event in run(scheduler, engine)] == [288] * 3
    scheduler.open(make_spec(3, prompt, logprobs=LogprobsRequest(1, 2)), 1)
    *parts, first, second, third = (event for _, event in run(scheduler, engine))
    assert [len(part.part.tokens) for part in parts] == [REPORTED_CHUNK, REPORTED_CHUNK, 299 - 2 * REPORTED_CHUNK]
    assert all(part.session_id == 3 and part.epoch == 0 for part in parts)
    tokens = [token for part in parts for token in part.part.tokens]
    logits = logits_of(prompt)
    for position, token in enumerate(tokens, 1):
        check(token, logits[position - 1].log_softmax(0), prompt[position], 2)
    assert first.num_cached_tokens == second.num_cached_tokens == third.num_cached_tokens == 0
    assert all(len(told(event)) == 1 and len(told(event)[0].top) == 1 for event in (first, second, third))
    scheduler.open(make_spec(4, prompt, logprobs=LogprobsRequest(1)), 1)
    assert [event.num_cached_tokens for _, event in run(scheduler, engine)] == [288] * 3, "others still share"


def test_verdict_on_a_block_reports_accepted_and_recovered_tokens(model: WatchedModel) -> None:
    scheduler = make_scheduler()
    engine = TargetEngine(model, 400)
    prompt = random_ids(random.Random(6), 30)
    text = list(prompt)
    scheduler.open(make_spec(1, prompt, plain_rounds=1, sampling=SamplingParams(0.0), logprobs=LogprobsRequest(3)), 1)
    for length in (0, 4, 2, 1):
        if length:
            best: list[int] = []
            for place in range(length):
                best.append(int(logits_of(text + best)[-1].argmax()))
                if place == 2:
                    best[-1] = (best[-1] + 1) % VOCAB_SIZE
            draft = decode_one(Claim(best, DraftDistributions(Encoding.ONE_HOT, VOCAB_SIZE)), VOCAB_SIZE)
            session = scheduler.sessions[1, 0]
            assert session.committed.hash == CommittedTokens(text).hash
            received = ReceivedBlock(session.fence, best, draft, True, 9, permit=Permit.make(KEY, 0))
            scheduler.take_permit(received)
            scheduler.offer_block(received)
        ((_, verdict),) = run(scheduler, engine)
        assert isinstance(verdict, Verdict)
        assert verdict.num_accepted_tokens == min(length, 2)
        for place, token in enumerate(told(verdict)):
            row = logits_of(text + verdict.token_ids[:place])[-1]
            check(token, row.log_softmax(0), verdict.token_ids[place], 3)
        assert len(told(verdict)) == len(verdict.token_ids)
        text += verdict.token_ids


# Numbers


@every("name", ["logprobs", "prompt_logprobs"])
@every("count", [-1, MAX_LOGPROBS + 1, 2**32 - 1])
def test_number_of_likeliest_tokens_out_of_range_is_refused_by_name(name: str, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be in 0..20, not {count}"):
        LogprobsRequest(**{name: count})


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, MAX_LOGPROBS)), max_size=8))
def test_likeliest_tokens_survive_their_bytes(shape: list[tuple[int, int]]) -> None:
    tokens = [TokenLogprob(token, -0.5, [(token ^ place, -float(place)) for place in range(n)]) for token, n in shape]
    ids, own = [token.token_id for token in tokens], [token.logprob for token in tokens]
    assert unpack_top(ids, own, pack_top(tokens)) == tokens
    assert unpack_top(ids, [], None) == []


def test_bytes_of_no_places_are_read() -> None:
    assert unpack_top([], [], PackedTop(3, b"", b"")) == []
