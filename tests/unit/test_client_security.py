"""Tokens that cannot stand in a header, or that others could read on the way, are refused before anything is sent."""

from typing import Any

import pytest

from draftwire.client import AsyncClient, Client
from draftwire.client.security import Security
from draftwire.errors import InvalidRequestError


@pytest.mark.parametrize("token", ["a\nb", "a\r\nx-other: 1", "a\x7f", "a\x00", "", "  ", "tökén"])
def test_token_that_is_no_header_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable ASCII"):
        Security(token=token)


def test_token_is_sent_as_it_is() -> None:
    assert Security(token="a-b_c.1").metadata == (("authorization", "Bearer a-b_c.1"),)


HERE = ("127.0.0.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1")
ELSEWHERE = ("10.0.0.1:1", "gateway.example.com:1", "0.0.0.0:1", "dns:///gateway:1", "localhost.example:1")


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_token_leaves_the_machine_over_tls_alone_unless_told_otherwise(client: Any) -> None:
    """Also if only one of several gateways is on another machine."""
    for address in ELSEWHERE:
        for addresses in (address, [HERE[0], address]):
            with pytest.raises(InvalidRequestError, match=f"^token: it would be sent to {address} without TLS"):
                client(addresses, token="secret")
        client(address, token="secret", allow_plaintext=True)
        client(address)
    for address in HERE:
        client(address, token="secret")


def test_token_may_leave_the_machine_over_tls() -> None:
    Security(tls_ca="ca.pem", token="secret").check_address("10.0.0.1:1")
