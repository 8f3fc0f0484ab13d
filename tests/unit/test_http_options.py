"""Options of the gateway that change what HTTP takes: names of the target, one token, other origins, unknown fields."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import FakePeers, describe
from http_fakes import Gate, client_of
from structlog.testing import capture_logs

from draftwire.errors import InvalidRequestError
from draftwire.models.tokenizer import load_tokenizer
from draftwire_gateway import core as core_module
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.app import make_app
from draftwire_gateway.http.body import ChatBody, CompletionBody, LeftOut, read
from draftwire_gateway.http.body_reading import MAX_IGNORED_NAMES, BodyReader

TARGET = Path(__file__).parents[2] / "models" / "target"
ORIGIN = "https://chat.example.com"
KEY = "a-secret-key"


def client_for(**options: Any) -> Any:
    config = GatewayConfig(**options)
    core = GatewayCore(config, FakePeers([]))
    core.description = describe("target")
    app = make_app(core, list, Access(config.tokens_file, api_key=config.api_key), Gate(), {})
    return client_of(app, "http://127.0.0.1:8000")


async def test_target_is_listed_and_found_under_the_names_that_it_is_given() -> None:
    async with client_for(served_model_name="gpt-4o, mine") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("gpt-4o", "target"), ("mine", "target")]
        for name, status in (("gpt-4o", 200), ("mine", 200), ("target", 404)):
            assert (await client.get(f"/v1/models/{name}")).status_code == status
            asked = {"model": name, "prompt": ""}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == (404 if status == 404 else 400), "the prompt is empty"
        missing = await client.post("/tokenize", json={"model": "target", "prompt": "a"})
        assert missing.json()["error"]["message"] == "there is no such model here; ask for gpt-4o"


async def test_one_key_is_needed_wherever_tokens_are() -> None:
    async with client_for(api_key=KEY) as client:
        for path in ("/v1/models", "/metrics"):
            for shown in ({}, {"authorization": "Bearer another"}, {"authorization": KEY}):
                assert (await client.get(path, headers=shown)).status_code == 401
            assert (await client.get(path, headers={"authorization": f"Bearer {KEY}"})).status_code == 200
        for path in ("/health", "/ping", "/version"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).status_code == 401


@pytest.mark.parametrize(
    ("allowed", "origin", "is_allowed"),
    [
        (ORIGIN, ORIGIN, True),
        (f"http://localhost:3000, {ORIGIN}", ORIGIN, True),
        ("*", "https://anything.example", True),
        (ORIGIN, "https://evil.example", False),
        (None, ORIGIN, False),
    ],
)
async def test_pages_of_allowed_origins_alone_may_call(allowed: str | None, origin: str, is_allowed: bool) -> None:
    async with client_for(allowed_origins=allowed) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
        preflight = await client.options("/v1/chat/completions", headers=asked)
        answer = await client.get("/v1/models", headers={"origin": origin})
        assert (answer.status_code == 200) == is_allowed
        for one in (preflight, answer):
            assert (one.headers.get("access-control-allow-origin") in (origin, "*")) == is_allowed
        if is_allowed:
            assert preflight.status_code == 200
            refused = await client.post("/v1/completions", json={"model": "gpt"}, headers={"origin": origin})
            assert refused.status_code == 400
            assert "access-control-allow-origin" in refused.headers, "pages can read errors"


REFUSED = [
    {"allowed_origins": "chat.example.com"},
    {"allowed_origins": "https://a.example/path"},
    {"allowed_origins": "https://Chat.example.com"},
    {"allowed_origins": "https://chat.example.com:443"},
    {"allowed_origins": "https://a:b:c"},
    {"api_key": "a secret key with spaces"},
    {"api_key": "geheimer-schlüssel"},
    {"served_model_name": "a,,b"},
    {"unknown_parameters": "drop"},
    {"api_key": "short"},
    {"api_key": KEY, "tokens_file": "tokens.toml"},
    {"tool_call_syntax": "json"},
    {"max_waiting_requests": -1},
    {"max_wait_s": 0.0},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: next(iter(options)))
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        GatewayConfig(**options)


# Unknown parameters


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x", "odd": 1}], **more}).encode()


def test_unknown_parameters_are_left_out_where_they_are_to_be_ignored() -> None:
    left_out = LeftOut(leaves_out_all=True)
    read_body = read(ChatBody, body(truncation="auto", service_tier="flex", temperature=0.5), left_out)
    assert left_out.names == {"truncation", "service_tier", "odd"}
    assert (read_body.temperature, len(read_body.messages)) == (0.5, 1)
    with pytest.raises(Exception, match="temperature"):
        read(ChatBody, body(temperature="hot"), LeftOut(leaves_out_all=True))


def test_template_that_is_none_is_refused_at_start(tmp_path: Path) -> None:
    for number, data in enumerate((b"{% if %}", b"\xff")):
        file = tmp_path / str(number)
        file.write_bytes(data)
        with pytest.raises(InvalidRequestError, match="chat_template"):
            GatewayCore(GatewayConfig(chat_template=file), FakePeers([]))
    with pytest.raises(InvalidRequestError, match="chat_template"):
        GatewayCore(GatewayConfig(chat_template=tmp_path / "none"), FakePeers([]))


async def test_names_of_ignored_parameters_are_logged_once_and_no_values() -> None:
    reader = BodyReader(2**20, ignores_unknown=True)
    asked = [{"model": "m", "prompt": "p", "wanted": "secret", "no name": 1}] * 2
    asked += [{"model": "m", "prompt": "p", f"name_{index}": 1} for index in range(2 * MAX_IGNORED_NAMES)]
    with capture_logs() as lines, reader.budget.share() as share:
        for one in asked:
            data = json.dumps(one).encode()

            async def receive(data: bytes = data) -> dict[str, Any]:
                return {"type": "http.request", "body": data}

            scope: Any = {"type": "http", "headers": [(b"content-type", b"application/json")]}
            assert (await reader.read(CompletionBody, scope, receive, share)).prompt == ["p"]  # type: ignore[arg-type]
    assert lines[0] == {"event": "gateway.parameter_ignored", "name": "wanted", "log_level": "warning"}
    assert len(lines) == MAX_IGNORED_NAMES
    assert "secret" not in str(lines)


# The template


def test_template_of_a_file_is_in_the_place_of_the_targets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "TokenizerPool", lambda *_: None)
    monkeypatch.setattr(core_module, "TextStream", lambda *_: None)
    files = {file.name: file.read_bytes() for file in TARGET.iterdir() if file.suffix in (".json", ".jinja")}
    template = tmp_path / "template.jinja"
    template.write_text("[TOOL_CALLS] {{ messages[0].content }}")
    for given, start, syntax in ((None, "{{ bos_token }}", "hermes"), (template, "[TOOL_CALLS]", "mistral")):
        core = GatewayCore(GatewayConfig(chat_template=given), FakePeers([]))
        core.serve_model(describe("target"), files)
        assert core._tokenizer.chat_template.startswith(start)
        assert core.tool_syntax is not None
        assert core.tool_syntax.name == syntax
    assert load_tokenizer(files).chat_template
    core = GatewayCore(GatewayConfig(tool_call_syntax="none"), FakePeers([]))
    core.serve_model(describe("target"), files)
    assert core.tool_syntax is None
