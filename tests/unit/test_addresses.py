"""Addresses are written as gRPC reads them."""

import pytest

from draftwire.runtime.addresses import host_and_port, host_of


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.1", "10.0.0.1:80"), ("a.b", "a.b:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("::", "[::]:80")],
)
def test_ipv6_has_brackets_once(host: str, address: str) -> None:
    assert host_and_port(host, 80) == host_and_port(host, "80") == address
    assert host_of(address).strip("[]") == host.strip("[]")
