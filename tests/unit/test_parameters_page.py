"""docs/parameters.md names every parameter there is, and tests that there are."""

import re
from pathlib import Path

import pytest

from draftwire.v1 import gateway_pb2, session_pb2

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parameters.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
PROOFS = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE)))


WITHOUT_EFFECT = {"has_random_seed"}
"""Accepted for clients of earlier versions."""


def test_every_parameter_has_a_row() -> None:
    fields = [*gateway_pb2.GenerateRequest.DESCRIPTOR.fields, *session_pb2.SamplingParameters.DESCRIPTOR.fields]
    named = [name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted({field.name for field in fields} - {"sampling"} - WITHOUT_EFFECT)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_row_has_a_proof(row: list[str]) -> None:
    assert len(row) == 4
    assert "the same" in row[3] or re.search(r"`tests/", row[3])


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_is_a_test(proof: str) -> None:
    path, _, name = proof.partition("::")
    assert (ROOT / path).is_file()
    if name:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
