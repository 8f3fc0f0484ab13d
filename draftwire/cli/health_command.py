"""`draftwire health`: the health check of a service, for container probes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.connection_options import TlsCa, TlsCert, TlsKey, TlsTargetName
from draftwire.cli.exits import MISUSED, end
from draftwire.cli.options import SERVICES, settings_of, variable
from draftwire.runtime.addresses import host_and_port

if TYPE_CHECKING:
    from draftwire.client.security import Security

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
"""Wildcard hosts that a service binds to, and the loopback address to call instead."""


def service_names(incomplete: str) -> list[str]:
    """Completes the name of a service."""
    return [name for name in SERVICES if name.startswith(incomplete)]


def own_service(service: str, tls_target_name: str | None) -> "tuple[str, Security]":
    """Returns address and certificates of the service that the environment configures, for a call from this machine.

    The call presents the service's own certificate. The service is verified against `tls_ca`, or, if it has none
    because it does not verify callers, against that very certificate.
    """
    from draftwire.client.security import Security

    own = {
        setting.name: os.environ.get(variable(service, setting.name), setting.default)
        for setting in settings_of(SERVICES[service])
    }
    address = host_and_port(EVERYWHERE.get(own["host"], own["host"]), own["port"])
    if own["tls_cert"] is None:
        return address, Security()
    ca, name = own["tls_ca"] or own["tls_cert"], tls_target_name or own["tls_target_name"]
    return address, Security(ca, own["tls_cert"], own["tls_key"], name)


def health(
    service: Annotated[
        str, typer.Argument(help="gateway, verifier or drafter.", autocompletion=service_names)
    ] = "gateway",
    address: Annotated[
        str | None,
        typer.Option(help="host:port. Without it, the service that this environment configures, on this machine."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask whether the process lives, not whether it serves.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 5.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_target_name: TlsTargetName = None,
) -> None:
    """Ask a service whether it serves; the exit status is 0 if it does, else 1.

    Without --address, port and certificates come from the service's own variables, such as DRAFTWIRE_VERIFIER_PORT.
    A probe inside of its container needs --tls-target-name at most, where the certificate does not name the address.
    """
    from draftwire.client.health_check import check_health
    from draftwire.client.security import Security

    if service not in SERVICES:
        end(MISUSED, f"unknown service {service!r}; known: {', '.join(sorted(SERVICES))}")
    if address is None and tls_ca is None and tls_cert is None and tls_key is None:
        address, security = own_service(service, tls_target_name)
    else:
        address = address or own_service(service, None)[0]
        security = Security(tls_ca, tls_cert, tls_key, tls_target_name)
    check_health(address, "" if live else f"draftwire.v1.{service.capitalize()}Service", security, timeout)
    typer.echo(f"{address} is serving")
