"""How the HTTP edge serves: limits, readers that go or are slow, peers that die, the drain, certificates and tokens."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trustme
from certificates import NAME, certificate_of, first_certificate, write_identity
from observing import read_metric, wait_until
from test_http import fetch

from draftwire.errors import UnavailableError
from draftwire.models.script import expected_tokens
from draftwire_gateway.auth.tokens import TokenEntry, digest_of
from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=20000"
PROMPT = [1, 2, 3, 4, 5]
SECONDS = 10.0


def tokens(**limits: dict[str, int]) -> str:
    """Returns a file in which everybody's token is their name."""
    return "".join(TokenEntry(name, digest_of(name), **own).to_toml() for name, own in limits.items())


@pytest.fixture(scope="module")
def scripted() -> Iterator[InProcessStack]:
    options = {
        "verifier": {"model": SCRIPT},
        "drafter": {"model": SCRIPT},
        "gateway": {"max_requests": 8, "max_waiting_requests": 0, "max_message_bytes": 2**20},
    }
    with InProcessStack(options) as stack:
        yield stack


def connected(stack: InProcessStack, token: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http_address}/v1", api_key=token, max_retries=0, timeout=60.0, **options)


def asked(stack: InProcessStack, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Returns a request; a scripted target tells by its ids whether one is missing."""
    extra = {"token_details": True, **options.pop("extra_body", {})}
    return {
        "model": connected(stack, options.pop("token", "none")).models.list().data[0].id,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "extra_body": extra,
        **options,
    }


def ids_of(stream: Any) -> list[int]:
    return [token["id"] for chunk in stream for choice in chunk.choices for token in choice.draftwire["tokens"]]


def num_sessions(stack: InProcessStack) -> float:
    return sum(read_metric(stack, service, "num_sessions") for service in ("verifier", "drafter"))


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("speculative", [0, 4])
def test_client_that_goes_away_ends_the_generation_at_once(
    scripted: InProcessStack, streams: bool, speculative: int
) -> None:
    body = asked(scripted, 15_000, stream=streams)
    body |= body.pop("extra_body") | {"num_speculative_tokens": speculative}
    port = scripted.services["gateway"].http_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    if streams:
        assert connection.getresponse().readline().startswith(b"data: {")
    wait_until(lambda: num_sessions(scripted) >= 1, "the session is open")
    gone_at = time.monotonic()
    connection.close()
    wait_until(lambda: num_sessions(scripted) == 0, "the session is closed")
    assert time.monotonic() - gone_at < 3.0, "far less than the completion would take"
    assert read_metric(scripted, "gateway", "requests", 'result="cancelled"') >= 1


def test_package_that_closes_a_stream_ends_the_generation(scripted: InProcessStack) -> None:
    with connected(scripted) as client:
        stream = client.completions.create(**asked(scripted, 15_000), stream=True)
        next(iter(stream))
        assert num_sessions(scripted) >= 1
        stream.close()
    wait_until(lambda: num_sessions(scripted) == 0, "the session is closed")


@pytest.mark.slow  # thousands of rounds, until all buffers on the way are full
def test_who_does_not_read_holds_up_nobody_and_misses_nothing(scripted: InProcessStack) -> None:
    with connected(scripted) as client:
        sleeper = client.completions.create(**asked(scripted, 12_000), stream=True)
        started = time.monotonic()
        for _ in range(3):
            answer = client.completions.create(**asked(scripted, 100), stream=True)
            assert ids_of(answer) == expected_tokens(len(PROMPT), 100)
        assert time.monotonic() - started < SECONDS
        assert ids_of(sleeper) == expected_tokens(len(PROMPT), 12_000)


def test_every_round_goes_out_when_it_is_committed(scripted: InProcessStack) -> None:
    """A plain round takes 10 ms at least: what were collected would come together."""
    with connected(scripted) as client:
        request = asked(scripted, 60, extra_body={"num_speculative_tokens": 0})
        arrivals = [
            (time.monotonic(), len(chunk.choices[0].draftwire["tokens"]))
            for chunk in client.completions.create(**request, stream=True)
        ]
    assert max(count for _, count in arrivals) == 1
    assert arrivals[-1][0] - arrivals[0][0] > 0.5
    gaps = [after - before for (before, _), (after, _) in pairwise(arrivals)]
    assert sorted(gaps)[len(gaps) // 2] > 0.005, "not in bunches"


def test_full_gateway_says_when_to_try_again(scripted: InProcessStack) -> None:
    with connected(scripted) as client:
        stream = client.completions.create(**asked(scripted, 15_000, n=8), stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**asked(scripted, 5))
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.response.headers["retry-after-ms"] == "1000"
        assert (refused.value.type, refused.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        stream.close()
        wait_until(lambda: num_sessions(scripted) == 0, "the session is closed")
        with pytest.raises(openai.BadRequestError) as never:
            client.completions.create(**asked(scripted, 5, n=9))
        assert never.value.param == "n"


def test_body_beyond_the_limit_is_not_read(scripted: InProcessStack) -> None:
    with connected(scripted) as client, pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="x", prompt="x" * 2**20)
    assert refused.value.status_code == 413
    with socket.create_connection(("127.0.0.1", scripted.services["gateway"].http_port), timeout=SECONDS) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        raw.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        for _ in range(17):
            raw.sendall(chunk)
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


# What ends


def test_drain_lets_streams_end_and_takes_no_new_requests() -> None:
    options = {"verifier": {"model": SCRIPT}, "drafter": {"model": SCRIPT}, "gateway": {"drain_seconds": 30}}
    with InProcessStack(options) as stack, connected(stack) as client:
        assert fetch(f"{stack.http_address}/health")[0] == 200
        request = asked(stack, 400, extra_body={"num_speculative_tokens": 0})
        stream = client.completions.create(**request, stream=True)
        chunks = iter(stream)
        first = [next(chunks)]
        ending = stack.begin_stop("gateway")
        wait_until(lambda: fetch(f"{stack.http_address}/health")[0] == 503, "it drains")
        assert json.loads(fetch(f"{stack.http_address}/health")[2]) == {"status": "draining"}
        with pytest.raises(openai.InternalServerError, match="draining") as refused:
            client.completions.create(**request)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            client.models.list()
        assert ids_of(first + list(chunks)) == expected_tokens(len(PROMPT), 400)
        ending.result(SECONDS)


def events_of(stack: InProcessStack, body: dict[str, Any]) -> Iterator[str]:
    body = {**body, **body["extra_body"], "stream": True}
    del body["extra_body"]
    with (
        httpx2.Client(timeout=60.0) as client,
        client.stream("POST", f"{stack.http_address}/v1/completions", json=body) as answer,
    ):
        yield from (line for line in answer.iter_lines() if line)


def test_stream_that_fails_midway_reports_it_and_does_not_end_as_if_whole() -> None:
    options = {"verifier": {"model": SCRIPT}, "gateway": {"failover_timeout_s": 0.2, "drain_seconds": 0.3}}
    with InProcessStack(options) as stack:
        body = asked(stack, 10_000)
        events = events_of(stack, body)
        next(events)
        cut = events_of(stack, body)
        next(cut)
        stack.begin_stop("gateway")
        *_, last = cut
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
    with InProcessStack(options) as stack:
        events = events_of(stack, asked(stack, 10_000))
        next(events)
        stack.kill("verifier")
        *_, last = events
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        with connected(stack) as client, pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**asked(stack, 5))
        assert refused.value.status_code == 503


def test_port_that_is_taken_ends_the_start_with_one_line(scripted: InProcessStack) -> None:
    port = scripted.services["gateway"].http_port
    stack = InProcessStack({"verifier": {"model": SCRIPT}, "gateway": {"http_port": port}})
    with pytest.raises(UnavailableError, match=rf"cannot listen on 127.0.0.1:{port} for HTTP \(http_port\)"), stack:
        pass


# Who gets in


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessStack, trustme.CA, Path]]:
    folder, ca = tmp_path_factory.mktemp("secure"), trustme.CA()
    (folder / "tokens.toml").write_text(tokens(alice={}, bob={"max_sessions": 1}, carol={"max_tokens_per_minute": 60}))
    files = {service: write_identity(folder / service, ca) for service in ("verifier", "gateway")}
    options = {
        "verifier": {"model": SCRIPT, **files["verifier"]},
        "gateway": {
            "host": "0.0.0.0",
            "tls_target_name": NAME,
            "tokens_file": folder / "tokens.toml",
            "tls_require_client_cert": True,
            **files["gateway"],
        },
    }
    with InProcessStack(options) as stack:
        yield stack, ca, folder


def over_tls(ca: Path, identity: Path | None) -> httpx2.Client:
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = False
    if identity is not None:
        context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    return httpx2.Client(verify=context, timeout=60.0)


def test_only_who_shows_certificate_and_token_gets_in(secure: tuple[InProcessStack, trustme.CA, Path]) -> None:
    stack, _, folder = secure
    assert stack.http_address.startswith("https://")
    ca, identity = folder / "gateway" / "ca.pem", folder / "verifier"

    def client(token: str, shown: Path | None = identity) -> openai.OpenAI:
        return connected(stack, token, http_client=over_tls(ca, shown))

    model = client("alice").models.list().data[0].id
    request: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 20}
    assert client("alice").completions.create(**request).usage.completion_tokens == 20
    for token in ("mallory", "Alice", digest_of("alice")):
        for call in (client(token).models.list, lambda t=token: client(t).completions.create(**request)):
            with pytest.raises(openai.AuthenticationError) as refused:
                call()
        assert refused.value.code == "invalid_api_key"
    with over_tls(ca, identity) as plain:
        assert plain.get(f"{stack.http_address}/metrics").status_code == 401
        assert plain.get(f"{stack.http_address}/health").status_code == 200
        good = {"authorization": "Bearer alice"}
        assert plain.get(f"{stack.http_address}/metrics", headers=good).status_code == 200
        twice = [("authorization", "Bearer alice"), ("authorization", "Bearer bob")]
        assert plain.get(f"{stack.http_address}/v1/models", headers=twice).status_code == 401
    with pytest.raises(openai.APIConnectionError):
        client("alice", None).models.list()
    with socket.create_connection(("127.0.0.1", stack.services["gateway"].http_port), timeout=SECONDS) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" not in raw.recv(1000), "no plaintext"


def test_limits_of_tokens_hold(secure: tuple[InProcessStack, trustme.CA, Path]) -> None:
    stack, _, folder = secure
    http_client = over_tls(folder / "gateway" / "ca.pem", folder / "verifier")
    bob, carol = (connected(stack, name, http_client=http_client) for name in ("bob", "carol"))
    model = bob.models.list().data[0].id
    stream = bob.completions.create(model=model, prompt=PROMPT, max_tokens=10_000, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="bob"):
        bob.completions.create(model=model, prompt=PROMPT, max_tokens=5)
    stream.close()
    carol.completions.create(model=model, prompt=PROMPT, max_tokens=100)
    with pytest.raises(openai.RateLimitError, match="used up") as refused:
        carol.completions.create(model=model, prompt=PROMPT, max_tokens=5)
    assert 30 <= int(refused.value.response.headers["retry-after"]) <= 42


def test_certificate_that_changes_is_shown_at_the_next_handshake(
    secure: tuple[InProcessStack, trustme.CA, Path],
) -> None:
    """Last: it takes away what the others believe. Those of a new issuer are believed, those of the old one no more."""
    stack, _, folder = secure
    address = f"127.0.0.1:{stack.services['gateway'].http_port}"
    old_ca = (folder / "gateway" / "ca.pem").read_bytes()
    (folder / "old.pem").write_bytes(old_ca)
    other = trustme.CA()
    write_identity(folder / "user", other)
    write_identity(folder / "gateway", other)
    wait_until(
        lambda: certificate_of(address) == first_certificate(folder / "gateway" / "cert.pem"), "the new one is shown"
    )
    with over_tls(folder / "gateway" / "ca.pem", folder / "user") as client:
        assert client.get(f"{stack.http_address}/health").status_code == 200
    with (
        over_tls(folder / "gateway" / "ca.pem", folder / "verifier") as client,
        pytest.raises(httpx2.TransportError),
    ):
        client.get(f"{stack.http_address}/health")


def test_gateway_that_would_refuse_the_next_request_is_not_ready(
    scripted: InProcessStack,
) -> None:
    def state() -> tuple[int, str]:
        status, _, body = fetch(f"{scripted.http_address}/ready")
        return status, json.loads(body)["status"]

    assert state() == (200, "ok")
    stream = connected(scripted).completions.create(**asked(scripted, 3000, n=8, stream=True))
    next(iter(stream))
    assert state() == (503, "full")
    assert fetch(f"{scripted.http_address}/health")[0] == 200
    stream.close()
    wait_until(lambda: state() == (200, "ok"), "its places are free")
