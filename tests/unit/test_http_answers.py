"""How answers over HTTP go out: in parts, each made and sent when the reader has taken those before it."""

import asyncio
import json
from collections.abc import AsyncIterator
from operator import length_hint
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from http_fakes import STREAM_START, Gate, Sent, app_of

from draftwire.errors import UnavailableError
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire_gateway.http.choice_deltas import ChoiceDelta, Ending, ReportedToken, ResponseOptions
from draftwire_gateway.http.openai_types import (
    SLICE,
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
    ResponseWriter,
)
from draftwire_gateway.http.request_guard import Guard
from draftwire_gateway.http.streaming import PART_BYTES, _stream, _while_connected, send_whole
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.statistics import Statistics

GENERATION = Generation([1], SamplingParams(), 5, (), frozenset(), 3, 4, RuleFacts("token"))
ENDINGS = [Ending(GENERATION, Statistics(num_generated_tokens=2), "")]


def told(index: int) -> ReportedToken:
    top = [(f'"\u00e9{index + rank}', -0.5 - rank) for rank in range(20)]
    return ReportedToken(top[index % 20][0], top[index % 20][1], top, index)


def piece(choice: int, num_tokens: int) -> ChoiceDelta:
    details = [{"id": index, "text": "a"} for index in range(num_tokens)]
    rounds = [{"num_draft_tokens": 4, "num_draft_positions": 3, "num_tokens": 1}] * num_tokens
    prompt: list[dict[str, Any] | None] = [None, *({"id": index} for index in range(num_tokens))]
    tokens = list(map(told, range(num_tokens)))
    return ChoiceDelta(choice, "a\u00e9\n" * num_tokens, tokens, prompt, details, rounds, "stop")


def logprobs_as_they_should_be(shape: ResponseFormatter, tokens: list[ReportedToken]) -> dict[str, Any]:
    if isinstance(shape, ChatFormatter):

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


@pytest.mark.parametrize("shape", [CompletionFormatter(), ChatFormatter()], ids=["completion", "chat"])
@pytest.mark.parametrize("num_tokens", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
def test_parts_joined_are_the_whole_answer(shape: ResponseFormatter, num_tokens: int) -> None:
    pieces = [piece(2, num_tokens), piece(0, num_tokens), piece(1, 1)]
    parts = list(
        ResponseWriter(shape, ResponseOptions(3, 20, details=True), "m", reports_usage=False).answer(pieces, ENDINGS)
    )
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


async def test_no_part_of_an_answer_is_made_before_its_reader_took_the_last() -> None:
    texts = iter(["x" * PART_BYTES] * 64)
    may_go_on = asyncio.Event()
    sent = Sent()

    async def send(message: Any) -> None:
        await sent(message)
        if len(sent) > 2:
            await may_go_on.wait()

    sending = asyncio.create_task(send_whole(send, texts))
    for _ in range(200):
        await asyncio.sleep(0)
    assert length_hint(texts) >= 60, "of 64"
    assert not sending.done(), "a request has not ended while its answer is not read"
    may_go_on.set()
    await sending
    assert sent.body == b"x" * (64 * PART_BYTES)
    assert b"content-length" not in dict(sent[0]["headers"])
    assert [message.get("more_body") for message in sent[1:]] == [True] * 64 + [False]
    assert sent[-1]["body"] == b"", "which is sent only when all that came before is on its way"


async def test_other_work_runs_between_parts_of_an_answer_read_at_once() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    await send_whole(Sent(), iter(["x" * PART_BYTES] * 50))
    working.cancel()
    assert turns >= 50


async def test_short_answer_says_how_long_it_is_and_goes_out_at_once() -> None:
    sent = Sent()
    await send_whole(sent, iter(['{"a":', "", '"\u00e9"}']))
    assert dict(sent[0]["headers"])[b"content-length"] == b"10"
    assert sent[1:] == [{"type": "http.response.body", "body": '{"a":"\u00e9"}'.encode(), "more_body": False}]


# Streams


async def streamed(
    sent: Sent, *pieces: ChoiceDelta, error: Exception | None = None, reports_usage: bool = False
) -> None:
    """Sends a stream of pieces, and then raises an error if there is one."""

    async def made() -> AsyncIterator[ChoiceDelta]:
        for one in pieces:
            yield one
        if error is not None:
            raise error

    maker: Any = SimpleNamespace(endings=ENDINGS)
    writer = ResponseWriter(CompletionFormatter(), ResponseOptions(1), "m", reports_usage=reports_usage)
    await _stream(made(), maker, writer, sent)


async def test_stream_that_fails_before_its_first_piece_has_sent_nothing() -> None:
    sent = Sent()
    with pytest.raises(UnavailableError, match="full"):
        await streamed(sent, error=UnavailableError("full"))
    assert sent == []


async def test_chunks_share_one_encoder() -> None:
    with patch.object(json, "dumps") as dumps, patch.object(json, "JSONEncoder") as encoder:
        await streamed(Sent(), piece(0, 1), piece(0, 2), reports_usage=True)
    assert (dumps.call_count, encoder.call_count) == (0, 0)


@pytest.mark.parametrize("reports_usage", [False, True])
async def test_stream_ends_with_its_cost_if_it_is_asked_for_and_with_done(reports_usage: bool) -> None:
    sent = Sent()
    await streamed(sent, piece(0, 1), piece(0, 2), reports_usage=reports_usage)
    assert sent[0] == STREAM_START
    events = sent.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 2 + reports_usage + 2
    assert ("usage" in events[2] and json.loads(events[2].removeprefix("data: "))["usage"] is not None) == reports_usage
    assert [part["more_body"] for part in sent[1:]] == [True, True, False]


async def test_work_ends_when_whoever_waits_for_it_has_gone() -> None:
    waits = asyncio.Event()

    async def work() -> None:
        waits.set()
        await asyncio.Event().wait()

    async def receive() -> Any:
        await waits.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(_while_connected(receive, work()), 5.0)
    assert len(asyncio.all_tasks()) == 1


# What a failure leaves


async def cut(app: Any, takes: int) -> Sent:
    """Returns what went out of an answer that is cut while its reader has stopped reading after some messages."""
    sent = Sent()
    is_stuck = asyncio.Event()
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        if len(sent) == takes and not reads.is_set():
            is_stuck.set()
            await reads.wait()
        await sent(message)

    call = asyncio.create_task(called(app, send))
    await is_stuck.wait()
    reads.set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    return sent


async def called(app: Any, send: Any) -> None:
    await Guard(app, Gate())({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]


async def test_answer_that_is_cut_before_it_has_begun_is_an_error() -> None:
    start, body = await cut(app_of(STREAM_START), takes=0)
    assert (start["status"], json.loads(body["body"])["error"]["message"]) == (503, "the gateway stops")


async def test_stream_that_is_cut_before_its_end_went_out_says_so() -> None:
    done = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
    start, body = await cut(app_of(STREAM_START, done), takes=1)
    assert start["status"] == 200
    assert b"the gateway stops" in body["body"]


async def test_whole_answer_that_fails_in_the_middle_gets_no_end_and_no_event() -> None:
    sent = Sent()
    start = STREAM_START | {"headers": [(b"content-type", b"application/json")]}
    part = {"type": "http.response.body", "body": b"{", "more_body": True}
    await called(app_of(start, part, error=UnavailableError("gone")), sent)
    assert sent == [start, part]


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
    tokens = [ReportedToken("first", None, [], 0), ReportedToken("drawn", -7.0, top, 0)]
    one = ChoiceDelta(0, "firstdrawn", tokens, reason="stop")
    writer = ResponseWriter(CompletionFormatter(), ResponseOptions(1, 2), "m", reports_usage=False)
    answer = json.loads("".join(writer.answer([one], ENDINGS)))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [None, expected]
