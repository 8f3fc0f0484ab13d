"""Peers can tell whether their models fit together, and why not."""

import hashlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwire.errors import ModelMismatchError
from draftwire.models.description import (
    PROTOCOL_VERSION,
    ModelDescription,
    check_protocol,
    fingerprint,
    vocabulary_mismatch,
)


def described(name: str = "big", protocol_version: int = PROTOCOL_VERSION) -> ModelDescription:
    return ModelDescription(name, "", "float32", b"", 4, 64, (), protocol_version)


@given(st.lists(st.text(st.sampled_from("ab\x00\x01\u00e9e\u0301\u20ac\ud800"))))
@example(["ab", "c", ""])
def test_fingerprint_is_the_documented_sha256(tokens: list[str]) -> None:
    """So it sees every border, which no text of a token can forge, every order, and padding."""
    texts = [token.encode("utf-8", "surrogatepass") for token in tokens]
    documented = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    assert fingerprint(tokens) == fingerprint(tuple(tokens)) == hashlib.sha256(documented).digest()


@pytest.mark.parametrize(
    ("target", "drafter", "difference"),
    [
        (["a", "b", "c"], ["a", "x", "y"], "token 1: 'b' against 'x'"),
        (["b", "a"], ["a", "b"], "token 0: 'b' against 'a'"),
        (["a", "b"], ["a", "b", "c"], "token 2: None against 'c'"),
        (["a", "b", "c"], ["a"], "token 1: 'b' against None"),
        (["a"], [], "token 0: 'a' against None"),
        (["a", "b"], ["a", "b", ""], "token 2: None against ''"),
    ],
    ids=str,
)
def test_mismatch_names_both_models_their_sizes_and_the_first_differing_token(
    target: list[str], drafter: list[str], difference: str
) -> None:
    error = vocabulary_mismatch(described("big"), described("small"), target, drafter)
    assert isinstance(error, ModelMismatchError)
    for part in (f"target big has {len(target)} tokens", f"drafter small has {len(drafter)}", difference):
        assert part in str(error)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 2**32 - 1])
def test_peer_of_another_protocol_version_is_refused_by_name(version: int) -> None:
    check_protocol(described())
    with pytest.raises(ModelMismatchError, match=f"old-peer speaks protocol version {version}"):
        check_protocol(described("old-peer", version))
