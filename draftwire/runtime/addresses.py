"""Hosts of addresses, and whether they are on this machine."""

import re
from ipaddress import ip_address

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
