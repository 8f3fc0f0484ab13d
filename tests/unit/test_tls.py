"""Certificates: read, checked, shown, believed, and read again when they change."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import structlog
import trustme
import typer
from certificates import NAME, YESTERDAY, certificate_of, first_certificate, replace_file, write_identity
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from typer.testing import CliRunner

from draftwire.cli.options import serve_command
from draftwire.client import Client
from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.runtime.settings import ConnectionSettings, TlsSettings
from draftwire.runtime.tls import (
    Dialler,
    RenewedChannel,
    read_material,
    server_context,
    server_credentials,
    watch_tls,
)

OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CONNECTIONS = ConnectionSettings()
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def settings(tmp_path: Path, ca: trustme.CA) -> TlsSettings:
    return TlsSettings(**write_identity(tmp_path / "own", ca), tls_target_name=NAME)


@asynccontextmanager
async def serving(settings: TlsSettings) -> AsyncIterator[str]:
    """Runs a server with nothing but health, in plaintext without certificates, and yields its address."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    credentials = server_credentials(watch_tls(settings), settings) or grpc.insecure_server_credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def status(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    return await call.code()


async def dialled(settings: TlsSettings, address: str) -> grpc.StatusCode:
    """Returns the status of a call over a new connection."""
    async with Dialler(CONNECTIONS, settings, watch_tls(settings)).open(address, bulk=False) as channel:
        return await status(channel)


# Files that are no good


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:120])


SPOILT: tuple[Callable[[Path], object], ...] = (
    cut,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\xff\x00" * 9),
    Path.unlink,
    Path.mkdir,
)


@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_ca"])
def test_bad_file_is_refused_on_one_line_with_its_name_and_option(settings: TlsSettings, option: str) -> None:
    path: Path = getattr(settings, option)
    for spoil in SPOILT:
        spoil(path)
        with pytest.raises(InvalidRequestError, match=rf"^{option}: {path} [^\n]+$"):
            watch_tls(settings)


def test_foreign_key_is_refused_without_asking_for_a_password(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA
) -> None:
    key, locked = settings.tls_key, tmp_path / "locked.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked], check=True)
    for option, path, said in (
        ("tls_key", write_identity(tmp_path / "other", ca)["tls_key"], r"^tls_key: .* is not the key of .*cert\.pem$"),
        ("tls_key", locked, r"^tls_key: .* without a password"),
        ("tls_cert", key, "^tls_cert: "),
        ("tls_ca", key, "^tls_ca: "),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            watch_tls(replace(settings, **{option: path}))


@pytest.fixture
def own_logging() -> Iterator[None]:
    """What a service that is started sets for the whole process is put back: it logs to a stream that is closed."""
    config = structlog.get_config()
    yield
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()


@pytest.mark.usefixtures("own_logging")
def test_service_with_a_missing_file_does_not_start(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(serve_command("gateway"))
    files = [f"--tls-cert={tmp_path}/cert.pem", f"--tls-key={tmp_path}/key.pem"]
    result = CliRunner().invoke(app, ["--port=0", *files])
    assert result.exit_code == 2
    assert result.stderr == f"gateway: tls_cert: {tmp_path}/cert.pem cannot be read: No such file or directory\n"


# Who is believed


async def test_peer_is_refused_by_whoever_does_not_believe_it(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA
) -> None:
    own = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key, "tls_ca": settings.tls_ca}
    foreign = write_identity(tmp_path / "foreign", other_ca)
    expired = write_identity(tmp_path / "expired", ca, not_after=YESTERDAY)
    refused = {
        "issuer of the server": {**own, "tls_ca": foreign["tls_ca"]},
        "issuer of the client": {**foreign, "tls_ca": own["tls_ca"]},
        "expired client": expired,
        "no client certificate": {"tls_ca": own["tls_ca"]},
    }
    callers = {name: TlsSettings(**files, tls_target_name=NAME) for name, files in refused.items()} | {
        "another name": replace(settings, tls_target_name="someone.else"),
        "called by address": replace(settings, tls_target_name=None),
        "in plaintext": TlsSettings(),
        "believed": settings,
    }
    async with serving(settings) as address:
        found = {name: await dialled(caller, address) for name, caller in callers.items()}
    assert found == dict.fromkeys(callers, UNAVAILABLE) | {"believed": OK}
    async with serving(TlsSettings(**expired)) as address:
        assert await dialled(settings, address) is UNAVAILABLE


async def test_client_certificate_is_needed_only_where_it_is_required(settings: TlsSettings) -> None:
    anonymous = TlsSettings(tls_ca=settings.tls_ca, tls_target_name=NAME)
    async with serving(replace(settings, tls_require_client_cert=False)) as address:
        assert await dialled(anonymous, address) is OK
        assert await dialled(settings, address) is OK
    async with serving(TlsSettings(tls_cert=settings.tls_cert, tls_key=settings.tls_key)) as address:
        assert await dialled(anonymous, address) is OK


async def test_whoever_knows_whom_to_believe_never_speaks_plaintext(settings: TlsSettings) -> None:
    assert watch_tls(TlsSettings()) is None
    async with serving(TlsSettings()) as address:
        assert await dialled(TlsSettings(), address) is OK
        assert await dialled(settings, address) is UNAVAILABLE


# Files that change


async def shown(address: str) -> str:
    """Returns the certificate that a server shows to a new connection."""
    return await asyncio.to_thread(certificate_of, address)


async def test_server_shows_new_certificates_to_new_connections_alone(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA
) -> None:
    own = tmp_path / "own"
    async with serving(settings) as address:
        assert await shown(address) == first_certificate(own / "cert.pem")
        async with Dialler(CONNECTIONS, settings, watch_tls(settings)).open(address, bulk=False) as old:
            assert await status(old) is OK
            before = await shown(address)
            write_identity(own, other_ca)
            assert await shown(address) == first_certificate(own / "cert.pem") != before
            assert await status(old) is OK, "the old connection goes on"
        assert await dialled(settings, address) is OK
        former = TlsSettings(**write_identity(tmp_path / "former", ca), tls_target_name=NAME)
        assert await dialled(replace(former, tls_ca=settings.tls_ca), address) is UNAVAILABLE, "new issuers count too"


async def test_link_that_is_swapped_counts_as_a_change(settings: TlsSettings, tmp_path: Path, ca: trustme.CA) -> None:
    """So does Kubernetes with the folder of a mounted secret."""
    for version in ("one", "two"):
        write_identity(tmp_path / version, ca)
    (tmp_path / "data").symlink_to("one")
    linked = {f"tls_{stem}": tmp_path / f"{stem}.pem" for stem in ("cert", "key", "ca")}
    for path in linked.values():
        path.symlink_to(Path("data") / path.name)
    async with serving(TlsSettings(**linked)) as address:
        assert await shown(address) == first_certificate(tmp_path / "one" / "cert.pem")
        (tmp_path / "fresh").symlink_to("two")
        (tmp_path / "fresh").rename(tmp_path / "data")
        assert await shown(address) == first_certificate(tmp_path / "two" / "cert.pem")


def test_half_replaced_pair_keeps_the_old_one_and_is_logged_once(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA
) -> None:
    files = watch_tls(settings)
    old = files.current()
    fresh = write_identity(tmp_path / "fresh", ca)
    replace_file(settings.tls_cert, fresh["tls_cert"].read_bytes())
    with capture_logs() as lines:
        assert [files.current() is old for _ in range(3)] == [True] * 3
        settings.tls_key.write_bytes(fresh["tls_key"].read_bytes()[:100])  # half written
        assert [files.current() is old for _ in range(3)] == [True] * 3
        replace_file(settings.tls_key, fresh["tls_key"].read_bytes())
        now = files.current()
        assert files.current() is now
    assert now == read_material(settings) != old
    told = [(line["event"], line["log_level"]) for line in lines]
    assert told == [("files.reload_failed", "warning")] * 2 + [("files.reloaded", "info")]


def test_files_that_are_gone_change_nothing_until_they_are_back(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA
) -> None:
    files = watch_tls(settings)
    old = files.current()
    for name in ("cert", "key", "ca"):
        (tmp_path / "own" / f"{name}.pem").unlink()
    assert files.current() is old
    write_identity(tmp_path / "own", ca)
    assert files.current() == read_material(settings)


def test_files_that_change_while_they_are_read_are_read_again(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificate and key of one version each would not be found out by reading them once."""
    files = watch_tls(settings)
    old = files.current()
    write_identity(tmp_path / "own", ca)
    with monkeypatch.context() as patched:
        read = files._read

        def slowly() -> object:
            material = read()
            write_identity(tmp_path / "own", ca)
            return material

        patched.setattr(files, "_read", slowly)
        assert files.current() is old
    assert files.current() == read_material(settings)


def test_files_are_not_read_while_they_stay_as_they_are(settings: TlsSettings) -> None:
    files = watch_tls(settings)
    old = files.current()
    os.chmod(settings.tls_key, 0o600)  # counts as a change, which changes nothing
    assert files.current() == old
    assert files.current() is files.current()


def renewed_channel(settings: TlsSettings, address: str) -> RenewedChannel:
    return RenewedChannel(Dialler(CONNECTIONS, settings, watch_tls(settings)), address, bulk=False)


async def watching(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    """Returns a call that goes on."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="later"))
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    return call


async def test_changed_files_renew_a_channel_and_the_old_closes_when_unused(
    settings: TlsSettings, tmp_path: Path, ca: trustme.CA
) -> None:
    async with serving(settings) as address:
        renewed = renewed_channel(settings, address)
        old = renewed.get()
        call = await watching(old)
        assert renewed.get() is old
        write_identity(tmp_path / "own", ca)
        now = renewed.get()
        assert now is not old
        assert renewed.get() is now
        assert await status(now) is OK
        assert not call.done()
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while old.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.01)
        await renewed.get().close()


async def test_closing_ends_the_calls_on_the_channel(settings: TlsSettings) -> None:
    async with serving(settings) as address:
        renewed = renewed_channel(settings, address)
        call = await watching(renewed.get())
        async with asyncio.timeout(DEADLINE_S):
            await renewed.close()
            assert await call.code() is grpc.StatusCode.CANCELLED
        assert renewed.get().get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_service_shows_its_new_certificate_after_the_old_one_expired(
    tmp_path: Path, settings: TlsSettings, ca: trustme.CA
) -> None:
    """A channel of gRPC alone would reconnect with the expired one for ever."""
    caller = TlsSettings(**write_identity(tmp_path / "caller", ca, not_after=YESTERDAY), tls_target_name=NAME)
    async with serving(settings) as address:
        renewed = renewed_channel(caller, address)
        assert await status(renewed.get()) is UNAVAILABLE
        write_identity(tmp_path / "caller", ca)
        assert await status(renewed.get()) is OK
        await renewed.get().close()


# Plaintext


def test_no_other_machine_is_called_in_plaintext_unless_that_is_allowed(ca: trustme.CA, tmp_path: Path) -> None:
    """Whoever names its address: a drafter is told those of verifiers by gateways."""
    identity = write_identity(tmp_path / "caller", ca)
    without_ca = {name: identity[name] for name in ("tls_cert", "tls_key")}
    for settings in (TlsSettings(), TlsSettings(**without_ca)):
        dialler = Dialler(CONNECTIONS, settings, watch_tls(settings))
        for address in ("10.0.0.1:1", "host:1", "0.0.0.0:1", "dns:///host:1"):
            with pytest.raises(
                InvalidRequestError, match="would be called without TLS: set tls_ca, or allow_plaintext"
            ):
                dialler.open(address, bulk=True)


async def test_other_machines_are_called_over_tls_or_where_that_is_allowed(ca: trustme.CA, tmp_path: Path) -> None:
    identity = write_identity(tmp_path / "caller", ca)
    for settings in (TlsSettings(allow_plaintext=True), TlsSettings(tls_ca=identity["tls_ca"])):
        await Dialler(CONNECTIONS, settings, watch_tls(settings)).open("10.0.0.1:1", bulk=True).close()


# The client of users


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "x"}, "come together"),
        ({"tls_ca": "x", "tls_key": "x"}, "come together"),
        ({"tls_cert": "x", "tls_key": "x"}, "need tls_ca"),
        ({"tls_target_name": "x"}, "need tls_ca"),
        ({"tls_ca": "/nowhere.pem"}, "^tls_ca: /nowhere.pem cannot be read"),
        ({"token": ""}, "token"),
        ({"token": "two\nlines"}, "token"),
        ({"token": "schlüssel"}, "token"),
    ],
)
def test_client_with_options_that_do_not_fit_together_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Client("127.0.0.1:1", **options)


async def test_client_says_why_it_does_not_reach_a_gateway(settings: TlsSettings, other_ca: trustme.CA) -> None:
    foreign = settings.tls_ca.with_name("foreign.pem")
    foreign.write_bytes(other_ca.cert_pem.bytes())
    async with serving(replace(settings, tls_require_client_cert=False)) as address:
        unreached = pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED")
        with Client(address, tls_ca=foreign, tls_target_name=NAME) as client, unreached:
            await asyncio.to_thread(client.wait_ready, 0.5)


@pytest.mark.parametrize("comment", ["# Société".encode(), "# Société".encode("latin-1")], ids=["utf-8", "latin-1"])
def test_comment_between_the_believed_certificates_may_be_in_any_encoding(
    settings: TlsSettings, comment: bytes
) -> None:
    settings.tls_ca.write_bytes(comment + b"\n" + settings.tls_ca.read_bytes() + comment)
    settings = replace(settings, tls_require_client_cert=True)
    context = server_context(watch_tls(settings), settings)
    assert len(context.get_ca_certs()) == 1


def test_files_that_are_taken_by_nobody_change_nothing_at_a_handshake(
    settings: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = server_context(watch_tls(settings), settings)
    handshake = SimpleNamespace(context=None)
    for error in (OSError, TypeError, ValueError):
        settings.tls_cert.write_bytes(settings.tls_cert.read_bytes() + b"\n")

        def broken(*_: object, error: type[Exception] = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("draftwire.runtime.tls._server_context", broken)
            context.sni_callback(handshake, None, context)  # type: ignore[misc]
        assert handshake.context is not None
