"""How the Python clients connect: to what, and for how long. Against sockets that accept and say nothing."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from client_fakes import LOST

from draftwire.client import AsyncClient, Client
from draftwire.client.client_channels import addresses_of, in_turn
from draftwire.errors import InvalidRequestError, UnavailableError
from tests.twins import TWINS

SLACK_S = 0.7
"""For a busy machine."""


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Three addresses where connections are accepted and nothing is answered."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


@contextmanager
def unavailable_after(seconds: float, says: str | None = None) -> Iterator[None]:
    started_at = time.monotonic()
    with pytest.raises(UnavailableError, match=says):
        yield
    assert seconds - 0.1 < time.monotonic() - started_at < seconds + SLACK_S


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_silent_gateways_are_waited_for_no_longer_than_asked_in_all(
    silent: list[str], twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sync", "aio"):
        monkeypatch.setattr(f"draftwire.client.{module}.ANSWER_SECONDS", 0.5)
    for count in (1, 3):
        with twin(silent[:count]) as client, unavailable_after(0.7, r"within 0\.7 s"):
            client.wait_ready(0.7)
    with twin(silent) as client, unavailable_after(0.5):
        client.server()
    refused = r"no gateway answered at 127\.0\.0\.1:1 within 0\.7 s \(.*refused"
    with twin("127.0.0.1:1") as client, unavailable_after(0.7, refused):
        client.wait_ready(0.7)


def test_time_that_one_does_not_need_is_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("draftwire.client.client_channels.time.monotonic", lambda: now)
    shares = in_turn("abc", 9.0)
    assert next(shares) == ("a", 3.0)
    now += 1.0
    assert next(shares) == ("b", 4.0)
    now += 10.0
    assert next(shares) == ("c", 0.0)


# Addresses


def test_addresses_are_a_list_or_separated_by_commas_and_none_is_empty() -> None:
    addresses: list[Any] = [[], "", " ", "a:1,", "a:1,,b:2", ["a:1", ""]]
    for kind in (Client, AsyncClient):
        for address in addresses:
            with pytest.raises(InvalidRequestError, match="address"):
                kind(address)
    with pytest.raises(InvalidRequestError, match="http://a:8000 is an HTTP address; name the gateway's gRPC port"):
        addresses_of("b:1,http://a:8000")
    with pytest.raises(InvalidRequestError, match="localhost has no port; a gateway's is 50051"):
        addresses_of("localhost")
    with pytest.raises(InvalidRequestError, match="the port of localhost:http is no number"):
        addresses_of("localhost:http")
    for other in ("unix:socket", "dns:///gateway", "dns:///gateway:1", "[::1]:1", "ipv4:127.0.0.1:1"):
        assert addresses_of(other) == [other]
    assert addresses_of(" a:1, b:2") == addresses_of(("a:1", "b:2 ")) == ["a:1", "b:2"]


# Closing


class Closing:
    """A gateway whose client is closed, by another thread, between its check and its call."""

    def __init__(self, client: Client) -> None:
        self._client, self._stub = client, client._stubs[0]

    def __getattr__(self, method: str) -> Any:
        self._client.close()
        return getattr(self._stub, method)


def test_client_that_is_closed_during_a_call_says_so() -> None:
    for call in (Client.server, lambda client: client.generate("a"), lambda client: client.wait_ready(1.0)):
        client = Client()
        client._stubs = [Closing(client)]  # type: ignore[list-item]
        with pytest.raises(UnavailableError, match="the client is closed"):
            call(client)


async def test_async_client_that_is_closed_between_two_gateways_says_so() -> None:
    client = AsyncClient("127.0.0.1:1,127.0.0.1:2")

    class Lost:
        async def GetServer(self, *_: Any, **__: Any) -> None:
            await client.close()
            raise LOST

    client._open()
    client._stubs[0] = Lost()  # type: ignore[call-overload]
    with pytest.raises(UnavailableError, match="the client is closed"):
        await client.server()


def test_mistake_that_is_none_of_closing_stays_one() -> None:
    class Mistaken:
        def GetServer(self, *_: Any, **__: Any) -> None:
            raise ValueError("else")

    with Client() as client:
        client._stubs = [Mistaken()]  # type: ignore[list-item]
        with pytest.raises(ValueError, match="else"):
            client.server()


@pytest.fixture(scope="module")
def two_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, Path]]:
    """Ports of a server, with TLS and without, and a folder with its issuer's certificate and another's."""
    folder, issuer = tmp_path_factory.mktemp("tls"), trustme.CA()
    issuer.cert_pem.write_to_path(folder / "issuer.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    own = issuer.issue_cert("127.0.0.1")
    pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    ports = (
        server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair])),
        server.add_insecure_port("127.0.0.1:0"),
    )
    server.start()
    yield *ports, folder
    server.stop(None)


@pytest.mark.parametrize(
    ("has_tls", "options", "remedy"),
    [
        (True, {}, "tls_ca names the issuer"),
        (True, {"tls_ca": "other.pem"}, "of an issuer that is not in the file tls_ca"),
        (True, {"tls_ca": "issuer.pem", "tls_target_name": "nobody"}, "has another name: tls_target_name"),
        (False, {"tls_ca": "issuer.pem"}, "listens without TLS: leave tls_ca out"),
    ],
)
def test_connection_without_the_right_certificate_says_what_to_do(
    two_ports: tuple[int, int, Path], has_tls: bool, options: dict[str, str], remedy: str
) -> None:
    secure, plain, folder = two_ports
    files = {name: str(folder / value) if value.endswith("pem") else value for name, value in options.items()}
    with Client(f"127.0.0.1:{secure if has_tls else plain}", **files) as client:
        with pytest.raises(UnavailableError, match=remedy) as raised:
            client.wait_ready(0.3)
        assert "draftwire up" not in str(raised.value)
