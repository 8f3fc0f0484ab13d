"""How the Python clients resume interrupted completions: with gateways that say what a script tells them.

Every test runs for the blocking stream and for the async one, which is driven from outside its event loop.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from client_fakes import FINISH, LOST, Call, Code, Failure, Gateways, Step, delta, echo, finish_of
from gateway_fakes import make_generation

from draftwire.client import AsyncCompletionStream, Completion, CompletionStream, Piece, patience
from draftwire.client.patience import NOT_BEGUN_SECONDS, Patience
from draftwire.client.progress import Progress
from draftwire.errors import (
    DraftwireError,
    InvalidRequestError,
    NoRoomError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.logprobs import PromptPart, TokenLogprob
from draftwire.services.gateway.choices import ChoiceEvent
from draftwire.services.gateway.loop import Delta
from draftwire.services.gateway.server import _event_to_proto
from draftwire.token_source import TokenSource
from draftwire.v1 import gateway_pb2

RESUME_S = 30.0


@dataclass
class Clock:
    """Time that passes where somebody waits."""

    is_async: bool
    """Which of the streams the test is about."""
    now: float = 100.0
    pauses: list[float] = field(default_factory=list)
    runners: list[asyncio.Runner] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds + 0.001


@pytest.fixture(params=["blocking", "async"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(request.param == "async")

    async def pause(stream: AsyncCompletionStream, seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(CompletionStream, "_pause", lambda stream, seconds: clock.sleep(seconds))
    monkeypatch.setattr(AsyncCompletionStream, "_pause", pause)
    yield clock
    for runner in clock.runners:
        runner.close()


class Driven(Iterator[Piece]):
    """An async stream that is read as a blocking one is."""

    def __init__(self, stream: AsyncCompletionStream, runner: asyncio.Runner) -> None:
        self._stream, self._runner = stream, runner
        self.cancel = stream.cancel

    def __iter__(self) -> Iterator[Piece]:
        pieces = aiter(self._stream)
        try:
            while (piece := self._run(anext(pieces, None))) is not None:
                yield piece
        finally:
            self._run(pieces.aclose())

    def __next__(self) -> Piece:
        try:
            return self._run(anext(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> "Driven":
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._run(self._stream.__aexit__(*error))

    def close(self) -> None:
        self._run(self._stream.aclose())

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    @property
    def completions(self) -> list[Completion]:
        return self._stream.completions

    def _run(self, awaited: Any) -> Any:
        async def wait() -> Any:
            return await awaited

        return self._runner.run(wait())


async def nothing() -> None: ...


Stream = CompletionStream | Driven


def open_stream(gateways: Gateways, clock: Clock, request: gateway_pb2.GenerateRequest, patience: Patience) -> Stream:
    progress = Progress(request, patience)
    if clock.is_async:
        clock.runners.append(asyncio.Runner())
        return Driven(AsyncCompletionStream(gateways.start, progress, nothing), clock.runners[-1])
    return CompletionStream(gateways.start, progress)


def stream_of(
    gateways: Gateways, clock: Clock, num_gateways: int = 1, resume_s: float = RESUME_S, timeout_s: float | None = None
) -> Stream:
    request = gateway_pb2.GenerateRequest(text="prompt", max_tokens=9, seed=5)
    return open_stream(gateways, clock, request, Patience(num_gateways, resume_s, timeout_s))


def came_before(request: gateway_pb2.GenerateRequest) -> dict[int, list[int] | None]:
    """What a request says that came of each choice; None of one that is finished."""
    return {one.choice: None if one.is_finished else list(one.token_ids) for one in request.generated_choices}


def read(stream: Stream) -> list[int]:
    return [token for piece in stream for token in piece.token_ids]


def refused(stream: Stream, kind: type[DraftwireError]) -> None:
    with pytest.raises(kind) as raised:
        read(stream)
    assert type(raised.value) is kind


def test_completion_goes_on_from_the_tokens_that_came_and_asks_for_the_same_otherwise(clock: Clock) -> None:
    gateways = Gateways([delta(0, 1), delta(2), LOST], [delta(3), LOST], [delta(4, 5), FINISH])
    stream = stream_of(gateways, clock)
    assert read(stream) == [0, 1, 2, 3, 4, 5]
    assert [came_before(request) for request in gateways.requests] == [{}, {0: [0, 1, 2]}, {0: [0, 1, 2, 3]}]
    for request in gateways.requests:
        del request.generated_choices[:]
        assert request == gateways.requests[0]
    assert stream.completion is not None
    assert (stream.completion.text, stream.completion.num_resumed) == ("abcdef", 2)
    assert stream.completion.token_ids == [0, 1, 2, 3, 4, 5]


def test_stream_that_is_left_before_its_end_is_cancelled(clock: Clock) -> None:
    gateways = Gateways([delta(0), delta(1), FINISH])
    for _ in stream_of(gateways, clock):
        break
    assert gateways.cancelled == 1


def test_stream_that_was_left_is_not_taken_for_a_finished_one(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), delta(1), FINISH]), clock)
    for _ in stream:
        break
    for _ in range(2):
        refused(stream, UnavailableError)


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT])
def test_cancelled_stream_is_unavailable_whatever_its_gateway_says(clock: Clock, code: grpc.StatusCode) -> None:
    """Every time that it is read."""

    class Cancelling(Gateways):
        def start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
            return CancellingCall(self, [])

    class CancellingCall(Call):
        def __iter__(self) -> Iterator[gateway_pb2.GenerateResponse]:
            yield delta(0)
            stream.cancel()
            raise Failure(code)

    stream = stream_of(Cancelling([]), clock)
    assert next(stream).token_ids == [0]
    for _ in range(3):
        with pytest.raises(UnavailableError, match="was cancelled"):
            next(stream)


def test_one_piece_is_taken_without_ending_the_stream(clock: Clock) -> None:
    gateways = Gateways([delta(0), delta(1), LOST], [delta(2), FINISH])
    stream = stream_of(gateways, clock)
    assert [next(stream).token_ids for _ in range(3)] == [[0], [1], [2]]
    assert (next(stream, None), next(stream, None)) == (None, None)
    assert gateways.cancelled == 0
    assert stream.completion is not None
    assert stream.completion.token_ids == [0, 1, 2]


def test_loop_goes_on_behind_pieces_that_were_taken(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), delta(1), delta(2), FINISH]), clock)
    assert next(stream).token_ids == [0]
    assert read(stream) == [1, 2]


def test_end_of_a_with_block_cancels_what_still_runs(clock: Clock) -> None:
    gateways = Gateways([delta(0), delta(1), FINISH])
    with stream_of(gateways, clock) as stream:
        assert next(stream).token_ids == [0]
        assert gateways.cancelled == 0
    stream.close()
    assert gateways.cancelled == 1
    with stream_of(gateways, clock) as stream:
        assert read(stream) == [0, 1]
    assert gateways.cancelled == 1


def test_stream_that_failed_is_over(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), Failure(Code.INVALID_ARGUMENT)]), clock)
    refused(stream, InvalidRequestError)
    assert read(stream) == []
    assert stream.completion is None


def test_cancelled_stream_gives_nothing_more_of_what_had_come(clock: Clock) -> None:
    """One message holds the echoes of both choices."""
    stream = asking(Gateways([echo(0, 9), finish_of(0), finish_of(1)]), clock, num_choices=2, echo=True)
    assert next(stream).choice == 0
    stream.cancel()
    with pytest.raises(UnavailableError):
        next(stream)


def test_stream_that_breaks_the_protocol_is_cancelled(clock: Clock) -> None:
    gateways = Gateways([delta(0), delta(0, choice=7), FINISH])
    refused(stream_of(gateways, clock), ProtocolViolationError)
    assert gateways.cancelled == 1


def test_stream_that_is_read_whole_is_not_cancelled(clock: Clock) -> None:
    gateways = Gateways([delta(0), FINISH])
    assert read(stream_of(gateways, clock)) == [0]
    assert gateways.cancelled == 0


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL])
def test_whatever_cuts_a_stream_is_an_interruption(clock: Clock, code: grpc.StatusCode) -> None:
    assert read(stream_of(Gateways([delta(0), Failure(code)], [delta(1), FINISH]), clock)) == [0, 1]


def test_stream_that_ends_without_a_finish_is_an_interruption(clock: Clock) -> None:
    assert read(stream_of(Gateways([delta(0)], [delta(1), FINISH]), clock)) == [0, 1]


def test_completion_whose_finish_alone_was_lost_gets_it(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), LOST], [FINISH]), clock)
    assert read(stream) == [0]
    assert stream.completion is not None


@pytest.mark.parametrize(
    ("code", "kind"), [(Code.INVALID_ARGUMENT, InvalidRequestError), (Code.DEADLINE_EXCEEDED, UnavailableError)]
)
def test_what_trying_again_does_not_help_is_raised_at_once(
    clock: Clock, code: grpc.StatusCode, kind: type[DraftwireError]
) -> None:
    gateways = Gateways([delta(0), Failure(code)])
    refused(stream_of(gateways, clock, num_gateways=2), kind)
    assert len(gateways.requests) == 1


def test_completion_that_its_user_cancelled_is_not_resumed(clock: Clock) -> None:
    gateways = Gateways([delta(0), Failure(Code.CANCELLED)])
    stream = stream_of(gateways, clock, num_gateways=2)
    pieces = iter(stream)
    next(pieces)
    stream.cancel()
    with pytest.raises(UnavailableError):
        next(pieces)
    assert (len(gateways.requests), gateways.cancelled) == (1, 1)


def test_it_is_tried_for_as_long_as_asked_with_growing_pauses(clock: Clock) -> None:
    started_at = clock.now
    refused(stream_of(Gateways([delta(0), LOST], [LOST]), clock), UnavailableError)
    assert RESUME_S - 2.1 < clock.now - started_at <= RESUME_S + 0.1
    assert clock.pauses[:7] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert set(clock.pauses[7:]) == {2.0}


def test_patience_starts_anew_with_every_token(clock: Clock) -> None:
    """Twice 25 s, where 30 are allowed."""
    started_at = clock.now
    outage: list[list[Step]] = [[LOST]] * 16
    gateways = Gateways([delta(0), LOST], *outage, [delta(1), LOST], *outage, [FINISH])
    assert read(stream_of(gateways, clock)) == [0, 1]
    assert clock.pauses == pytest.approx(2 * [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, *[2.0] * 11])
    assert clock.now - started_at > 1.5 * RESUME_S


def test_interruption_that_takes_several_attempts_is_one(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), LOST], [LOST], [LOST], [delta(1), LOST], [LOST], [FINISH]), clock)
    assert read(stream) == [0, 1]
    assert stream.completion is not None
    assert stream.completion.num_resumed == 2


def test_gateway_that_finishes_for_no_reason_is_not_believed(clock: Clock) -> None:
    for reason in (0, 77):
        finish = gateway_pb2.GenerateFinish(reason=reason)  # type: ignore[arg-type]
        gateways = Gateways([gateway_pb2.GenerateResponse(finish=finish)])
        refused(stream_of(gateways, clock), ProtocolViolationError)


def test_resuming_may_be_switched_off(clock: Clock) -> None:
    gateways = Gateways([delta(0), LOST])
    refused(stream_of(gateways, clock, num_gateways=2, resume_s=0.0), UnavailableError)
    assert len(gateways.requests) == 1


def test_deadline_of_the_completion_ends_it(clock: Clock) -> None:
    started_at = clock.now
    refused(stream_of(Gateways([delta(0), LOST], [LOST]), clock, timeout_s=3.0), UnavailableError)
    assert clock.now - started_at < 3.0


def test_every_call_has_what_is_left_of_the_deadline(clock: Clock) -> None:
    gateways = Gateways([delta(0), LOST], [LOST], [LOST], [FINISH])
    read(stream_of(gateways, clock, timeout_s=3.0))
    assert gateways.timeouts == pytest.approx([3.0, 3.0, 2.9, 2.7], abs=0.01)
    read(stream_of(gateways, clock))
    assert gateways.timeouts[-1] is None


def test_stream_that_is_cancelled_while_it_waits_is_not_resumed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    gateways = Gateways([delta(0), LOST], [FINISH])
    stream = stream_of(gateways, clock)
    monkeypatch.setattr(clock, "sleep", lambda seconds: stream.cancel())
    refused(stream, UnavailableError)
    assert len(gateways.requests) == 1


def test_full_gateway_is_asked_again_when_it_says_where_a_completion_has_begun(clock: Clock) -> None:
    full = Failure(Code.RESOURCE_EXHAUSTED, retry_ms=3_500)
    assert read(stream_of(Gateways([delta(0), LOST], [full], [delta(1), FINISH]), clock)) == [0, 1]
    assert clock.pauses == pytest.approx([0.0, 3.5])


def test_new_completion_is_refused_at_once_by_a_single_gateway(clock: Clock) -> None:
    gateways = Gateways([LOST])
    refused(stream_of(gateways, clock), UnavailableError)
    assert (len(gateways.requests), clock.pauses) == (1, [])


def test_new_completion_is_tried_for_a_while_where_there_are_several_gateways(clock: Clock) -> None:
    assert read(stream_of(Gateways([LOST], [LOST], [delta(0), FINISH]), clock, num_gateways=2)) == [0]
    started_at = clock.now
    gateways = Gateways([LOST])
    refused(stream_of(gateways, clock, num_gateways=2), UnavailableError)
    assert NOT_BEGUN_SECONDS - 2.1 < clock.now - started_at <= NOT_BEGUN_SECONDS + 0.1
    assert all(not request.generated_choices for request in gateways.requests)


def test_full_gateways_are_asked_once_each_for_a_new_completion(clock: Clock) -> None:
    gateways = Gateways([Failure(Code.RESOURCE_EXHAUSTED, retry_ms=3_500)])
    refused(stream_of(gateways, clock, num_gateways=3), NoRoomError)
    assert len(gateways.requests) == 3


def test_completion_that_began_anew_was_not_resumed(clock: Clock) -> None:
    stream = stream_of(Gateways([LOST], [delta(0), FINISH]), clock, num_gateways=2)
    assert read(stream) == [0]
    assert stream.completion is not None
    assert stream.completion.num_resumed == 0


def said_of(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(token), [(token, -float(token)), (token + 1, -9.0)])


def reported(*token_ids: int) -> gateway_pb2.GenerateResponse:
    sources = [TokenSource.PLAIN] * len(token_ids)
    event = Delta(list(token_ids), "", [said_of(token) for token in token_ids], sources)
    return _event_to_proto(ChoiceEvent(make_generation(), event))


def prompt_part(first_position: int, *token_ids: int, choice: int = 0) -> gateway_pb2.GenerateResponse:
    part = PromptPart(first_position, [said_of(token) for token in token_ids])
    return _event_to_proto(ChoiceEvent(make_generation(choice=choice), part))


def asking(gateways: Gateways, clock: Clock, **wanted: Any) -> Stream:
    request = gateway_pb2.GenerateRequest(**({"text": "prompt", "max_tokens": 9, "seed": 5} | wanted))
    return open_stream(gateways, clock, request, Patience(2, RESUME_S, None))


def test_resumed_completion_keeps_its_log_probabilities(clock: Clock) -> None:
    gateways = Gateways(
        [prompt_part(1, 30, 31), reported(0, 1), LOST], [reported(2), LOST], [reported(3), finish_of(0, 3)]
    )
    stream = asking(gateways, clock, logprobs=2, prompt_logprobs=2)
    pieces = list(stream)
    for piece in pieces[1:]:
        assert piece.logprobs == [said_of(token) for token in piece.token_ids]
        assert piece.prompt_logprobs is None
    assert (pieces[0].token_ids, pieces[0].prompt_logprobs) == ([], [said_of(30), said_of(31)])
    assert stream.completion is not None
    assert stream.completion.token_ids == [0, 1, 2, 3]
    assert stream.completion.logprobs == [said_of(token) for token in range(4)]
    assert stream.completion.prompt_logprobs == [said_of(30), said_of(31)]
    assert all(request.logprobs == 2 for request in gateways.requests)


def test_prompt_that_comes_again_because_no_token_came_is_told_once(clock: Clock) -> None:
    parts = [prompt_part(1, 30, 31), prompt_part(3, 32)]
    gateways = Gateways(
        [parts[0], LOST], [*parts, LOST], [prompt_part(1, 30), prompt_part(2, 31, 32), reported(0), finish_of(0, 4)]
    )
    stream = asking(gateways, clock, logprobs=0, prompt_logprobs=2)
    told = [piece.prompt_logprobs for piece in stream if piece.prompt_logprobs is not None]
    assert told == [[said_of(30), said_of(31)], [said_of(32)]]
    assert stream.completion is not None
    assert stream.completion.prompt_logprobs == [said_of(30), said_of(31), said_of(32)]


def test_gateway_that_leaves_out_what_was_asked_for_is_not_believed(clock: Clock) -> None:
    refused(asking(Gateways([delta(0), FINISH]), clock, logprobs=0), ProtocolViolationError)
    refused(asking(Gateways([prompt_part(2, 31), finish_of(0, 3)]), clock, prompt_logprobs=0), ProtocolViolationError)
    refused(asking(Gateways([prompt_part(1, 30), finish_of(0, 3)]), clock, prompt_logprobs=0), ProtocolViolationError)
    refused(asking(Gateways([delta(0), finish_of(0, 3)]), clock, prompt_logprobs=0), ProtocolViolationError)


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_number_that_is_no_log_probability_is_not_believed(clock: Clock, value: float) -> None:
    message = gateway_pb2.GenerateDelta(token_ids=[0], logprobs=[value])
    gateways = Gateways([gateway_pb2.GenerateResponse(delta=message), FINISH])
    refused(asking(gateways, clock, logprobs=0), ProtocolViolationError)


def test_prompt_that_comes_again_and_again_is_given_up(clock: Clock) -> None:
    """Its next part is what no verifier survives: what is known already is no progress."""
    refused(asking(Gateways([prompt_part(1, 30), LOST]), clock, prompt_logprobs=0), UnavailableError)
    assert clock.now >= RESUME_S


def test_completion_without_log_probabilities_has_none_instead_of_an_empty_list(clock: Clock) -> None:
    stream = stream_of(Gateways([delta(0), FINISH]), clock)
    assert [(piece.logprobs, piece.prompt_logprobs) for piece in stream] == [(None, None)]
    assert stream.completion is not None
    assert (stream.completion.logprobs, stream.completion.prompt_logprobs) == (None, None)


def test_statistics_have_the_names_of_other_servers_too(clock: Clock) -> None:
    numbers = gateway_pb2.GenerationStatistics(
        num_drafts=4,
        num_draft_tokens=12,
        num_accepted_tokens=6,
        acceptance_histogram=[1, 1, 1, 1],
        mean_acceptance_length=2.5,
        draft_acceptance_rate=0.5,
    )
    finish = gateway_pb2.GenerateFinish(reason=gateway_pb2.FINISH_REASON_LENGTH, statistics=numbers)
    stream = stream_of(Gateways([gateway_pb2.GenerateResponse(finish=finish)]), clock)
    assert read(stream) == []
    completion = stream.completion
    assert completion is not None
    assert (completion.num_spec_steps, completion.num_draft_tokens, completion.num_accepted_draft_tokens) == (4, 12, 6)
    assert (completion.mean_acceptance_length, completion.draft_acceptance_rate) == (2.5, 0.5)
    assert completion.acceptance_histogram == [1, 1, 1, 1]


# Several choices

PROMPTS = gateway_pb2.PromptList(prompts=[gateway_pb2.Prompt(text="p"), gateway_pb2.Prompt(text="q")])


def test_unfinished_choices_are_resumed_in_one_request_and_finished_ones_are_not_asked_for_again(clock: Clock) -> None:
    gateways = Gateways(
        [delta(0, choice=0), delta(5, choice=1), finish_of(1), delta(7, choice=3), LOST],
        [delta(8, choice=3), delta(1, choice=0), finish_of(0), LOST],
        [finish_of(3), delta(6, choice=2), finish_of(2)],
    )
    stream = asking(gateways, clock, num_choices=4)
    assert [(piece.choice, piece.token_ids) for piece in stream] == [
        (0, [0]), (1, [5]), (3, [7]), (3, [8]), (0, [1]), (2, [6])
    ]  # fmt: skip
    assert [came_before(request) for request in gateways.requests] == [
        {},
        {0: [0], 1: None, 3: [7]},
        {0: None, 1: None, 3: [7, 8]},
    ]
    assert [completion.token_ids for completion in stream.completions] == [[0, 1], [5], [6], [7, 8]]
    assert [completion.choice for completion in stream.completions] == [0, 1, 2, 3]
    assert [completion.num_resumed for completion in stream.completions] == [1, 0, 0, 2]
    assert [completion.text for completion in stream.completions] == ["ab", "f", "g", "hi"]


def test_stream_that_breaks_behind_its_last_finish_is_complete(clock: Clock) -> None:
    gateways = Gateways([finish_of(1), delta(1), finish_of(0), LOST])
    stream = asking(gateways, clock, num_choices=2)
    assert read(stream) == [1]
    assert (len(gateways.requests), len(stream.completions)) == (1, 2)


def test_echo_begins_every_text_of_its_prompt_once(clock: Clock) -> None:
    """The second call sends the second prompt again, of which nothing had come."""
    gateways = Gateways(
        [echo(0, 9, 9), echo(2, 8), delta(0, choice=0), delta(1, choice=1), LOST],
        [echo(2, 8), finish_of(0), delta(2, choice=2), finish_of(3), finish_of(2), finish_of(1)],
    )
    stream = asking(gateways, clock, text=None, prompts=PROMPTS, num_choices=2, echo=True)
    pieces = list(stream)
    assert [(piece.choice, piece.text, piece.prompt_token_ids) for piece in pieces[:4]] == [
        (0, "prompt 0: ", [9, 9]), (1, "prompt 0: ", [9, 9]), (2, "prompt 2: ", [8]), (3, "prompt 2: ", [8])
    ]  # fmt: skip
    assert all(piece.prompt_token_ids is None for piece in pieces[4:])
    texts = ["prompt 0: a", "prompt 0: b", "prompt 2: c", "prompt 2: "]
    assert [completion.text for completion in stream.completions] == texts
    assert ["".join(piece.text for piece in pieces if piece.choice == choice) for choice in range(4)] == texts
    assert [completion.token_ids for completion in stream.completions] == [[0], [1], [2], []]
    assert [completion.prompt_token_ids for completion in stream.completions] == [[9, 9]] * 2 + [[8]] * 2
    assert [completion.prompt_text for completion in stream.completions] == ["prompt 0: "] * 2 + ["prompt 2: "] * 2


def test_completions_of_a_prompt_share_what_is_said_of_it(clock: Clock) -> None:
    gateways = Gateways(
        [
            prompt_part(1, 40, choice=2),
            prompt_part(1, 30, 31),
            *(finish_of(choice, 3) for choice in (1, 0)),
            *(finish_of(choice, 2) for choice in (3, 2)),
        ]
    )
    stream = asking(gateways, clock, text=None, prompts=PROMPTS, num_choices=2, prompt_logprobs=2)
    assert [piece.choice for piece in stream] == [2, 0]
    said = [[said_of(30), said_of(31)]] * 2 + [[said_of(40)]] * 2
    assert [completion.prompt_logprobs for completion in stream.completions] == said


@pytest.mark.parametrize(
    "script",
    [
        [delta(0, choice=2)],
        [finish_of(2)],
        [echo(2, 1)],
        [prompt_part(1, 3, choice=2)],
        [finish_of(1), delta(0, choice=1)],
        [finish_of(1), finish_of(1)],
    ],
)
def test_choice_that_was_not_asked_for_or_is_finished_is_not_believed(clock: Clock, script: list[Step]) -> None:
    refused(asking(Gateways([*script, finish_of(0), finish_of(1)]), clock, num_choices=2), ProtocolViolationError)


def test_gateway_that_keeps_the_prompt_for_itself_is_not_believed(clock: Clock) -> None:
    refused(asking(Gateways([delta(0), FINISH]), clock, echo=True), ProtocolViolationError)


def test_request_for_more_choices_than_there_can_be_costs_nothing_here(clock: Clock) -> None:
    gateways = Gateways([Failure(Code.INVALID_ARGUMENT)])
    refused(asking(gateways, clock, num_choices=2**32 - 1), InvalidRequestError)
    refused(asking(gateways, clock, num_choices=0), InvalidRequestError)


# Pauses, in real time

FULL = Failure(Code.RESOURCE_EXHAUSTED, retry_ms=60_000)


def paused_progress() -> Progress:
    request = gateway_pb2.GenerateRequest(text="prompt", max_tokens=9, seed=5)
    return Progress(request, Patience(1, 1_000.0, None))


def test_cancelling_a_blocking_stream_ends_its_pause() -> None:
    gateways = Gateways([delta(0), FULL])
    stream = CompletionStream(gateways.start, paused_progress())
    started_at = time.monotonic()
    threading.Timer(0.1, stream.cancel).start()
    refused(stream, UnavailableError)
    assert 0.05 < time.monotonic() - started_at < RESUME_S
    assert len(gateways.requests) == 1


async def test_cancelling_an_async_stream_ends_its_pause() -> None:
    gateways = Gateways([delta(0), FULL])
    stream = AsyncCompletionStream(gateways.start, paused_progress(), nothing)
    await anext(stream)
    started_at = time.monotonic()
    asyncio.get_running_loop().call_later(0.1, stream.cancel)
    with pytest.raises(UnavailableError, match="was cancelled"):
        await anext(stream)
    assert 0.05 < time.monotonic() - started_at < RESUME_S
    assert len(gateways.requests) == 1


async def test_cancelling_an_async_stream_ends_the_wait_for_the_server() -> None:
    async def prepare() -> None:
        try:
            await asyncio.sleep(1_000.0)
        finally:
            ended.set()

    gateways, ended = Gateways([FINISH]), asyncio.Event()
    stream = AsyncCompletionStream(gateways.start, paused_progress(), prepare)
    asyncio.get_running_loop().call_later(0.05, stream.cancel)
    with pytest.raises(UnavailableError, match="was cancelled"):
        await asyncio.wait_for(anext(stream), RESUME_S)
    assert ended.is_set()
    assert gateways.requests == []


async def test_cancelled_task_ends_the_wait_for_the_server() -> None:
    async def prepare() -> None:
        await asyncio.sleep(1_000.0)

    gateways = Gateways([FINISH])
    stream = AsyncCompletionStream(gateways.start, paused_progress(), prepare)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.05)
    assert gateways.requests == []


# A blocking stream that another thread cancels between two steps of its reader: the fakes cancel there


def test_cancel_while_the_next_call_is_made_ends_that_call() -> None:
    calls: list[Call] = []

    class Interrupted(Gateways):
        def start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
            if calls:
                stream.cancel()
            calls.append(Noting(self, [delta(len(calls)), LOST]))
            return calls[-1]

    class Noting(Call):
        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

    stream = CompletionStream(Interrupted([]).start, paused_progress())
    assert next(stream).token_ids == [0]
    refused(stream, UnavailableError)
    assert [call.is_cancelled for call in calls if isinstance(call, Noting)] == [True, True]


def test_cancel_while_a_message_is_taken_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = paused_progress()
    stream = CompletionStream(Gateways([delta(0), delta(1), FINISH]).start, progress)
    take = progress.take

    def cancelling(response: gateway_pb2.GenerateResponse) -> list[Piece]:
        stream.cancel()
        return take(response)

    monkeypatch.setattr(progress, "take", cancelling)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="was cancelled"):
            next(stream)


def test_cancel_before_a_piece_is_handed_out_is_no_error_of_the_program() -> None:
    class Racing(deque[Piece]):
        def __bool__(self) -> bool:
            had_some = len(self) > 0
            stream.cancel()
            return had_some

        def popleft(self) -> Piece:
            if self:
                return super().popleft()
            raise IndexError

    stream = CompletionStream(Gateways([delta(0), FINISH]).start, paused_progress())
    stream._pieces = Racing([Piece([0], "a")])
    with pytest.raises(UnavailableError, match="was cancelled"):
        next(stream)


async def test_pause_of_an_async_stream_lasts_as_long_as_it_should() -> None:
    gateways = Gateways([delta(0), Failure(Code.RESOURCE_EXHAUSTED, retry_ms=300)], [delta(1), FINISH])
    stream = AsyncCompletionStream(gateways.start, paused_progress(), nothing)
    started_at = time.monotonic()
    assert [piece.token_ids async for piece in stream] == [[0], [1]]
    assert time.monotonic() - started_at >= 0.3


async def test_async_loop_that_is_left_cancels_the_call_soon() -> None:
    gateways = Gateways([delta(0), delta(1), FINISH])
    async for _ in AsyncCompletionStream(gateways.start, paused_progress(), nothing):
        break
    for _ in range(5):  # turns of the event loop, which closes the generator
        await asyncio.sleep(0)
    assert gateways.cancelled == 1


async def test_cancelled_call_is_no_cancelled_task() -> None:
    """`grpc.aio` raises the same in both cases."""

    class Cancelled(Call):
        async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
            yield delta(0)
            raise asyncio.CancelledError

    gateways = Gateways([delta(1), FINISH])
    calls = [Cancelled(gateways, []), Call(gateways, [delta(1), FINISH])]
    stream = AsyncCompletionStream(lambda request, timeout_s: calls.pop(0), paused_progress(), nothing)
    assert [piece.token_ids async for piece in stream] == [[0], [1]]
    assert stream.completion is not None
    assert stream.completion.num_resumed == 1


async def test_cancelled_task_cancels_its_call_and_stays_cancelled() -> None:
    class Silent(Call):
        async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
            yield delta(0)
            await asyncio.sleep(1_000.0)

    gateways = Gateways([FINISH])
    stream = AsyncCompletionStream(lambda request, timeout_s: Silent(gateways, []), paused_progress(), nothing)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert gateways.cancelled == 1
