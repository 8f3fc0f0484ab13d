"""`draftwire health` against servers that are well, are not, or are not there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from certificates import NAME, write_identity
from command_line import run
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from draftwire.cli.__main__ import app
from draftwire.cli.exits import MISUSED
from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """Answers questions for health on a port of its own."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.port = (
            self._server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else self._server.add_secure_port("127.0.0.1:0", credentials)
        )
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(None).wait()

    def set(self, name: str, status: int) -> None:
        self.health.set(name, status)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def ask(*arguments: str, **environment: str) -> str:
    """Returns what the command says; an error is raised, as `main` gets it."""
    variables = {f"DRAFTWIRE_{name}": value for name, value in environment.items()}
    result = CliRunner(env=variables).invoke(app, ["health", *arguments])
    if isinstance(result.exception, DraftwireError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_service_is_found_by_its_variables_unless_an_address_is_given(server: Server) -> None:
    for service in ("gateway", "verifier", "drafter"):
        server.set(f"draftwire.v1.{service.capitalize()}Service", SERVING)
        own = {f"{service.upper()}_PORT": str(server.port), f"{service.upper()}_HOST": "0.0.0.0"}
        assert ask(service, **own) == f"{server.address} is serving"
    assert "is serving" in ask("verifier", "--address", server.address, VERIFIER_PORT="1")


def test_readiness_is_the_services_and_liveness_the_processs(server: Server) -> None:
    server.set("draftwire.v1.VerifierService", NOT_SERVING)
    with pytest.raises(UnavailableError, match=f"{server.address} says NOT_SERVING"):
        ask("verifier", "--address", server.address)
    assert "is serving" in ask("verifier", "--address", server.address, "--live")
    server.set("", NOT_SERVING)
    with pytest.raises(UnavailableError, match="NOT_SERVING"):
        ask("verifier", "--address", server.address, "--live")


def test_endless_timeout_is_a_long_one(server: Server) -> None:
    server.set("draftwire.v1.VerifierService", SERVING)
    for seconds in ("1e10", "inf"):
        assert "is serving" in ask("verifier", "--address", server.address, "--timeout", seconds)


def test_service_of_another_kind_is_not_well(server: Server) -> None:
    server.set("draftwire.v1.DrafterService", SERVING)
    with pytest.raises(UnavailableError, match="does not answer"):
        ask("verifier", "--address", server.address)


def test_wrong_questions_are_refused() -> None:
    misspelt = CliRunner().invoke(app, ["health", "vertifier"])
    assert misspelt.exit_code == MISUSED
    assert "unknown service 'vertifier'; known: drafter, gateway, verifier" in misspelt.output
    with pytest.raises(InvalidRequestError, match="tls_cert and tls_key come together"):
        ask("verifier", "--tls-cert", "cert.pem")


def secure(files: dict[str, Path], *, asks_callers: bool) -> Server:
    pair = (files["tls_key"].read_bytes(), files["tls_cert"].read_bytes())
    ca = files["tls_ca"].read_bytes()
    server = Server(grpc.ssl_server_credentials([pair], ca if asks_callers else None, asks_callers))
    server.set("draftwire.v1.VerifierService", SERVING)
    return server


@pytest.mark.parametrize("given", [("cert", "key", "ca"), ("cert", "key")])
def test_service_with_certificates_is_asked_over_tls_with_its_own(tmp_path: Path, given: tuple[str, ...]) -> None:
    """With `tls_ca` callers show a certificate; without, nothing but the service's own says whom to believe."""
    files, others = (write_identity(tmp_path / name, trustme.CA()) for name in ("own", "other"))
    with secure(files, asks_callers="ca" in given) as server:
        port = {"VERIFIER_PORT": str(server.port)}
        own, strange = (
            port | {f"VERIFIER_TLS_{part.upper()}": str(of[f"tls_{part}"]) for part in given} for of in (files, others)
        )
        assert "is serving" in ask("verifier", **own, TLS_TARGET_NAME=NAME)
        assert "is serving" in ask("verifier", "--tls-target-name", NAME, **own)
        for wrong in (own | {"TLS_TARGET_NAME": "someone.else"}, port, strange | {"TLS_TARGET_NAME": NAME}):
            with pytest.raises(UnavailableError, match="does not answer"):
                ask("verifier", **wrong)


def test_options_say_whom_to_believe_elsewhere(tmp_path: Path) -> None:
    files = write_identity(tmp_path / "own", trustme.CA())
    options = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    with secure(files, asks_callers=True) as server:
        address = f"--address={server.address}"
        assert "is serving" in ask("verifier", address, *options, f"--tls-target-name={NAME}")


def test_command_fails_with_one_line_where_nothing_answers() -> None:
    result = run("health", "verifier", "--address=127.0.0.1:1")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("error: 127.0.0.1:1 does not answer: ")
