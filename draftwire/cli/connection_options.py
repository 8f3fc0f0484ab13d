"""Connection options of the commands that call a gateway, and the client made from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from draftwire.cli.exits import NOT_NOW, end
from draftwire.errors import NoRoomError, UnauthenticatedError, UnavailableError

if TYPE_CHECKING:
    from draftwire.client import AsyncClient, Client

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Equal to the client's default, which cannot be imported without importing gRPC."""


# TLS options of every command that calls a service: trusted issuers and the client's certificate.
TlsCa = Annotated[str | None, typer.Option(envvar="DRAFTWIRE_TLS_CA", help="PEM file: whom to believe.")]
TlsCert = Annotated[str | None, typer.Option(envvar="DRAFTWIRE_TLS_CERT", help="PEM file: who we are.")]
TlsKey = Annotated[str | None, typer.Option(envvar="DRAFTWIRE_TLS_KEY", help="PEM file: the key of it.")]
TlsTargetName = Annotated[
    str | None, typer.Option(envvar="DRAFTWIRE_TLS_TARGET_NAME", help="Name in the certificate of who is called.")
]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Address of the gateway, and identity of its caller."""

    address: Annotated[
        str, typer.Option(envvar="DRAFTWIRE_ADDRESS", help="host:port of the gateway, or of several, by commas.")
    ] = DEFAULT_ADDRESS
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_target_name: TlsTargetName = None
    token: Annotated[
        str | None,
        typer.Option(envvar="DRAFTWIRE_TOKEN", help="Bearer token; the variable hides it from other users."),
    ] = None
    allow_plaintext: Annotated[
        bool,
        typer.Option(
            "--allow-plaintext",
            envvar="DRAFTWIRE_ALLOW_PLAINTEXT",
            help="Send the token without TLS to other machines too, where the network encrypts on its own.",
        ),
    ] = False
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the gateway to come up.")] = 5.0

    @contextmanager
    def open(self) -> "Iterator[Client]":
        """Returns a client that is closed at the end of the block.

        Raises:
            typer.Exit: with `NOT_NOW`, if no gateway answers or the gateway is full.
        """
        from draftwire.client import Client

        with Client(self.address, **self._credentials()) as client, _exit_if_unavailable():
            yield client

    @contextmanager
    def open_async(self) -> "Iterator[AsyncClient]":
        """Returns a client for an event loop, with the errors of `open`. The caller closes the client."""
        from draftwire.client import AsyncClient

        with _exit_if_unavailable():
            yield AsyncClient(self.address, **self._credentials())

    def _credentials(self) -> dict[str, Any]:
        given = asdict(self)
        del given["address"], given["wait"]
        return given


CLIENT_VARIABLES = frozenset(
    hint.__metadata__[0].envvar for hint in get_type_hints(ConnectionOptions, include_extras=True).values()
) - {None}
"""Variables of the client commands, which belong to no service."""


@contextmanager
def _exit_if_unavailable() -> Iterator[None]:
    try:
        yield
    except (UnavailableError, NoRoomError) as error:
        end(NOT_NOW, error)
    except UnauthenticatedError as error:
        raise UnauthenticatedError(f"{error}: --token, or the variable DRAFTWIRE_TOKEN") from error
