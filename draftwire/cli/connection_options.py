"""Options of the commands that talk to a gateway, and the client that they make."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.exits import NOT_NOW, end
from draftwire.cli.options import (
    ADDRESS_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    TLS_TARGET_NAME_VARIABLE,
    TOKEN_VARIABLE,
)
from draftwire.errors import NoRoomError, UnavailableError

if TYPE_CHECKING:
    from draftwire.client import AsyncClient, Client

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""The client's own default, which cannot be read without importing gRPC."""


# Of every command that calls a service: whom to believe, and who we are.
TlsCa = Annotated[str | None, typer.Option(envvar=TLS_CA_VARIABLE, help="PEM file: whom to believe.")]
TlsCert = Annotated[str | None, typer.Option(envvar=TLS_CERT_VARIABLE, help="PEM file: who we are.")]
TlsKey = Annotated[str | None, typer.Option(envvar=TLS_KEY_VARIABLE, help="PEM file: the key of it.")]
TlsTargetName = Annotated[
    str | None, typer.Option(envvar=TLS_TARGET_NAME_VARIABLE, help="Name in the certificate of who is called.")
]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Where the gateway is, and who calls it."""

    address: Annotated[
        str, typer.Option(envvar=ADDRESS_VARIABLE, help="host:port of the gateway, or of several, by commas.")
    ] = DEFAULT_ADDRESS
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_target_name: TlsTargetName = None
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token; the variable hides it from other users."),
    ] = None
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the gateway to come up.")] = 5.0

    @contextmanager
    def open(self) -> "Iterator[Client]":
        """Connects, and closes. Where a gateway is not there, or full, the command ends with a status of its own.

        Raises:
            typer.Exit: see above.
        """
        from draftwire.client import Client

        with Client(self.address, **self._credentials()) as client, _ended_where_it_cannot_be_now():
            yield client

    @contextmanager
    def open_async(self) -> "Iterator[AsyncClient]":
        """As `open`, with a client for an event loop, which has to close it."""
        from draftwire.client import AsyncClient

        with _ended_where_it_cannot_be_now():
            yield AsyncClient(self.address, **self._credentials())

    def _credentials(self) -> dict[str, Any]:
        return {
            "tls_ca": self.tls_ca,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "tls_target_name": self.tls_target_name,
            "token": self.token,
        }


@contextmanager
def _ended_where_it_cannot_be_now() -> Iterator[None]:
    try:
        yield
    except (UnavailableError, NoRoomError) as error:
        end(NOT_NOW, error)
