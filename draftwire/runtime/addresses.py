"""Hosts of addresses, and whether they are on this machine."""

import re
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

_SCHEME = re.compile(r"^(dns:(//[^/]*/)?|ipv[46]:)")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_named_here(host: str, names: Collection[str] = ()) -> bool:
    """Whether a header `host` is one of the names, localhost or an IP address, with or without a port.

    Whoever owns another name can have it lead here (DNS rebinding), and a browser then sends that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", *names) or bool(ip_address(name))
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Returns the host of host:port, or of a gRPC target such as dns:///host:port."""
    return _SCHEME.sub("", address).rpartition(":")[0]
