"""Keeps pages of other origins away from a gateway that believes whoever reaches this machine."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from draftwire_gateway.http.body_reading import header
from draftwire_gateway.http.refusal import RefusedError


def refuse_other_origins(scope: Scope) -> None:
    """Refuses what only a page of another origin sends, under a name of its own that leads here perhaps.

    Raises:
        RefusedError: the request is for another host than this machine, or comes from a page of another one.
    """
    host = header(scope, "host")
    if host is None:  # which no browser leaves out
        return
    if not _is_here(host):
        message = "host: without tokens this gateway answers under localhost and IP addresses alone"
        raise RefusedError(403, message, code="host_not_allowed")
    origin = header(scope, "origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise RefusedError(403, "origin: pages of other origins are not answered", code="origin_not_allowed")


def _is_here(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False
