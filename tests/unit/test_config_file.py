"""Settings of all services in a file: what is read, what is refused, and what is stronger."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwire.cli import up_command
from draftwire.cli.__main__ import app
from draftwire.cli.config_file import variables_of
from draftwire.errors import InvalidRequestError

TOML = '[verifier]\nmodel = "big"\nthreads = 3\n[gateway]\nhttp-port = "none"\ncaller_metrics = true\nport = 7\n'
YAML = "verifier: {model: big, threads: 3}\ngateway: {http-port: null, caller_metrics: yes, port: 7}\n"


@pytest.mark.parametrize(("name", "text"), [("c.toml", TOML), ("c.yaml", YAML), ("c.yml", YAML)])
def test_settings_are_variables_of_their_services(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert variables_of(tmp_path / name) == {
        "DRAFTWIRE_VERIFIER_MODEL": "big",
        "DRAFTWIRE_VERIFIER_THREADS": "3",
        "DRAFTWIRE_GATEWAY_HTTP_PORT": "none",
        "DRAFTWIRE_GATEWAY_CALLER_METRICS": "true",
        "DRAFTWIRE_GATEWAY_PORT": "7",
    }


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("c.toml", "[verifiers]\n", "verifiers is no service; options are under drafter, verifier, gateway"),
        ("c.toml", "verifier = 3\n", "verifier has no settings, but 3"),
        ("c.toml", "[verifier]\nthread = 3\n", "verifier has no setting thread; did you mean threads?"),
        ("c.toml", "[verifier]\nthreads = [3]\n", "verifier.threads is neither text, a number, nor true or false: [3]"),
        ("c.toml", '[verifier]\nmodel = ""\n', "verifier.model is neither text, a number, nor true or false: ''"),
        ("c.toml", "[verifier\n", "Expected ']' at the end of a table declaration (at line 1, column 10)"),
        ("c.yaml", "- 1\n", "names no service: drafter, verifier, gateway"),
        ("c.yaml", "verifier:\n  a: {\n", "expected the node content, but found '<stream end>' in line 3"),
        ("d.toml", "", "cannot be read: No such file or directory"),
    ],
)
def test_whatever_is_wrong_is_one_line_that_names_it(name: str, text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InvalidRequestError) as raised:
        variables_of(tmp_path / name)
    assert fault in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / name))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("environment")
def test_variables_are_stronger_than_the_file_and_options_than_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[verifier]\nmodel = "scripted:"\nthreads = 3\n[drafter]\nmodel = "none"\n[gateway]\nport = 1\n')
    given = {}

    def keep(options: dict[str, dict[str, object]], *_: object, **__: object) -> None:
        given.update({name: dict(own) for name, own in options.items()})

    monkeypatch.setattr(up_command, "run_until_stopped", keep)
    monkeypatch.setattr("draftwire.cli.preflight.check_stack", lambda _options: None)
    monkeypatch.setattr(up_command, "is_free", lambda _port: True)
    os.environ["DRAFTWIRE_VERIFIER_THREADS"] = "5"
    ended = CliRunner().invoke(app, ["up", "--config", str(file), "--port", "2"])
    assert ended.exit_code == 0, ended.exception
    assert (given["verifier"]["model"], given["verifier"]["threads"]) == ("scripted:", "5")
    assert given["gateway"]["port"] == 2
    assert "drafter" not in given
