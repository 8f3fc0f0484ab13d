"""The HTTP edge without services: what it takes, its errors, its pages, and what it refuses before all else."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from http_fakes import EMPTY, STREAM_START, Gate, Sent, app_of, client_of, guarded
from pydantic import ValidationError
from structlog.testing import capture_logs

from draftwire import errors
from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError, UnavailableError
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.runtime.settings import ServerSettings, TlsSettings
from draftwire.v1 import gateway_pb2, session_pb2
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.app import make_app
from draftwire_gateway.http.body import ChatBody, CompletionBody, read
from draftwire_gateway.http.body_reading import BodyReader
from draftwire_gateway.http.choice_deltas import Ending
from draftwire_gateway.http.error_bodies import body_of, headers_of, is_expected, status_of
from draftwire_gateway.http.playground_pages import HEADERS, read_pages
from draftwire_gateway.http.refusal import RefusedError
from draftwire_gateway.http.request_guard import MOST_IN_A_TURN, Guard
from draftwire_gateway.http.routes import CHAT, in_names
from draftwire_gateway.http.usage import metrics_of, usage_of
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.statistics import Statistics

SECRET = "Xq7-zebra"
HERE = {
    "text": {"prompt"},
    "token_ids": {"prompt"},
    "prompts": {"prompt"},
    "chat": {"messages", "tools", "chat_template_kwargs", "continue_final_message"},
    "num_choices": {"n"},
    "logprobs": {"logprobs", "top_logprobs"},
    "max_tokens": {"max_tokens", "max_completion_tokens"},
}
"""How parameters of gRPC are called here, where the name is another one."""
OTHERS = {
    "model",
    "best_of",
    "suffix",
    "stream",
    "stream_options",
    "user",
    "tool_choice",
    "response_format",
    "parallel_tool_calls",
    "return_token_ids",
}
"""What only OpenAI has."""


def test_every_parameter_of_grpc_can_be_said_over_http() -> None:
    requested = {field.name for field in gateway_pb2.GenerateRequest.DESCRIPTOR.fields} - {"sampling"}
    requested |= {field.name for field in session_pb2.SamplingParameters.DESCRIPTOR.fields}
    wanted = {here for name in requested for here in HERE.get(name, {name})}
    assert wanted | OTHERS == set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    of_one_route = {"prompt", "echo", "best_of", "suffix"}
    assert set(CompletionBody.model_fields) - set(ChatBody.model_fields) == of_one_route


def test_a_parameter_that_is_left_out_changes_nothing() -> None:
    """The defaults of the edge are those of the law."""
    default = SamplingParams()
    body = CompletionBody.model_validate({"model": "m", "prompt": "p"})
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "min_tokens"):
        assert getattr(body, name) == getattr(default, name)
    assert (body.frequency_penalty, body.logit_bias, body.allowed_token_ids) == (0.0, {}, None)


# Errors

TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DraftwireError)]
STATUSES = {
    "InvalidRequestError": 400,
    "ContextLengthError": 400,
    "BlockViolationError": 400,
    "UnauthenticatedError": 401,
    "WrongRoleError": 500,
    "UnknownSessionError": 503,
    "ProtocolViolationError": 500,
    "ModelMismatchError": 500,
    "NoRoomError": 429,
    "UnavailableError": 503,
    "GroupLostError": 503,
    "CompletionInterruptedError": 503,
    "DraftwireError": 500,
}


def made(kind: type[errors.DraftwireError], message: str) -> errors.DraftwireError:
    if kind is errors.BlockViolationError:
        return errors.BlockViolationError(errors.Violation.PEER, message)
    if kind is errors.CompletionInterruptedError:
        return errors.CompletionInterruptedError(message, 3)
    return kind(message)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_has_its_status_and_keeps_its_message(kind: type[errors.DraftwireError]) -> None:
    for error in (made(kind, "because"), ExceptionGroup("outer", [ExceptionGroup("inner", [made(kind, "because")])])):
        assert status_of(error) == STATUSES[kind.__name__]
        said = json.loads(body_of(error))["error"]
        assert (set(said), said["message"]) == ({"message", "type", "param", "code"}, "because")


@pytest.mark.parametrize("error", [KeyError(SECRET), ValueError(SECRET), ExceptionGroup(SECRET, [OSError(SECRET)])])
def test_unknown_error_stays_opaque(error: Exception) -> None:
    assert (status_of(error), json.loads(body_of(error))["error"]["message"]) == (500, "internal error")
    assert not is_expected(error)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature must be in [0, 100], not 200", "temperature"),
        ("num_choices must be in 1..128, not 0", "n"),
        ("template_arguments: loud makes no difference", "chat_template_kwargs"),
        ("the chat template leaves out messages[0].name", "messages"),
        ("unknown rejection_sample_method; known: block", "rejection_sample_method"),
        ("no such thing", None),
    ],
)
def test_error_names_the_parameter_as_it_is_called_here(message: str, param: str | None) -> None:
    said = json.loads(body_of(InvalidRequestError(message)))["error"]
    assert said["param"] == param
    assert (param or "") in said["message"]


CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("said", "message", "told", "param"),
    [
        ({}, "the prompt has 9 tokens", "messages has 9 tokens", "messages"),
        ({}, "max_tokens must be in 0..5", "max_tokens must be in 0..5", "max_tokens"),
        ({"max_tokens": 9}, "max_tokens must be in 0..5", "max_tokens must be in 0..5", "max_tokens"),
        (
            {"max_completion_tokens": 9},
            "min_tokens must be at most max_tokens, 5",
            "min_tokens must be at most max_completion_tokens, 5",
            "min_tokens",
        ),
        (
            {"max_completion_tokens": 9},
            "max_tokens must be in 0..5, what the 9 tokens of the prompt leave",
            "max_completion_tokens must be in 0..5, what the 9 tokens of messages leave",
            "max_completion_tokens",
        ),
        ({}, "num_choices must be in 1..128", "n must be in 1..128", "n"),
    ],
)
def test_error_of_a_chat_is_in_the_words_of_its_route(
    said: dict[str, Any], message: str, told: str, param: str
) -> None:
    asked = ChatBody.model_validate({**CHAT_BODY, **said})
    with pytest.raises(RefusedError) as refused, in_names(CHAT.names(asked)):
        raise InvalidRequestError(message)
    assert json.loads(body_of(refused.value))["error"] == {
        "message": told,
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


def test_who_can_try_again_is_told_when() -> None:
    assert dict(headers_of(NoRoomError("full", 2.5))) == {b"retry-after": b"3", b"retry-after-ms": b"2500"}
    assert dict(headers_of(UnavailableError("gone")))[b"retry-after"] == b"1"
    assert headers_of(InvalidRequestError("no")) == []
    assert headers_of(UnauthenticatedError("no")) == [(b"www-authenticate", b"Bearer")]


# What is not quoted


@pytest.mark.parametrize(
    "said",
    [
        {"prompt": {SECRET: 1}},
        {"prompt": [SECRET, 1]},
        {"prompt": "a", SECRET: 1},
        {"prompt": "a", "temperature": SECRET},
        {"prompt": "a", "logit_bias": {SECRET: 1}},
        {"prompt": "a", "stop": {SECRET: 1}},
        {"prompt": "a", "structured_output": {SECRET: 1}},
        {"prompt": "a", "structured_output": {"regex": [SECRET]}},
        {"prompt": "a", "stream": True, "stream_options": {SECRET: 1}},
    ],
)
async def test_refusal_does_not_quote_the_request(said: dict[str, Any]) -> None:
    refused = await refusal(CompletionBody, json.dumps({"model": "m", **said}).encode())
    assert "zebra" not in body_of(refused).decode()
    assert SECRET not in said or str(refused) == "the request has a key that means nothing here"


@pytest.mark.parametrize("tail", [b"", b'"', b'", ]', b'\xff"}'])
async def test_what_is_no_json_is_not_quoted(tail: bytes) -> None:
    assert "zebra" not in str(await refusal(CompletionBody, b'{"prompt": "' + SECRET.encode() + tail))


async def refusal(kind: Any, data: bytes) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        read(kind, data)
    assert refused.value.status == 400
    return refused.value


def body(**said: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **said}).encode()


def chat(**said: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **said}).encode()


# What is too much

MANY = 100_000
CALL = {"function": {"name": "f"}}
TOO_MUCH: dict[str, tuple[Any, bytes, str]] = {
    "stop": (CompletionBody, body(stop=["a"] * 17), "stop: takes at most 16, not 17"),
    "stop_token_ids": (CompletionBody, body(stop_token_ids=[1] * (2**18 + 1)), "stop_token_ids: takes at most 262144"),
    "allowed_token_ids": (CompletionBody, body(allowed_token_ids=[1] * (2**18 + 1)), "allowed_token_ids: takes at"),
    "logit_bias": (CompletionBody, body(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias: takes at most 1024"),
    "prompts": (CompletionBody, body(prompt=["a"] * 129), "prompt: takes at most 128, not 129"),
    "prompts of ids": (CompletionBody, body(prompt=[[1]] * 129), "prompt: takes at most 128, not 129"),
    "choice": (CompletionBody, body(structured_output={"choice": ["a"] * 1025}), "takes at most 1024, not 1025"),
    "messages": (ChatBody, chat(messages=[{"role": "user"}] * 4097), "messages: takes at most 4096, not 4097"),
    "tools": (ChatBody, chat(tools=[{}] * 1025), "tools: takes at most 1024, not 1025"),
    "tool_calls": (
        ChatBody,
        chat(messages=[{"role": "user", "tool_calls": [CALL] * 2049}] * 2),
        "tool_calls takes at most 4096, not 4098",
    ),
    "objects": (ChatBody, chat(messages=[{"content": [{}] * 65_536}]), "holds at most 65536 objects"),
    "depth": (CompletionBody, body(structured_output={"json": {"a": json.loads("[" * 200 + "]" * 200)}}), "128 deep"),
}


async def test_what_is_far_too_much_is_refused() -> None:
    for name, (kind, data, said) in TOO_MUCH.items():
        assert said in str(await refusal(kind, data)), name


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (CompletionBody, body(stop_token_ids=[""] * MANY)),
        (CompletionBody, body(stop=[1] * 16)),
        (CompletionBody, body(structured_output={"choice": [1] * 1024})),
        (CompletionBody, body(**{f"k{i}": 1 for i in range(MANY)})),
        (CompletionBody, body(stream=True, stream_options={f"k{i}": 1 for i in range(MANY)})),
        (ChatBody, chat(messages=[1] * 4096)),
        (ChatBody, chat(messages=[{"role": "user", "content": [1] * MANY}])),
        (ChatBody, chat(messages=[{"role": "user", "tool_calls": [{}] * 4096}])),
        (ChatBody, chat(tools=[1] * 1024)),
    ],
)
async def test_faults_are_not_collected(kind: Any, data: bytes) -> None:
    """A body that is wrong everywhere costs no more than one that is wrong once."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(json.loads(data))
    assert refused.value.error_count() <= 3


async def test_body_is_bounded_even_where_grpc_takes_more() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    for most_bytes, told in ((2**30, 8_000_000), (2**20, 2**20)):
        reader = BodyReader(most_bytes)
        with reader.budget.share() as share, pytest.raises(RefusedError, match=f"at most {told} bytes") as refused:
            await reader.read(CompletionBody, scope, receive, share)  # type: ignore[arg-type]
        assert refused.value.status == 413


# What is no number, and what is said twice


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ('"logit_bias": {"1": %s}', "logit_bias"),
        ('"n": %s', "n"),
        ('"temperature": %s', "temperature"),
        ('"prompt": [%s]', "prompt"),
        ('"structured_output": {"json": {"const": %s}}', "structured_output"),
        ('"?": %s', None),
    ],
)
@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, str(2**64), str(-(2**63) - 1)], ids=len)
async def test_whole_number_beyond_64_bits_is_refused_by_its_parameters_name(
    said: str, param: str | None, number: str
) -> None:
    refused = await refusal(CompletionBody, b'{"model": "m", ' + (said % number).encode() + b"}")
    assert refused.param == param
    assert "beyond 64 bits" in str(refused)
    assert number not in str(refused)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_number_that_is_none_is_refused(number: str) -> None:
    await refusal(
        CompletionBody, b'{"model": "m", "prompt": "p", "structured_output": {"json": {"a": %s}}}' % number.encode()
    )


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ('"n": 1, "n": 1', "n"),
        ('"structured_output": {"json": {"type": "object", "type": "array"}}', "type"),
        (f'"stop": [{{"{SECRET}": 1, "{SECRET}": 2}}]', None),
    ],
)
async def test_key_that_is_said_twice_is_refused(said: str, param: str | None) -> None:
    refused = await refusal(CompletionBody, f'{{"model": "m", "prompt": "p", {said}}}'.encode())
    assert refused.param == param
    assert "twice" in str(refused)
    assert SECRET not in str(refused)


async def test_largest_values_are_read_unchanged_with_a_schemas_description() -> None:
    for said in ({"seed": 2**64 - 1}, {"seed": -(2**63)}, {"prompt": [[7] * 100_000]}):
        taken = read(CompletionBody, body(**said))
        assert said.items() <= dict(taken).items()
    schema = {"name": "x", "description": "y", "schema": {"type": "object"}}
    asked = read(ChatBody, chat(response_format={"type": "json_schema", "json_schema": schema}))
    assert json.loads(asked.response_format.json_schema.json_schema) == {"type": "object"}


# The guard


async def test_internal_error_is_logged_once_and_answered_without_its_message() -> None:
    with capture_logs() as lines:
        answer = await guarded(app_of(error=KeyError(SECRET))).post(f"/{SECRET}")
    assert (answer.status_code, [line["event"] for line in lines]) == (500, ["gateway.http_request_failed"])
    assert SECRET not in answer.text + lines[0]["path"]


async def test_expected_error_is_not_logged() -> None:
    with capture_logs() as lines:
        answer = await guarded(app_of(error=NoRoomError("full"))).post("/v1/completions")
    assert (answer.status_code, answer.headers["retry-after"], lines) == (429, "1", [])


async def test_stream_that_fails_ends_with_the_error_as_an_event() -> None:
    part = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    answer = await guarded(app_of(STREAM_START, part, error=UnavailableError("gone"))).post("/v1/completions")
    first, last, rest = answer.text.split("\n\n")
    assert (first, rest) == ("data: {}", "")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gone"


async def test_requests_are_refused_while_the_service_is_not_ready() -> None:
    gate = Gate()
    client = guarded(app_of(*EMPTY), gate)
    gate.refusal = "loading"
    refused = await client.get("/v1/models")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "loading" in refused.text
    assert (await client.get("/health")).status_code == 204, "which says so itself"
    gate.refusal = ""
    assert (await client.get("/v1/models")).status_code == 204


@pytest.mark.parametrize("count", [100, 200])
async def test_flood_of_requests_begins_a_few_in_each_turn_of_the_loop(count: int) -> None:
    """So that whatever else there is to do is done between them."""
    turn, begun = 0, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(turn)

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    guard, working = Guard(app, Gate()), asyncio.create_task(others())
    requests = [asyncio.create_task(guard({"type": "http", "path": "/"}, Sent(), Sent())) for _ in range(count)]
    for gone in requests[20:40]:
        gone.cancel()
    await asyncio.wait(requests)
    working.cancel()
    assert len(begun) == count - 20
    assert max(Counter(begun).values()) == MOST_IN_A_TURN


# What it cost


def ending(choice: int, prompt: int, **counts: Any) -> Ending:
    generation = Generation(
        [1], SamplingParams(), 5, (), frozenset(), 3, 4, RuleFacts("token"), choice=choice, prompt_index=prompt
    )
    return Ending(generation, Statistics(**counts), "")


def test_costs_of_choices_are_added_and_those_of_a_prompt_count_once() -> None:
    first = {"num_prompt_tokens": 7, "num_cached_prompt_tokens": 1, "num_generated_tokens": 2, "num_rounds": 2}
    second = {"num_prompt_tokens": 7, "num_cached_prompt_tokens": 6, "num_generated_tokens": 3, "num_rounds": 1}
    drafts = {
        "num_drafts": 1,
        "num_draft_tokens": 24,  # of a token tree whose longest path has four
        "num_draft_positions": 4,
        "num_accepted_tokens": 2,
        "num_emitted_tokens": 3,
    }
    lists = {"acceptance_histogram": [0, 0, 1], "num_accepted_tokens_per_pos": [1, 1]}
    lists["draft_length_histogram"] = [2, 0, 0, 0, 1]
    endings = [
        ending(1, 0, **second, **drafts, **lists, time_to_first_token_us=9000, duration_us=12_000),
        ending(0, 0, **first, time_to_first_token_us=4000, duration_us=20_000),
        ending(2, 1, num_prompt_tokens=2, time_to_first_token_us=5000, duration_us=6000),
    ]
    usage = usage_of(endings)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 5, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2}
    total = metrics_of(endings)["speculative_decoding"]
    assert (total["mean_acceptance_length"], total["draft_acceptance_rate"]) == (3.0, 0.5)
    assert (total["acceptance_histogram"], total["draft_length_histogram"]) == ([0, 0, 1], [2, 0, 0, 0, 1])
    assert (total["num_rounds"], total["block_efficiency"]) == (3, 1.0)
    assert (total["time_to_first_token_ms"], total["duration_ms"]) == (4.0, 20.0)
    assert [one["index"] for one in total["choices"]] == [0, 1, 2]
    assert total["choices"][1]["num_draft_tokens"] == 24
    assert endings[0].statistics.num_draft_tokens == 24, "nothing is added to what is added"


# Pages


def test_pages_are_those_of_a_folder_and_of_no_other(tmp_path: Path) -> None:
    for name in ("index.html", "playground.css", "playground.js", "notes.txt"):
        (tmp_path / name).write_text(name)
    pages = read_pages(tmp_path)
    assert {path: page.content.decode() for path, page in pages.items()} == {
        "/": "index.html",
        "/playground.css": "playground.css",
        "/playground.js": "playground.js",
    }
    assert pages["/playground.js"].content_type.startswith("text/javascript")


async def test_pages_may_load_nothing_from_elsewhere_and_are_not_kept(tmp_path: Path) -> None:

    (tmp_path / "index.html").write_text("<p>hello")
    core = GatewayCore(GatewayConfig(), None)  # type: ignore[arg-type]
    app = make_app(core, list, Access(None), Gate(), read_pages(tmp_path))
    async with client_of(app, "http://localhost") as client:
        answer = await client.get("/")
        headers = dict(answer.headers)
        assert (answer.status_code, answer.text) == (200, "<p>hello")
        assert (headers["content-type"], headers["cache-control"]) == ("text/html; charset=utf-8", "no-store")
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert set(HEADERS) <= set(headers)
        assert "access-control-allow-origin" not in headers
        for path in ("/playground.js", "/docs", "/health/"):  # nobody is sent to where the header host says
            assert (await client.get(path)).status_code == 404, path
        assert (await client.get("/v1/models/")).status_code != 307


# Origins


HERE_OR_NOT: list[tuple[dict[str, str], int]] = [
    ({"host": "localhost:8000"}, 204),
    ({"host": "LOCALHOST"}, 204),
    ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 204),
    ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, 204),
    ({"host": "10.1.2.3"}, 204),
    ({"host": "rebound.example:8000"}, 403),
    ({"host": "localhost.rebound.example"}, 403),
    ({"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, 403),
    ({"host": "user@localhost@rebound.example"}, 403),
    ({"host": "[::1"}, 403),
    ({"host": ""}, 403),
    ({"host": "localhost:8000", "origin": "http://page.example"}, 403),
    ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
    ({"host": "localhost:8000", "origin": "null"}, 403),
]


async def test_trusting_local_gateway_answers_no_page_of_another_origin() -> None:
    open_here, closed = (guarded(app_of(*EMPTY), hosts=hosts) for hosts in (frozenset(), None))
    for headers, status in HERE_OR_NOT:
        answer = await open_here.get("/v1/models", headers=headers)
        assert answer.status_code == status, headers
        assert status == 204 or answer.json()["error"]["type"] == "invalid_request_error", headers
        assert (await closed.get("/v1/models", headers=headers)).status_code == 204, headers


@pytest.mark.parametrize(
    ("host", "has_tokens", "allowed", "status"),
    [
        ("127.0.0.1", False, None, 403),
        ("localhost", False, None, 403),
        ("127.0.0.1", True, None, 200),
        ("0.0.0.0", False, None, 200),
        # In a container, whose port is published on 127.0.0.1 of its machine.
        ("0.0.0.0", False, "gateway", 403),
        ("127.0.0.1", True, "gateway", 403),
        ("0.0.0.0", False, "gateway, Rebound.example", 200),
        ("127.0.0.1", False, "rebound.example", 200),
    ],
)
async def test_names_are_refused_where_this_machine_is_trusted_or_names_are_set(
    tmp_path: Path, host: str, has_tokens: bool, allowed: str | None, status: int
) -> None:

    config = GatewayConfig(
        server=ServerSettings(port=1, host=host),
        tls=TlsSettings(allow_plaintext=True, tls_require_client_cert=False),
        tokens_file=tmp_path / "tokens.toml" if has_tokens else None,
        http_allowed_hosts=allowed,
    )
    app = make_app(GatewayCore(config, None), list, Access(None), Gate(), {})  # type: ignore[arg-type]
    async with client_of(app, "http://rebound.example") as client:
        assert (await client.get("/health")).status_code == status


@pytest.mark.parametrize(
    ("refusal", "unready", "health", "ready"),
    [("", "", 200, 200), ("", "no verifier answers", 200, 503), ("draining", "draining", 503, 503)],
)
async def test_liveness_is_of_the_gateway_and_readiness_of_its_verifiers_too(
    refusal: str, unready: str, health: int, ready: int
) -> None:
    gate = Gate()
    gate.refusal, gate.unready = refusal, unready
    app = make_app(GatewayCore(GatewayConfig(server=ServerSettings(port=1)), None), list, Access(None), gate, {})  # type: ignore[arg-type]
    async with client_of(app, "http://127.0.0.1") as client:
        for path, status in (("/health", health), ("/ping", health), ("/ready", ready)):
            for answer in (await client.get(path), await client.head(path)):
                assert answer.status_code == status, path
        assert (await client.get("/ready")).json() == {"status": unready or "ok"}
