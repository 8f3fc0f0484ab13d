"""How answers over HTTP go out: in parts, each made and sent when the reader has taken those before it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from http_fakes import STREAM_START, Gate, app_of

from draftwire.errors import UnavailableError
from draftwire.parameters import SamplingParams
from draftwire.services.gateway.http.answering import PART_BYTES, _stream, _while_connected, send_whole
from draftwire.services.gateway.http.guard import Guard
from draftwire.services.gateway.http.pieces import Ending, Piece, ToldToken, Wishes
from draftwire.services.gateway.http.requests import CompletionBody
from draftwire.services.gateway.http.shapes import SLICE, ChatShape, CompletionShape, Shape, Writer
from draftwire.services.gateway.request import Generation
from draftwire.services.gateway.statistics import Statistics

GENERATION = Generation([1], SamplingParams(), 5, (), frozenset(), 3, 4, "token")
ENDINGS = [Ending(GENERATION, "stop", Statistics(num_generated_tokens=2), "")]


def told(index: int) -> ToldToken:
    top = [(f'"\u00e9{index + rank}', -0.5 - rank) for rank in range(20)]
    return ToldToken(top[index % 20][0], top[index % 20][1], top, index)


def piece(choice: int, num_tokens: int) -> Piece:
    details = [{"id": index, "text": "a"} for index in range(num_tokens)]
    rounds = [{"num_draft_tokens": 4, "num_tokens": 1}] * num_tokens
    prompt: list[dict[str, Any] | None] = [None, *({"id": index} for index in range(num_tokens))]
    tokens = list(map(told, range(num_tokens)))
    return Piece(choice, "a\u00e9\n" * num_tokens, tokens, prompt, details, rounds, "stop")


def logprobs_as_they_should_be(shape: Shape, tokens: list[ToldToken]) -> dict[str, Any]:
    if isinstance(shape, ChatShape):

        def said(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            said(one.text, one.logprob or 0.0) | {"top_logprobs": [said(*other) for other in one.top]} for one in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [dict(one.top) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


@pytest.mark.parametrize("shape", [CompletionShape(), ChatShape()], ids=["completion", "chat"])
@pytest.mark.parametrize("num_tokens", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
def test_parts_joined_are_the_whole_answer(shape: Shape, num_tokens: int) -> None:
    pieces = [piece(2, num_tokens), piece(0, num_tokens), piece(1, 1)]
    parts = list(Writer(shape, Wishes(3, 20, details=True), "m").answer(pieces, ENDINGS))
    whole = "".join(parts)
    answer = json.loads(whole)
    assert json.dumps(answer, ensure_ascii=False, separators=(",", ":")) == whole, "nothing twice, nothing between"
    assert list(answer) == ["id", "created", "model", "object", "choices", "usage", "metrics"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, one in zip(answer["choices"], sorted(pieces, key=lambda other: other.choice), strict=True):
        expected = {
            "index": one.choice,
            **shape.of_whole(one),
            "logprobs": logprobs_as_they_should_be(shape, one.tokens),
            "finish_reason": "stop",
            "prompt_logprobs": one.prompt,
            "draftwire": {"tokens": one.details, "rounds": one.rounds},
        }
        assert (choice, list(choice)) == (expected, list(expected))
    assert max(map(len, parts)) < 2 * PART_BYTES + len(pieces[0].text), "whatever the number of tokens"


async def test_nothing_of_an_answer_is_made_before_its_reader_has_taken_what_came_before() -> None:
    made = 0
    may_go_on = asyncio.Event()
    sent: list[dict[str, Any]] = []

    def texts() -> Iterator[str]:
        nonlocal made
        for _ in range(64):
            made += 1
            yield "x" * PART_BYTES

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            await may_go_on.wait()

    sending = asyncio.create_task(send_whole(send, texts()))
    for _ in range(200):
        await asyncio.sleep(0)
    assert made <= 4
    assert not sending.done(), "a request has not ended while its answer is not read"
    may_go_on.set()
    await sending
    assert b"".join(message.get("body", b"") for message in sent) == b"x" * (64 * PART_BYTES)
    assert b"content-length" not in dict(sent[0]["headers"])
    assert [message.get("more_body") for message in sent[1:]] == [True] * 64 + [False]
    assert sent[-1]["body"] == b"", "which is sent only when all that came before is on its way"


async def test_other_work_runs_between_the_parts_of_an_answer_that_is_read_at_once() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        pass

    working = asyncio.create_task(work())
    await send_whole(send, iter(["x" * PART_BYTES] * 50))
    working.cancel()
    assert turns >= 50


async def test_short_answer_says_how_long_it_is_and_goes_out_at_once() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_whole(send, iter(['{"a":', "", '"\u00e9"}']))
    assert dict(sent[0]["headers"])[b"content-length"] == b"10"
    assert sent[1:] == [{"type": "http.response.body", "body": '{"a":"\u00e9"}'.encode(), "more_body": False}]


# Streams


class Made:
    """Stands for a maker of pieces whose choices have all ended."""

    endings = ENDINGS


async def streamed(pieces: AsyncIterator[Piece], *, tells_usage: bool = False) -> list[dict[str, Any]]:
    """Returns what goes out of a stream, its fault included."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    options = {"stream": True, "stream_options": {"include_usage": tells_usage}}
    body = CompletionBody.model_validate({"model": "m", "prompt": "p", **options})
    try:
        await _stream(body, pieces, Made(), Writer(CompletionShape(), Wishes(1), "m"), send)  # type: ignore[arg-type]
    except UnavailableError as error:
        sent.append({"fault": str(error)})
    return sent


async def some(*pieces: Piece, error: Exception | None = None) -> AsyncIterator[Piece]:
    for one in pieces:
        yield one
    if error is not None:
        raise error


async def test_stream_that_fails_before_its_first_piece_has_sent_nothing() -> None:
    assert await streamed(some(error=UnavailableError("full"))) == [{"fault": "full"}]


@pytest.mark.parametrize("tells_usage", [False, True])
async def test_stream_ends_with_its_cost_if_it_is_asked_for_and_with_done(tells_usage: bool) -> None:
    start, *parts = await streamed(some(piece(0, 1), piece(0, 2)), tells_usage=tells_usage)
    assert start == STREAM_START
    events = b"".join(part["body"] for part in parts).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 2 + tells_usage + 2
    assert ("usage" in events[2] and json.loads(events[2].removeprefix("data: "))["usage"] is not None) == tells_usage
    assert [part["more_body"] for part in parts] == [True, True, False]


async def test_work_ends_when_whoever_waits_for_it_has_gone() -> None:
    has_ended, gone = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(_while_connected(receive, work()), 5.0)
    assert has_ended.is_set()


# What a failure leaves


async def cut(app: Any, takes: int) -> list[dict[str, Any]]:
    """Returns what went out of an answer that is cut while its reader has stopped reading after some messages."""
    sent: list[dict[str, Any]] = []
    is_stuck = asyncio.Event()
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        if len(sent) == takes and not reads.is_set():
            is_stuck.set()
            await reads.wait()
        sent.append(message)

    call = asyncio.create_task(Guard(app, Gate())({"type": "http", "path": "/v1/completions"}, None, send))  # type: ignore[arg-type]
    await is_stuck.wait()
    reads.set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    return sent


async def test_answer_that_is_cut_before_it_has_begun_is_an_error() -> None:
    start, body = await cut(app_of(STREAM_START), takes=0)
    assert (start["status"], json.loads(body["body"])["error"]["message"]) == (503, "the gateway stops")


async def test_stream_that_is_cut_before_its_end_went_out_says_so() -> None:
    done = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
    start, body = await cut(app_of(STREAM_START, done), takes=1)
    assert start["status"] == 200
    assert b"the gateway stops" in body["body"]


async def test_whole_answer_that_fails_in_the_middle_gets_no_end_and_no_event() -> None:
    sent: list[dict[str, Any]] = []

    start = STREAM_START | {"headers": [(b"content-type", b"application/json")]}
    app = app_of(start, {"type": "http.response.body", "body": b"{", "more_body": True}, error=UnavailableError("gone"))

    async def send(message: Any) -> None:
        sent.append(message)

    await Guard(app, Gate())({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
    assert [message.get("more_body") for message in sent] == [None, True]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ([("a", -0.1), ("b", -2.5)], {"a": -0.1, "b": -2.5, "drawn": -7.0}),
        ([("a", -0.1), ("drawn", -7.0)], {"a": -0.1, "drawn": -7.0}),
        ([("drawn", -0.5), ("a", -1.0)], {"drawn": -0.5, "a": -1.0}),
        ([], {"drawn": -7.0}),
    ],
)
def test_likeliest_tokens_of_completions_have_the_drawn_one_with_them(
    top: list[tuple[str, float]], expected: dict[str, float]
) -> None:
    tokens = [ToldToken("first", None, [], 0), ToldToken("drawn", -7.0, top, 0)]
    one = Piece(0, "firstdrawn", tokens, reason="stop")
    answer = json.loads("".join(Writer(CompletionShape(), Wishes(1, 2), "m").answer([one], ENDINGS)))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [None, expected]
