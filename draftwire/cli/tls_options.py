"""Options of every command that calls a service: whom to believe, and who we are."""

from typing import Annotated

import typer

from draftwire.cli.options import (
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    TLS_TARGET_NAME_VARIABLE,
)

TlsCa = Annotated[str | None, typer.Option(envvar=TLS_CA_VARIABLE, help="PEM file: whom to believe.")]
TlsCert = Annotated[str | None, typer.Option(envvar=TLS_CERT_VARIABLE, help="PEM file: who we are.")]
TlsKey = Annotated[str | None, typer.Option(envvar=TLS_KEY_VARIABLE, help="PEM file: the key of it.")]
TlsTargetName = Annotated[
    str | None, typer.Option(envvar=TLS_TARGET_NAME_VARIABLE, help="Name in the certificate of who is called.")
]
