"""Peers can tell whether their models fit together, and why not."""

import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwire.errors import InvalidRequestError, ModelMismatchError
from draftwire.models.description import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    ModelDescription,
    check_protocol,
    fingerprint,
    vocabulary_mismatch,
)
from draftwire.requests.rules import RuleFacts


def described(name: str = "big") -> ModelDescription:
    return ModelDescription(name, "", "float32", b"", 4, 64, ())


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
def test_mismatch_names_models_sizes_and_the_first_differing_token(
    target: list[str], drafter: list[str], difference: str
) -> None:
    error = vocabulary_mismatch(described("big"), described("small"), target, drafter)
    assert isinstance(error, ModelMismatchError)
    for part in (f"target big has {len(target)} tokens", f"drafter small has {len(drafter)}", difference):
        assert part in str(error)


def test_peer_with_which_there_is_a_common_version_is_taken() -> None:
    for oldest, latest in ((0, 2**32 - 1), (PROTOCOL_VERSION, PROTOCOL_VERSION + 1), (0, OLDEST_PROTOCOL_VERSION)):
        check_protocol("peer", oldest, latest)


@pytest.mark.parametrize(
    ("oldest", "latest", "said"),
    [
        (0, 0, "version 0"),
        (9, 9, "version 9"),
        (1, OLDEST_PROTOCOL_VERSION - 1, f"versions 1 to {OLDEST_PROTOCOL_VERSION - 1}"),
        (PROTOCOL_VERSION + 1, 2**32 - 1, f"versions {PROTOCOL_VERSION + 1} to {2**32 - 1}"),
    ],
)
def test_peer_with_which_there_is_none_is_refused_by_name(oldest: int, latest: int, said: str) -> None:
    with pytest.raises(ModelMismatchError, match=f"^old-peer speaks protocol {said}, this server speaks version 10$"):
        check_protocol("old-peer", oldest, latest)


def test_rule_is_found_by_its_name_among_those_that_are_offered() -> None:
    many = replace(described(), rules=(RuleFacts("own"), RuleFacts("block")))
    assert many.rule_named("own") is many.rules[0]
    with pytest.raises(InvalidRequestError, match=r"known: own, block$"):
        many.rule_named("token")
    for name in ("", "a b", "x" * 65, "\x1b[2J", "[bold]"):
        with pytest.raises(InvalidRequestError, match="letters, digits"):
            RuleFacts(name)
