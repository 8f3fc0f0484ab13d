"""Peers can tell whether their models fit together, and why not."""

import hashlib

import pytest

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


def mismatch(target: list[str], drafter: list[str]) -> str:
    error = vocabulary_mismatch(described("big"), described("small"), target, drafter)
    assert isinstance(error, ModelMismatchError)
    return str(error)


def test_fingerprint_sees_every_border_order_and_padding() -> None:
    vocabularies = [["ab", "c"], ["a", "bc"], ["abc"], ["a", "b", "c"], ["c", "ab"], ["ab", "c", ""], ["", "ab", "c"]]
    vocabularies += [[], [""], ["", ""], ["\u00e9"], ["e\u0301"], ["A"], ["a"]]
    assert len({fingerprint(tokens) for tokens in vocabularies}) == len(vocabularies)


def test_border_between_tokens_cannot_be_forged_by_their_text() -> None:
    assert fingerprint(["a\x01\x00\x00\x00b"]) != fingerprint(["a", "b"])


def test_equal_vocabularies_have_equal_fingerprints() -> None:
    tokens = ["<s>", "Ġthe", "\ud800", "é", ""]
    assert fingerprint(tokens) == fingerprint(tuple(tokens))


def test_fingerprint_is_the_documented_sha256() -> None:
    text = b"\x02\x00\x00\x00ab\x03\x00\x00\x00\xe2\x82\xac"
    assert fingerprint(["ab", "€"]) == hashlib.sha256(text).digest()


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
def test_first_differing_token_is_named(target: list[str], drafter: list[str], difference: str) -> None:
    assert difference in mismatch(target, drafter)


def test_mismatch_names_both_models_and_their_sizes() -> None:
    text = mismatch(["a", "b"], ["a"])
    assert "target big has 2 tokens" in text
    assert "drafter small has 1" in text


def test_peer_of_this_protocol_version_is_taken() -> None:
    check_protocol(described())


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 2**32 - 1])
def test_peer_of_another_protocol_version_is_refused_by_name(version: int) -> None:
    with pytest.raises(ModelMismatchError, match=f"old-peer speaks protocol version {version}"):
        check_protocol(described("old-peer", version))
