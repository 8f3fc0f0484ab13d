"""The three services with certificates and tokens: who gets in, who does not, and what changes without a restart."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from certificates import NAME, YESTERDAY, certificate_of, first_certificate, replace_file, write_identity
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from observing import read_metric, wait_until

from benchmarks.relay import Relay, free_port
from draftwire.client import AsyncClient, Client
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnauthenticatedError, UnavailableError
from draftwire.models.script import expected_tokens
from draftwire.runtime.peers import ModelPeer
from draftwire.runtime.settings import ConnectionSettings, TlsSettings
from draftwire.runtime.tls import Dialler, watch_tls
from draftwire.v1 import gateway_pb2
from draftwire_gateway.auth.tokens import TokenEntry, digest_of
from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
PROMPT = [1, 2, 3, 4, 5]
SECONDS = 10.0
SERVICES = ("verifier", "drafter", "gateway")


@dataclass
class Rig:
    """A stack whose connections all are mutual TLS; the gateway and the drafter reach the verifier through a relay."""

    folder: Path
    ca: trustme.CA
    to_verifier: Relay
    stack: InProcessStack
    events: list[str] = field(default_factory=list)

    def identify(self, service: str, ca: trustme.CA | None = None, **options: Any) -> dict[str, Path]:
        """Gives a service a new certificate."""
        return write_identity(self.folder / service, ca or self.ca, **options)

    def client(self, token: str | None = "alice", ca: Path | None = None, name: str = NAME) -> Client:
        return Client(self.stack.address, tls_ca=ca or self.ca_of("gateway"), tls_target_name=name, token=token)

    def ca_of(self, service: str) -> Path:
        return self.folder / service / "ca.pem"

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.stack.services[service].port}"


def tokens(**limits: dict[str, int]) -> str:
    """Returns a file in which everybody's token is their name."""
    return "".join(TokenEntry(name, digest_of(name), **own).to_toml() for name, own in limits.items())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder, ca, ports = tmp_path_factory.mktemp("secure"), trustme.CA(), {"verifier": free_port()}
    (folder / "tokens.toml").write_text(tokens(alice={}, bob={"max_sessions": 1}, carol={"max_tokens_per_minute": 60}))
    files = {service: write_identity(folder / service, ca) for service in SERVICES}
    with Relay(ports["verifier"]) as to_verifier:
        stack = InProcessStack(
            {
                "verifier": {"model": SCRIPT, "port": ports["verifier"], **files["verifier"]},
                "drafter": {"model": SCRIPT, "tls_target_name": NAME, "host": "0.0.0.0", **files["drafter"]},
                "gateway": {
                    "verifier": f"127.0.0.1:{to_verifier.port}",
                    "tls_target_name": NAME,
                    "tokens_file": folder / "tokens.toml",
                    **files["gateway"],
                },
            },
            on_log=lambda _service, line: rig.events.append(str(line["event"])),
        )
        rig = Rig(folder, ca, to_verifier, stack)
        with stack:
            yield rig


def check(client: Client) -> None:
    """Checks that a completion comes, of drafted tokens."""
    with client:
        completion = client.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert completion.token_ids == expected_tokens(len(PROMPT), 40)
    assert completion.drafter_error == ""
    assert completion.statistics.num_drafts > 0


def refusal(client: Client) -> DraftwireError:
    with client, pytest.raises(DraftwireError) as refused:
        client.server()
    return refused.value


# Users


def test_completion_travels_over_mutual_tls_alone(rig: Rig) -> None:
    check(rig.client())


def test_user_who_does_not_believe_the_gateway_does_not_reach_it(rig: Rig, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.pem"
    trustme.CA().cert_pem.write_to_path(foreign)
    plaintext = Client(rig.stack.address, token="alice")
    for client in (rig.client(ca=foreign), rig.client(name="someone.else"), plaintext):
        assert type(refusal(client)) is UnavailableError


async def test_async_client_takes_certificates_and_token(rig: Rig, tmp_path: Path) -> None:
    named: dict[str, Any] = {"tls_ca": rig.ca_of("gateway"), "tls_target_name": NAME}
    async with AsyncClient(rig.stack.address, token="alice", **named) as client:
        completion = await client.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert completion.token_ids == expected_tokens(len(PROMPT), 40)
    async with AsyncClient(rig.stack.address, token="mallory", **named) as client:
        for call in (client.generate(PROMPT, max_tokens=1), client.server()):
            with pytest.raises(UnauthenticatedError, match="a bearer token is needed"):
                await call
    async with AsyncClient(rig.stack.address, token="alice", **{**named, "tls_target_name": "someone.else"}) as client:
        with pytest.raises(UnavailableError):
            await client.server()
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        AsyncClient(rig.stack.address, tls_ca=tmp_path / "nothing.pem")


@pytest.mark.parametrize("token", [None, "mallory", "Alice", digest_of("alice")])
def test_user_without_a_good_token_is_refused_by_every_method(rig: Rig, token: str | None) -> None:
    with rig.client(token) as client:
        methods = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods_by_name
        for name in methods:
            call = client._channels[0].unary_stream(f"/draftwire.v1.GatewayService/{name}")
            with pytest.raises(grpc.RpcError) as refused:
                list(call(b"", timeout=SECONDS, metadata=client._metadata))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
        with pytest.raises(UnauthenticatedError, match="a bearer token is needed"):
            client.generate(PROMPT, max_tokens=1)


def test_health_and_reflection_need_no_token(rig: Rig) -> None:
    with rig.client(None) as client:
        health = health_pb2_grpc.HealthStub(client._channels[0])
        for service in ("", "draftwire.v1.GatewayService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request, timeout=SECONDS).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(client._channels[0])
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([asked]), timeout=SECONDS)
        assert "draftwire.v1.GatewayService" in {service.name for service in answer.list_services_response.service}


def test_limits_of_one_holder_do_not_touch_others(rig: Rig) -> None:
    with rig.client("bob") as bob:
        stream = bob.stream(PROMPT, max_tokens=500, temperature=0.0)
        pieces = iter(stream)
        next(pieces)
        with pytest.raises(NoRoomError, match="1 requests of bob") as refused:
            bob.generate(PROMPT, max_tokens=1)
        assert refused.value.retry_after_s == 1.0
        assert read_metric(rig.stack, "gateway", "caller_requests_refused", 'caller="bob",by="caller"') >= 1.0
        check(rig.client())
        assert stream.completion is None, "the test is over before its stream"
        stream.cancel()
        wait_until(lambda: serves(bob), "bob is served")


def serves(client: Client) -> bool:
    try:
        client.generate(PROMPT, max_tokens=1)
    except NoRoomError:
        return False
    return True


def test_prompt_of_one_holder_is_not_found_by_another(rig: Rig) -> None:
    """Whatever salt that one asks for; their own they find."""
    prompt = list(range(1, 60))

    def num_cached(token: str, salt: str) -> int:
        with rig.client(token) as client:
            statistics = client.generate(prompt, max_tokens=1, cache_salt=salt).statistics
        return statistics.num_cached_prompt_tokens

    for salt in ("", "x"):
        assert [num_cached("alice", salt) > 0 for _ in range(2)] == [False, True]
        assert num_cached("bob", salt) == 0


def test_tokens_are_charged_as_generated_and_a_running_request_is_not_cut(rig: Rig) -> None:
    with rig.client("carol") as carol:
        assert len(carol.generate(PROMPT, max_tokens=120, temperature=0.0).token_ids) == 120
        with pytest.raises(NoRoomError, match="60 tokens a minute") as refused:
            carol.generate(PROMPT, max_tokens=1)
        assert 50.0 < refused.value.retry_after_s <= 61.0


def test_tokens_change_without_a_restart(rig: Rig) -> None:
    path = rig.folder / "tokens.toml"
    before = path.read_bytes()
    replace_file(path, b"[[token]")
    check(rig.client())
    replace_file(path, tokens(dave={}).encode())
    check(rig.client("dave"))
    assert type(refusal(rig.client())) is UnauthenticatedError
    replace_file(path, tokens(dave={}).encode() + b"expires_at = 2020-01-31T12:00:00Z\n")
    expired = refusal(rig.client("dave"))
    assert (type(expired), "has expired" in str(expired)) == (UnauthenticatedError, True)
    replace_file(path, before)
    check(rig.client())
    assert rig.events.count("files.reload_failed") == 1


def test_command_line_takes_certificates_and_token_from_its_environment(rig: Rig) -> None:
    security = {"TLS_CA": str(rig.ca_of("gateway")), "TLS_TARGET_NAME": NAME, "TOKEN": "alice"}
    environment = {f"DRAFTWIRE_{name}": value for name, value in security.items()}

    def generate(**changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftwire.cli", "generate", "ab", "--max-tokens=3", "--temperature=0"]
        env = {**os.environ, **environment, **changes, "DRAFTWIRE_ADDRESS": rig.stack.address}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    assert generate().stdout == "abcde\n"
    refused = generate(DRAFTWIRE_TOKEN="mallory")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a bearer token is needed" in refused.stderr


# Services


@pytest.mark.parametrize("service", SERVICES)
def test_services_report_the_expiry_of_certificates_and_reload_their_files(rig: Rig, service: str) -> None:
    def expiry(option: str) -> float:
        return read_metric(rig.stack, service, "certificate_expiry_timestamp_seconds", f'option="{option}"')

    before, in_a_week = expiry("tls_cert"), datetime.now(UTC).replace(microsecond=0) + timedelta(days=7)
    rig.identify(service, not_after=in_a_week)
    assert expiry("tls_cert") == in_a_week.timestamp() < before
    assert expiry("tls_ca") > in_a_week.timestamp()
    rig.identify(service)
    assert expiry("tls_cert") == before


@pytest.mark.parametrize("service", SERVICES)
def test_health_command_needs_only_the_configuration_of_the_service(rig: Rig, service: str) -> None:
    files = {f"tls_{part}": rig.folder / service / f"{part}.pem" for part in ("cert", "key", "ca")}
    own = {"port": rig.stack.services[service].port, **files}
    environment = {f"DRAFTWIRE_{service}_{name}".upper(): str(value) for name, value in own.items()}

    def health(**others: str) -> int:
        command = [sys.executable, "-m", "draftwire.cli", "health", service]
        return subprocess.run(command, env={**os.environ, **environment, **others}, timeout=60, check=False).returncode

    assert health(DRAFTWIRE_TLS_TARGET_NAME=NAME) == 0
    assert health(DRAFTWIRE_TLS_TARGET_NAME="someone.else") == 1


@pytest.mark.parametrize("service", ["verifier", "drafter"])
async def test_service_takes_calls_of_its_peers_alone(rig: Rig, service: str, tmp_path: Path) -> None:
    """The way that a gateway asks each of them, and a drafter a verifier, for its model."""
    good = write_identity(tmp_path / "good", rig.ca)
    foreign = write_identity(tmp_path / "foreign", trustme.CA())
    callers = {
        "peer": (good, NAME),
        "no certificate": ({"tls_ca": good["tls_ca"]}, NAME),
        "certificate of another issuer": ({**foreign, "tls_ca": good["tls_ca"]}, NAME),
        "expired certificate": (write_identity(tmp_path / "expired", rig.ca, not_after=YESTERDAY), NAME),
        "believes another issuer": ({**good, "tls_ca": foreign["tls_ca"]}, NAME),
        "expects another name": (good, "someone.else"),
        "plaintext": ({}, None),
    }

    async def is_served(files: dict[str, Path], name: str | None) -> bool:
        settings = TlsSettings(**files, tls_target_name=name)
        dialler = Dialler(ConnectionSettings(), settings, watch_tls(settings))
        async with dialler.open(rig.address(service), bulk=True) as channel:
            try:
                await ModelPeer(channel, 2.0).describe()
            except UnavailableError:
                return False
            return True

    outcomes = await asyncio.gather(*(is_served(*caller) for caller in callers.values()))
    assert [name for name, served in zip(callers, outcomes, strict=True) if served] == ["peer"]


@pytest.fixture
def odd_stack(tmp_path: Path) -> Iterator[tuple[InProcessStack, Path, trustme.CA]]:
    """A stack whose drafter has a certificate that its gateway believes and its verifier does not."""
    ca, other = trustme.CA(), trustme.CA()
    files = {service: write_identity(tmp_path / service, ca) for service in SERVICES}
    write_identity(tmp_path / "drafter", other)
    replace_file(tmp_path / "drafter" / "ca.pem", ca.cert_pem.bytes())
    replace_file(tmp_path / "gateway" / "ca.pem", ca.cert_pem.bytes() + other.cert_pem.bytes())
    named = {"tls_target_name": NAME}
    options: dict[str, dict[str, object]] = {
        "verifier": {"model": SCRIPT, **files["verifier"]},
        "drafter": {"model": SCRIPT, "connect_timeout_s": 1.0, **files["drafter"], **named},
        "gateway": {**files["gateway"], **named, "tls_require_client_cert": True, "local_drafts": "none"},
    }
    with InProcessStack(options) as stack:
        yield stack, tmp_path, ca


def test_distrusted_drafter_sends_no_block_until_its_certificate_is_better(
    odd_stack: tuple[InProcessStack, Path, trustme.CA],
) -> None:
    """And users of this gateway need certificates."""
    stack, folder, ca = odd_stack
    user = {**write_identity(folder / "user", ca), "tls_target_name": NAME}
    with Client(stack.address, **user) as client:
        completion = client.generate(PROMPT, max_tokens=300, temperature=0.0)
        assert completion.token_ids == expected_tokens(len(PROMPT), 300)
        assert completion.statistics.num_drafts == 0
        assert "did not answer" in completion.drafter_error
        write_identity(folder / "drafter", ca)
        wait_until(lambda: client.generate(PROMPT, max_tokens=40).statistics.num_drafts, "it tries again, and drafts")
        check(client)
    anonymous = Client(stack.address, tls_ca=user["tls_ca"], tls_target_name=NAME)
    assert type(refusal(anonymous)) is UnavailableError


def test_certificates_change_while_a_stream_runs_on(rig: Rig) -> None:
    with rig.client() as before:
        stream = before.stream(PROMPT, max_tokens=1000, temperature=0.0)
        pieces = iter(stream)
        token_ids = next(pieces).token_ids
        rig.identify("gateway", not_after=YESTERDAY)
        assert type(refusal(rig.client())) is UnavailableError
        fresh = rig.identify("gateway")
        check(rig.client())
        assert certificate_of(rig.stack.address) == first_certificate(fresh["tls_cert"])
        assert stream.completion is None, "the test is over before its stream"
        for piece in pieces:
            token_ids += piece.token_ids
    assert token_ids == expected_tokens(len(PROMPT), 1000)


def test_services_reconnect_after_all_certificates_have_changed(rig: Rig) -> None:
    """Connections break once under the new certificates; the old ones are good for nothing then."""
    try:
        for ca in (trustme.CA(), rig.ca):
            for service in SERVICES:
                rig.identify(service, ca)
            check(rig.client())
            for connection in rig.to_verifier.open_connections:
                connection.close()
            wait_until(lambda: is_whole(rig), "the services find each other")
    finally:
        for service in SERVICES:
            rig.identify(service)


def is_whole(rig: Rig) -> bool:
    try:
        check(rig.client())
    except (AssertionError, UnavailableError):
        return False
    return True


# At the start


def test_plaintext_is_not_offered_to_other_machines() -> None:
    options = [f"--model={SCRIPT}", "--port=0", "--host=0.0.0.0"]
    command = [sys.executable, "-m", "draftwire.cli", "serve", "verifier", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("verifier: host 0.0.0.0 is reached from other machines: set tls_cert and tls_key")
    assert result.stderr.count("\n") == 1
