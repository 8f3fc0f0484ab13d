"""Hosts of addresses, and whether they are on this machine."""

import re
from ipaddress import ip_address
from urllib.parse import unquote

_SCHEME = re.compile(r"^(dns:(//[^/]*/)?|ipv[46]:)")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(address: str) -> str:
    """Returns the host of host:port, or of a gRPC target such as dns:///host:port."""
    return _SCHEME.sub("", address).rpartition(":")[0]


def host_of_peer(peer: str) -> str:
    """Returns the host of a caller, whose address gRPC writes as ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    return unquote(host_of(peer)).strip("[]")
