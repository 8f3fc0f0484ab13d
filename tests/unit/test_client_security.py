"""Tokens that cannot stand in a header are refused before anything is sent."""

import pytest

from draftwire.client.security import Security
from draftwire.errors import InvalidRequestError


@pytest.mark.parametrize("token", ["a\nb", "a\r\nx-other: 1", "a\x7f", "a\x00", "", "  ", "tökén"])
def test_token_that_is_no_header_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable ASCII"):
        Security(token=token)


def test_token_is_sent_as_it_is() -> None:
    assert Security(token="a-b_c.1").metadata == (("authorization", "Bearer a-b_c.1"),)
