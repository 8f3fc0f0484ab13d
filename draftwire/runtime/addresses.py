"""Hosts of addresses, and whether they are on this machine."""

import errno
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import unquote, urlsplit

IPV6_PREFIX = 64
"""Bits that name a network of IPv6: whoever has one address in it has all."""

UNSPECIFIED = ("0.0.0.0", "::", "[::]")
"""Hosts at which a server listens that is reached at every address of its machine."""

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


def own_address() -> str:
    """Returns the address under which other machines know this one; that of this machine alone without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent: it only picks the interface
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_taken(host: str, port: int) -> bool:
    """Whether something listens on a port of this machine already; 0 stands for any free one. Other faults of host or
    port are none of a taken one.
    """
    if not port:
        return False
    with suppress(socket.gaierror):
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def is_of_this_machine(host: str) -> bool:
    """Whether a server can listen at a host: at its address, or at one of its name's."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def host_of(address: str) -> str:
    """Returns the host of host:port, or of a gRPC target such as dns:///host:port."""
    return _SCHEME.sub("", address).rpartition(":")[0]


def host_and_port(host: str, port: int | str) -> str:
    """Returns host:port, with brackets around IPv6, which a host may have already."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_of_peer(peer: str) -> str:
    """Returns the host of a caller, whose address gRPC writes as ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    return unquote(host_of(peer)).strip("[]")


def network_of(host: str) -> str:
    """Returns what all addresses of one caller have alike: an IPv4 address or a name itself, of IPv6 its network."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), IPV6_PREFIX), strict=False))
