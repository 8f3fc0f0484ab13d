"""How the Python clients resume interrupted completions: with gateways that say what a script tells them.

Every test runs for the blocking stream and for the async one, which is driven from outside its event loop.
"""

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from client_fakes import FINISH, LOST, Call, Code, Failure, Gateways, Step, delta, echo, finish_of, nothing
from gateway_fakes import make_generation

from draftwire.client import AsyncCompletionStream, CompletionStream, Piece, retry_policy
from draftwire.client.request_progress import RequestProgress
from draftwire.client.retry_policy import NOT_BEGUN_SECONDS, RetryPolicy
from draftwire.errors import (
    DraftwireError,
    InvalidRequestError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import PromptPart, TokenLogprob
from draftwire.v1 import gateway_pb2
from draftwire_gateway.server import _event_to_proto
from draftwire_gateway.session.choices import ChoiceEvent
from draftwire_gateway.session.committed_text import Delta
from tests.twins import Driven

RESUME_S = 30.0
Stream = CompletionStream | Driven


@dataclass
class Clock:
    """Time that passes where somebody waits, and the streams that wait."""

    runner: asyncio.Runner | None
    """Of async streams; None where the test is about blocking ones."""
    now: float = 100.0
    pauses: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds + 0.001

    def stream(
        self,
        gateways: Gateways,
        num_gateways: int = 1,
        resume_s: float = RESUME_S,
        timeout_s: float | None = None,
        **asks: Any,
    ) -> Stream:
        request = gateway_pb2.GenerateRequest(**({"text": "prompt", "max_tokens": 9, "seed": 5} | asks))
        progress = RequestProgress(request, RetryPolicy(num_gateways, resume_s, timeout_s))
        if self.runner is None:
            return CompletionStream(gateways.start, progress)
        return Driven(AsyncCompletionStream(gateways.start, progress, nothing), self.runner.run)


@pytest.fixture(params=["blocking", "async"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    async def pause(stream: AsyncCompletionStream, seconds: float) -> None:
        clock.sleep(seconds)

    with asyncio.Runner() as runner:
        clock = Clock(runner if request.param == "async" else None)
        monkeypatch.setattr(retry_policy, "time", clock)
        monkeypatch.setattr(CompletionStream, "_pause", lambda stream, seconds: clock.sleep(seconds))
        monkeypatch.setattr(AsyncCompletionStream, "_pause", pause)
        yield clock


def came_before(request: gateway_pb2.GenerateRequest) -> dict[int, list[int] | None]:
    """What a request says that came of each choice; None of one that is finished."""
    came = {one.choice: None if one.is_finished else list(one.token_ids) for one in request.generated_choices}
    assert len(came) == len(request.generated_choices), "each once"
    return came


def check_the_rest_is_the_same(requests: list[gateway_pb2.GenerateRequest]) -> None:
    for request in requests:
        del request.generated_choices[:]
    assert requests == requests[:1] * len(requests)


def read(stream: Stream) -> list[int]:
    return [token for piece in stream for token in piece.token_ids]


def refused(stream: Stream, kind: type[DraftwireError]) -> None:
    with pytest.raises(kind, check=lambda error: type(error) is kind):
        read(stream)


# Whatever interrupts it


def said_of(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(token), [(token, -float(token)), (token + 1, -9.0)])


def reported(choice: int, *token_ids: int) -> gateway_pb2.GenerateResponse:
    text = "".join(chr(ord("a") + token) for token in token_ids)
    event = Delta(list(token_ids), text, [said_of(token) for token in token_ids], [TokenSource.PLAIN] * len(token_ids))
    return _event_to_proto(ChoiceEvent(make_generation(choice=choice), event))


def prompt_part(first_position: int, *token_ids: int, choice: int = 0) -> gateway_pb2.GenerateResponse:
    part = PromptPart(first_position, [said_of(token) for token in token_ids])
    return _event_to_proto(ChoiceEvent(make_generation(choice=choice), part))


PROMPTS = [[20, 21, 22], [10, 11]]
TWO_PROMPTS = gateway_pb2.PromptList(prompts=[gateway_pb2.Prompt(text="p"), gateway_pb2.Prompt(text="q")])


def parts_of(draw: random.Random, tokens: list[int]) -> list[list[int]]:
    """Cuts tokens into parts, none of which is empty."""
    cuts = [0, *(at for at in range(1, len(tokens)) if draw.random() < 0.5), len(tokens)]
    return [tokens[first:last] for first, last in pairwise(cuts) if first < last]


class Interrupted(Gateways):
    """Gateways with all of the answer to two prompts of two choices each, cut into other messages by each call. Calls
    are lost at random places, by whatever status, or just end. A prompt is sent until a token came of it.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__([])
        self.answers = [[draw.randrange(9) for _ in range(draw.randrange(6))] for _ in range(4)]
        self._draw, self._losses = draw, draw.randrange(6)

    def start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        self._scripts = [self._script(came_before(request))]
        return super().start(request, timeout_s)

    def _script(self, came: dict[int, list[int] | None]) -> list[Step]:
        waiting: list[list[Step]] = []
        begin: list[Step] = []
        for first, prompt in ((0, PROMPTS[0]), (2, PROMPTS[1])):
            if not any(came.get(choice, ()) != () for choice in (first, first + 1)):
                scored = [prompt[1:][at : at + 1] for at in range(len(prompt) - 1)] if self._draw.random() < 0.5 else []
                begin += [prompt_part(at + 1, *part, choice=first) for at, part in enumerate(scored)]
                begin += [] if scored else [prompt_part(1, *prompt[1:], choice=first)]
                begin.insert(self._draw.randrange(len(begin) + 1), echo(first, *prompt))
        for choice, answer in enumerate(self.answers):
            had = came.get(choice, [])
            if had is not None:
                assert had == answer[: len(had)], "a request says what came"
                parts = parts_of(self._draw, answer[len(had) :])
                deltas = [reported(choice, *part) for part in parts]
                waiting.append([*deltas, finish_of(choice, len(PROMPTS[choice // 2]))])
        script = begin
        while any(waiting):
            script.append(self._draw.choice([steps for steps in waiting if steps]).pop(0))
        if self._losses:
            self._losses -= 1
            codes = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL)
            ending: list[Step] = self._draw.choice([[], *([Failure(code)] for code in codes)])
            script = script[: self._draw.randrange(len(script) + 1)] + ending
        return script


def test_whatever_interrupts_it_and_wherever_the_text_is_that_of_one_call(clock: Clock) -> None:
    """Of every choice, with its log-probabilities, its prompt's, and its prompt in front."""
    draw = random.Random(20)
    for number in range(60):
        gateways = Interrupted(draw)
        asks = {"prompts": TWO_PROMPTS, "num_choices": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 2}
        stream = clock.stream(gateways, 2, text=None, **asks)
        pieces = list(stream)
        came = [came_before(request) for request in gateways.requests]
        assert [one.choice for one in stream.completions] == [0, 1, 2, 3], number
        for one, answer in zip(stream.completions, gateways.answers, strict=True):
            prompt, own = PROMPTS[one.choice // 2], [piece for piece in pieces if piece.choice == one.choice]
            assert one.token_ids == [token for piece in own for token in piece.token_ids] == answer
            assert one.text == "".join(piece.text for piece in own)
            assert one.text == f"prompt {one.choice // 2 * 2}: " + "".join(chr(ord("a") + token) for token in answer)
            assert one.logprobs == [said for piece in own for said in piece.logprobs or []]
            assert one.logprobs == [said_of(token) for token in answer]
            assert one.prompt_logprobs == [said_of(token) for token in prompt[1:]]
            assert (one.prompt_text, one.prompt_token_ids) == (f"prompt {one.choice // 2 * 2}: ", prompt)
            told = [said for piece in own for said in piece.prompt_logprobs or []]
            assert told == (one.prompt_logprobs if one.choice % 2 == 0 else []), "once for each prompt"
            assert [piece.prompt_token_ids for piece in own if piece.prompt_token_ids is not None] == [prompt]
            resumed_at = {len(had) for had in (each.get(one.choice) for each in came) if had is not None}
            assert one.num_resumed == len(resumed_at), "an interruption that takes several attempts is one"
        assert gateways.cancelled == 0
        check_the_rest_is_the_same(gateways.requests)


# What scripts end with


def check(
    scripts: list[list[Step]],
    brings: list[int] | type[DraftwireError],
    patience: tuple[Any, ...] = (),
    asks: dict[str, Any] | None = None,
    num_requests: int | None = None,
    num_resumed: int | None = None,
    came: list[dict[int, list[int] | None]] | None = None,
    pauses: list[float] | None = None,
    timeouts: list[float | None] | None = None,
    seconds: tuple[float, float] = (0.0, 1_000.0),
    *,
    clock: Clock,
    name: str,
) -> None:
    """Reads a stream of gateways that say what scripts tell them.

    Args:
        scripts: of one call each.
        brings: tokens, or the error.
        patience: how many gateways there are, how long it may be resumed, and its deadline.
        asks: what the request says else.
        num_requests: how many calls there are.
        num_resumed: how often the completion was interrupted, as it says.
        came: what the requests say that came before.
        pauses: the first ones.
        timeouts: of the calls.
        seconds: how long it is tried, at least and at most.
        clock: of the stream.
        name: of the case.
    """
    clock.now, clock.pauses = 100.0, []
    gateways = Gateways(*scripts)
    stream = clock.stream(gateways, *patience, **(asks or {}))
    try:
        brought: Any = read(stream)
    except DraftwireError as error:
        brought = type(error)
        assert read(stream) == [], f"{name}: what failed is over"
    assert brought == brings, name
    assert gateways.cancelled == (0 if isinstance(brings, list) else 1), f"{name}: what fails is cancelled"
    assert len(gateways.requests) == (num_requests or len(gateways.requests)), name
    assert num_resumed in (None, stream.completion and stream.completion.num_resumed), name
    assert came in (None, [came_before(request) for request in gateways.requests]), name
    assert pauses is None or clock.pauses[: len(pauses)] == pytest.approx(pauses), name
    assert set(clock.pauses[6:17]) <= {2.0}, f"{name}: no pause is longer"
    assert timeouts is None or gateways.timeouts == pytest.approx(timeouts, abs=0.01), name
    assert seconds[0] <= clock.now - 100.0 <= seconds[1], name
    check_the_rest_is_the_same(gateways.requests)


OUTAGE: list[list[Step]] = [[LOST]] * 16
FULL_FOR_A_WHILE = Failure(Code.RESOURCE_EXHAUSTED, retry_ms=3_500)
DOUBLED = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6]
NO_REASON = [gateway_pb2.GenerateResponse(finish=gateway_pb2.GenerateFinish(reason=reason)) for reason in (0, 77)]  # type: ignore[arg-type]
NO_NUMBERS = [
    gateway_pb2.GenerateResponse(delta=gateway_pb2.GenerateDelta(token_ids=[0], logprobs=[value]))
    for value in (float("nan"), 0.5)
]
CASES = {
    "goes on from the tokens that came": partial(
        check,
        [[delta(0, 1), delta(2), LOST], [delta(3), LOST], [delta(4, 5), FINISH]],
        [0, 1, 2, 3, 4, 5],
        came=[{}, {0: [0, 1, 2]}, {0: [0, 1, 2, 3]}],
        num_resumed=2,
    ),
    "several attempts": partial(
        check, [[delta(0), LOST], [LOST], [LOST], [delta(1), LOST], [LOST], [FINISH]], [0, 1], num_resumed=2
    ),
    "the finish alone was lost": partial(check, [[delta(0), LOST], [FINISH]], [0]),
    "lost behind its last finish": partial(
        check, [[finish_of(1), delta(1), finish_of(0), LOST]], [1], asks={"num_choices": 2}, num_requests=1
    ),
    "finished choices": partial(
        check,
        [
            [delta(0, choice=0), delta(5, choice=1), finish_of(1), delta(7, choice=3), LOST],
            [delta(8, choice=3), delta(1, choice=0), finish_of(0), LOST],
            [finish_of(3), delta(6, choice=2), finish_of(2)],
        ],
        [0, 5, 7, 8, 1, 6],
        asks={"num_choices": 4},
        came=[{}, {0: [0], 1: None, 3: [7]}, {0: None, 1: None, 3: [7, 8]}],
    ),
    "refused": partial(
        check,
        [[delta(0), Failure(Code.INVALID_ARGUMENT)], [FINISH]],
        InvalidRequestError,
        patience=(2,),
        num_requests=1,
    ),
    "late": partial(
        check, [[delta(0), Failure(Code.DEADLINE_EXCEEDED)], [FINISH]], UnavailableError, patience=(2,), num_requests=1
    ),
    "not to be resumed": partial(
        check, [[delta(0), LOST], [FINISH]], UnavailableError, patience=(2, 0.0), num_requests=1
    ),
    "more choices than there can be": partial(
        check, [[Failure(Code.INVALID_ARGUMENT)]], InvalidRequestError, asks={"num_choices": 2**32 - 1}
    ),
    "no choices": partial(check, [[Failure(Code.INVALID_ARGUMENT)]], InvalidRequestError, asks={"num_choices": 0}),
    # How long
    "growing pauses, for as long as asked": partial(
        check,
        [[delta(0), LOST], [LOST]],
        UnavailableError,
        pauses=[*DOUBLED, *[2.0] * 11],
        seconds=(RESUME_S - 2.1, RESUME_S + 0.1),
    ),
    "patience anew with every token: twice 25 s": partial(
        check,
        [[delta(0), LOST], *OUTAGE, [delta(1), LOST], *OUTAGE, [FINISH]],
        [0, 1],
        pauses=2 * [*DOUBLED, *[2.0] * 11],
        seconds=(1.5 * RESUME_S, 2 * RESUME_S),
    ),
    "patience anew with a finish: twice 25 s": partial(
        check,
        [[delta(0), LOST], *OUTAGE, [finish_of(1), LOST], *OUTAGE, [FINISH]],
        [0],
        asks={"num_choices": 2},
        pauses=2 * [*DOUBLED, *[2.0] * 11],
    ),
    "a prompt that comes again and again is no progress": partial(
        check,
        [[prompt_part(1, 30), LOST]],
        UnavailableError,
        patience=(2,),
        asks={"prompt_logprobs": 0},
        seconds=(RESUME_S - 2.1, 100.0),
    ),
    "a deadline": partial(
        check, [[delta(0), LOST], [LOST]], UnavailableError, patience=(1, RESUME_S, 3.0), seconds=(0.0, 2.999)
    ),
    "what is left of a deadline": partial(
        check,
        [[delta(0), LOST], [LOST], [LOST], [FINISH]],
        [0],
        patience=(1, RESUME_S, 3.0),
        timeouts=[3.0, 3.0, 2.9, 2.7],
    ),
    "no deadline": partial(check, [[delta(0), LOST], [FINISH]], [0], timeouts=[None, None]),
    "full, and begun": partial(
        check, [[delta(0), LOST], [FULL_FOR_A_WHILE], [delta(1), FINISH]], [0, 1], pauses=[0.0, 3.5]
    ),
    # Not begun
    "one address": partial(check, [[LOST]], UnavailableError, num_requests=2, seconds=(0.0, 0.1)),
    "one address, which led to a gateway that stopped": partial(
        check, [[LOST], [delta(0), FINISH]], [0], num_resumed=0, num_requests=2, seconds=(0.0, 0.1)
    ),
    "one address, full": partial(check, [[FULL_FOR_A_WHILE]], NoRoomError, num_requests=1, seconds=(0.0, 0.0)),
    "several gateways, for a while": partial(
        check,
        [[LOST]],
        UnavailableError,
        patience=(2,),
        seconds=(NOT_BEGUN_SECONDS - 2.1, NOT_BEGUN_SECONDS + 0.1),
    ),
    "began anew": partial(
        check,
        [[LOST], [LOST], [delta(0), FINISH]],
        [0],
        patience=(2,),
        num_resumed=0,
        num_requests=3,
        came=[{}, {}, {}],
    ),
    "full gateways": partial(check, [[FULL_FOR_A_WHILE]], NoRoomError, patience=(3,), num_requests=3),
    # What is not believed
    **{
        f"not believed, {number}": partial(check, [script], ProtocolViolationError, patience=(2,), asks=asks)
        for number, (script, asks) in enumerate(
            [
                ([delta(0), delta(0, choice=7), FINISH], {}),
                *(([finish], {}) for finish in NO_REASON),
                ([delta(0), FINISH], {"logprobs": 0}),
                *(([message, FINISH], {"logprobs": 0}) for message in NO_NUMBERS),
                *(([prompt_part(2, 31), finish_of(0, length)], {"prompt_logprobs": 0}) for length in (2, 3)),
                ([prompt_part(1, 30), finish_of(0, 3)], {"prompt_logprobs": 0}),
                ([delta(0), finish_of(0, 3)], {"prompt_logprobs": 0}),
                ([delta(0), FINISH], {"echo": True}),
                *(
                    ([*script, finish_of(0), finish_of(1)], {"num_choices": 2})
                    for script in (
                        [delta(0, choice=2)],
                        [finish_of(2)],
                        [echo(2, 1)],
                        [prompt_part(1, 3, choice=2)],
                        [finish_of(1), delta(0, choice=1)],
                        [finish_of(1), finish_of(1)],
                    )
                ),
            ]
        )
    },
}


def test_stream_brings_or_raises_what_its_gateways_leave_it_in_time(clock: Clock) -> None:
    for name, case in CASES.items():
        case(clock=clock, name=name)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_seed_is_sent_again_if_the_caller_gave_one_and_else_none_is(clock: Clock, seed: int | None) -> None:
    """At first, where nothing came yet, and when resuming. What is reported is the seed of each choice's last part."""

    def finish_under(seed: int, choice: int) -> gateway_pb2.GenerateResponse:
        finish = finish_of(choice)
        finish.finish.seed = seed
        return finish

    gateways = Gateways(
        [LOST],
        [delta(0), delta(1, choice=1), finish_under(3, 1), LOST],
        [LOST],
        [delta(2), finish_under(9, 0)],
    )
    stream = clock.stream(gateways, 2, seed=seed, num_choices=2)
    assert read(stream) == [0, 1, 2]
    assert len(gateways.requests) == 4
    sent = [request.seed if request.HasField("seed") else None for request in gateways.requests]
    assert sent == [seed] * 4
    assert not any(request.has_random_seed for request in gateways.requests)
    assert [one.seed for one in stream.completions] == [9, 3]


def test_completion_has_only_what_was_asked_and_statistics_usual_names(
    clock: Clock,
) -> None:
    numbers = gateway_pb2.GenerationStatistics(
        num_drafts=4,
        num_draft_tokens=12,
        num_accepted_tokens=6,
        acceptance_histogram=[1, 1, 1, 1],
        mean_acceptance_length=2.5,
        draft_acceptance_rate=0.5,
    )
    finish = gateway_pb2.GenerateFinish(reason=gateway_pb2.FINISH_REASON_LENGTH, statistics=numbers)
    stream = clock.stream(Gateways([delta(0), gateway_pb2.GenerateResponse(finish=finish)]))
    assert [(piece.logprobs, piece.prompt_logprobs) for piece in stream] == [(None, None)], "and no empty list"
    done = stream.completion
    assert done is not None
    assert (done.logprobs, done.prompt_logprobs, done.acceptance_histogram) == (None, None, [1, 1, 1, 1])
    assert (done.num_spec_steps, done.num_draft_tokens, done.num_accepted_draft_tokens) == (4, 12, 6)
    assert (done.mean_acceptance_length, done.draft_acceptance_rate) == (2.5, 0.5)


# What is left, taken or cancelled


def test_stream_left_early_is_cancelled_and_not_taken_for_finished(clock: Clock) -> None:
    """Also by a `with` block, whose end cancels nothing that has ended."""
    gateways = Gateways([delta(0), delta(1), FINISH])
    stream = clock.stream(gateways)
    for _ in stream:
        break
    assert gateways.cancelled == 1
    for _ in range(2):
        refused(stream, UnavailableError)
    with clock.stream(gateways) as stream:
        assert next(stream).token_ids == [0]
        assert gateways.cancelled == 1
    stream.close()
    assert gateways.cancelled == 2
    with clock.stream(gateways) as stream:
        assert read(stream) == [0, 1]
    assert gateways.cancelled == 2


def test_pieces_are_taken_singly_and_a_loop_goes_on_behind_them(clock: Clock) -> None:
    gateways = Gateways([delta(0), delta(1), LOST], [delta(2), FINISH])
    stream = clock.stream(gateways)
    assert [next(stream).token_ids for _ in range(2)] == [[0], [1]]
    assert read(stream) == [2]
    assert (next(stream, None), next(stream, None), gateways.cancelled) == (None, None, 0)
    assert stream.completion is not None
    assert (stream.completion.token_ids, stream.completion.text) == ([0, 1, 2], "abc")


def test_cancelled_stream_is_unavailable_whatever_its_gateway_reports(clock: Clock) -> None:
    """One message holds the echoes of both choices. Nothing is resumed."""

    class CancellingCall(Call):
        def __iter__(self) -> Iterator[gateway_pb2.GenerateResponse]:
            yield delta(0)
            stream.cancel()
            yield from super().__iter__()

    for code in (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT, Code.CANCELLED):
        gateways = Gateways([Failure(code)])
        gateways.kind = CancellingCall
        stream = clock.stream(gateways, 2)
        assert next(stream).token_ids == [0]
        for _ in range(3):
            with pytest.raises(UnavailableError, match="was cancelled"):
                next(stream)
        assert (len(gateways.requests), gateways.cancelled) == (1, 1), code
    stream = clock.stream(Gateways([echo(0, 9), finish_of(0), finish_of(1)]), 2, num_choices=2, echo=True)
    assert next(stream).choice == 0
    stream.cancel()
    refused(stream, UnavailableError)


def test_stream_that_is_cancelled_while_it_waits_is_not_resumed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    gateways = Gateways([delta(0), LOST], [FINISH])
    stream = clock.stream(gateways)
    monkeypatch.setattr(clock, "sleep", lambda seconds: stream.cancel())
    refused(stream, UnavailableError)
    assert len(gateways.requests) == 1


# Pauses, in real time

FULL = Failure(Code.RESOURCE_EXHAUSTED, retry_ms=60_000)


def paused_progress() -> RequestProgress:
    request = gateway_pb2.GenerateRequest(text="prompt", max_tokens=9, seed=5)
    return RequestProgress(request, RetryPolicy(1, 1_000.0, None))


def async_stream(gateways: Gateways, prepare: Callable[[], Awaitable[Any]] = nothing) -> AsyncCompletionStream:
    return AsyncCompletionStream(gateways.start, paused_progress(), prepare)


@pytest.mark.parametrize("is_async", [False, True])
def test_cancelling_a_stream_ends_its_pause(is_async: bool) -> None:
    gateways = Gateways([delta(0), FULL])
    with asyncio.Runner() as runner:
        blocking: Any = None if is_async else CompletionStream(gateways.start, paused_progress())
        stream = blocking or Driven(async_stream(gateways), runner.run)
        assert next(stream).token_ids == [0]
        started_at = time.monotonic()
        if is_async:
            runner.get_loop().call_later(0.1, stream.cancel)
        else:
            threading.Timer(0.1, stream.cancel).start()
        refused(stream, UnavailableError)
    assert 0.05 < time.monotonic() - started_at < RESUME_S
    assert len(gateways.requests) == 1


async def test_wait_for_the_server_ends_with_its_stream_and_with_its_task() -> None:
    gateways, server = Gateways([FINISH]), asyncio.Event()
    first, second = (async_stream(gateways, server.wait) for _ in range(2))
    asyncio.get_running_loop().call_later(0.05, first.cancel)
    with pytest.raises(UnavailableError, match="was cancelled"):
        await asyncio.wait_for(anext(first), RESUME_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(second), 0.05)
    assert len(asyncio.all_tasks()) == 1, "nobody waits any more"
    assert gateways.requests == []


async def test_pause_of_an_async_stream_lasts_as_long_as_it_should() -> None:
    gateways = Gateways([delta(0), Failure(Code.RESOURCE_EXHAUSTED, retry_ms=300)], [delta(1), FINISH])
    stream = async_stream(gateways)
    started_at = time.monotonic()
    assert [piece.token_ids async for piece in stream] == [[0], [1]]
    assert time.monotonic() - started_at >= 0.3


# A blocking stream that another thread cancels between two steps of its reader: the fakes cancel there


def test_cancel_while_the_next_call_is_made_ends_that_call() -> None:
    made: list[Gateways] = []

    def start(request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        if made:
            stream.cancel()
        made.append(Gateways([delta(len(made)), LOST]))
        return made[-1].start(request, timeout_s)

    stream = CompletionStream(start, paused_progress())
    assert next(stream).token_ids == [0]
    refused(stream, UnavailableError)
    assert [gateways.cancelled > 0 for gateways in made] == [True, True]


def test_cancel_while_a_message_is_taken_leaves_nothing_of_it() -> None:
    progress = paused_progress()
    stream = CompletionStream(Gateways([delta(0), delta(1), FINISH]).start, progress)

    def take(response: gateway_pb2.GenerateResponse) -> list[Piece]:
        stream.cancel()
        return [Piece([0], "a")]

    for _ in range(2):
        with patch.object(progress, "take", take), pytest.raises(UnavailableError, match="was cancelled"):
            next(stream)


def test_cancel_before_a_piece_is_handed_out_is_no_error_of_the_program() -> None:
    stream = CompletionStream(Gateways([delta(0), FINISH]).start, paused_progress())

    class Racing(deque[Piece]):
        def popleft(self) -> Piece:
            stream.cancel()
            return super().popleft()

    stream._pieces = Racing([Piece([0], "a")])
    with pytest.raises(UnavailableError, match="was cancelled"):
        next(stream)


# An async stream, whose call and whose task may be cancelled


async def test_async_loop_that_is_left_cancels_the_call_soon() -> None:
    gateways = Gateways([delta(0), delta(1), FINISH])
    async for _ in async_stream(gateways):
        break
    for _ in range(5):  # turns of the event loop, which closes the generator
        await asyncio.sleep(0)
    assert gateways.cancelled == 1


async def test_cancelled_call_is_no_cancelled_task_and_that_cancels_its_call() -> None:
    """`grpc.aio` raises the same in both cases."""

    class Silent(Call):
        async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
            yield delta(0)
            if is_call_cancelled:
                raise asyncio.CancelledError
            waiting.set()
            await asyncio.sleep(1_000.0)

    is_call_cancelled, waiting, gateways = True, asyncio.Event(), Gateways([delta(1), FINISH])
    gateways.kind = Silent
    stream = async_stream(gateways)
    assert (await anext(stream)).token_ids == [0]
    gateways.kind = Call
    assert [piece.token_ids async for piece in stream] == [[1]]
    assert stream.completion is not None
    assert stream.completion.num_resumed == 1
    gateways.kind, is_call_cancelled = Silent, False
    stream = async_stream(gateways)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.wait_for(waiting.wait(), RESUME_S)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert gateways.cancelled == 1
