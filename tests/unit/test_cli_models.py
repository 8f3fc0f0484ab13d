"""`draftwire models`: the same facts for people, for shells and for programs."""

import json
import os
import pty
import sys
from contextlib import suppress

import pytest
from cli_fakes import FakeClient, fake_client
from typer.testing import CliRunner

from draftwire.cli.__main__ import app
from draftwire.v1 import gateway_pb2, model_pb2

SERVER = gateway_pb2.GetServerResponse(
    target=model_pb2.ModelDescription(
        name="large [x]",
        dtype="bfloat16",
        revision="abc",
        vocab_size=1000,
        context_length=4096,
        stop_token_ids=[2, 3],
        weights_fingerprint=b"\x01\xff",
    ),
    drafters=[
        model_pb2.ModelDescription(name="small", dtype="float32", vocab_size=1000, context_length=512),
        model_pb2.ModelDescription(name="smaller", dtype="float32", vocab_size=1000, context_length=64),
    ],
    num_speculative_tokens=4,
    max_speculative_tokens=16,
    rejection_sample_methods=["block", "typical"],
    lossy_rejection_sample_methods=["typical"],
    drafter_names=["small", "smaller", "suffix"],
)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = fake_client(monkeypatch)
    fake.answer = SERVER
    return fake


def test_pipe_gets_aligned_columns_and_the_defaults() -> None:
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "role     name       dtype     context  vocabulary  revision",
        "target   large [x]  bfloat16  4096     1000        abc",
        "drafter  small      float32   512      1000        -",
        "drafter  smaller    float32   64       1000        -",
        "draft tokens per round: 4, at most 16",
        "may draft, by name: small, smaller, suffix",
        "rules, the default first: block, typical (lossy)",
    ]


def test_gateway_that_chooses_lengths_says_so(client: FakeClient) -> None:
    client.answer = gateway_pb2.GetServerResponse.FromString(SERVER.SerializeToString())
    client.answer.chooses_draft_lengths = True
    assert (
        "draft tokens per round: chosen by measurement, 4 where a text depends on its seed and on drafts, at most 16"
        in CliRunner().invoke(app, ["models"]).stdout
    )
    assert json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["chooses_draft_lengths"] is True


def test_nothing_that_a_gateway_says_is_obeyed_by_a_terminal(client: FakeClient) -> None:
    answer = client.answer = gateway_pb2.GetServerResponse.FromString(SERVER.SerializeToString())
    answer.target.name = answer.target.revision = answer.target.dtype = "\x1b[2J\x9b"
    answer.rejection_sample_methods.append("[/x]\x1b[2J")
    answer.drafter_names.append("\x1b[2J")
    shown = CliRunner().invoke(app, ["models"]).stdout
    assert shown.splitlines()[1].split() == ["target", "␛[2J�", "␛[2J�", "4096", "1000", "␛[2J�"]
    assert shown.splitlines()[-2].endswith("suffix, ␛[2J")
    assert shown.splitlines()[-1].endswith("block, typical (lossy), [/x]␛[2J")
    described = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert described["target"]["name"] == "\x1b[2J\x9b"


def test_json_has_every_fact() -> None:
    described = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert described["target"] == {
        "name": "large [x]",
        "revision": "abc",
        "dtype": "bfloat16",
        "vocab_size": 1000,
        "context_length": 4096,
        "stop_token_ids": [2, 3],
        "weights_fingerprint": "01ff",
    }
    assert [drafter["name"] for drafter in described["drafters"]] == ["small", "smaller"]
    assert (described["num_speculative_tokens"], described["max_speculative_tokens"]) == (4, 16)
    assert described["rejection_sample_methods"] == ["block", "typical"]
    assert described["lossy_rejection_sample_methods"] == ["typical"]


def test_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        app(["models"], standalone_mode=False)
    read = b""
    with suppress(OSError):  # Linux says so at the end
        while part := os.read(reader, 65536):
            read += part
    os.close(reader)
    shown = read.decode()
    assert "\x1b[1mrole" in shown
    assert "large [x]" in shown
    assert "typical (lossy)" in shown
