"""The command line where readers are gone, where encodings lack characters, and where colours are not wanted."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import TEXT, FakeClient
from typer.testing import CliRunner

from draftwire.cli.__main__ import app, main
from draftwire.cli.console import make_console
from draftwire.cli.exits import complain
from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError

HOSTILE = "gone\x1b[2J \x9b1m[/x]"
SHOWN = "gone␛[2J �1m[/x]"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeClient()
    monkeypatch.setattr("draftwire.client.Client", fake)
    return fake


def status_without_reader(stream: str, *arguments: str) -> int:
    """Runs a command of which nobody reads this stream, and checks that it says nothing on the other one."""
    reader, nobody = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: nobody}
    command = [sys.executable, "-m", "draftwire.cli", *arguments]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False, **streams)  # type: ignore[call-overload]
    finally:
        os.close(nobody)
    assert not result.stdout
    assert not result.stderr
    return int(result.returncode)


@pytest.mark.parametrize(
    ("stream", "arguments"),
    [
        ("stdout", ["--help"]),
        ("stdout", ["generate", "--help"]),
        ("stdout", ["--version"]),
        ("stderr", ["generate", "--nonsense"]),
        ("stderr", ["generate", "x", "--regex", "a", "--json-schema", __file__]),
    ],
)
def test_whatever_is_written_where_nobody_reads_ends_with_141_in_silence(stream: str, arguments: list[str]) -> None:
    assert status_without_reader(stream, *arguments) == 141


def test_proof_that_nobody_reads_is_no_failed_proof() -> None:
    """1 would say that a rule is not what it declares."""
    assert status_without_reader("stdout", "check-rule", "token") == 141


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_texts_are_utf8_in_pipes_whatever_the_locale_says(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größer ε\n".encode()), encoding))
    monkeypatch.setattr(sys, "argv", ["draftwire", "chat", "--quiet"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert written.getvalue() == f"{TEXT}\n".encode()
    assert client.asked[1][0] == [{"role": "user", "content": "größer ε"}]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_question_mark_for_what_it_lacks(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(written, "ascii"))
    monkeypatch.setattr(sys, "argv", ["draftwire", "generate", "ε", "--no-color", "--quiet"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert written.getvalue().startswith(b"? ab\ncd?e")


def test_input_that_is_no_utf8_is_one_line(client: FakeClient) -> None:
    result = CliRunner().invoke(app, ["chat", "--quiet"], input=b"one\n\xff\n")
    assert isinstance(result.exception, InvalidRequestError)
    assert str(result.exception).startswith("standard input is no UTF-8: ")


def test_nothing_that_comes_from_a_server_is_obeyed_by_a_terminal(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    complain(f"{HOSTILE}\nmore")
    assert capsys.readouterr().err == f"error: {SHOWN} more\n"


@pytest.mark.parametrize(("variables", "is_colored"), [({"FORCE_COLOR": "0"}, False), ({"FORCE_COLOR": "1"}, True)])
def test_force_color_means_what_it_says_on_standard_error_too(
    client: FakeClient, variables: dict[str, str], is_colored: bool
) -> None:
    client.fails = [None, (0, UnavailableError("lost"))]
    for _ in range(2):
        result = CliRunner(env=variables).invoke(app, ["generate", "x"])
        assert ("\x1b[" in result.stderr) == is_colored
    result = CliRunner(env=variables).invoke(app, ["generate", "x", "--stats"])
    assert ("\x1b[" in result.stderr) == is_colored


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
@pytest.mark.parametrize("option", ["--no-color", "--color=never"])
def test_errors_have_no_color_where_none_is_wanted(client: FakeClient, command: list[str], option: str) -> None:
    for arguments, expected in (([option], "error: lost\n"), ([], "\x1b[31merror:\x1b[0m lost\n")):
        client.fails = [(0, UnavailableError("lost"))]
        result = CliRunner(env={"FORCE_COLOR": "1"}).invoke(app, [*command, *arguments, "--quiet"], input="one\n")
        assert (result.exit_code, result.stderr) == (3, expected)


def test_pipe_is_no_terminal_for_what_moves_however_colored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console = make_console(stderr=True)
    assert not console.is_terminal
    assert console.color_system == "standard"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("error", [UnavailableError("lost"), InvalidRequestError("bad"), KeyboardInterrupt()])
def test_error_begins_a_line_of_its_own_on_a_terminal_and_a_pipe_gets_nothing_more(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, error: BaseException
) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: is_terminal and self.name != "<stdin>")
    end = "\n" if is_terminal else ""
    client.fails = [(1, error)]
    assert CliRunner().invoke(app, ["generate", "def", "--no-color"]).stdout == f"def a{end}"
    client.fails = [(0, error)]
    assert CliRunner().invoke(app, ["generate", "def\n", "--no-color"]).stdout == "def\n"
    if isinstance(error, DraftwireError):
        client.fails = [None, (1, error)]
        assert CliRunner().invoke(app, ["chat", "--no-color"], input="one\n").stdout == f" a{end}"


def test_files_of_the_command_line_make_no_console_of_their_own() -> None:
    folder = Path(__file__).parents[2] / "draftwire" / "cli"
    assert [file.name for file in folder.glob("*.py") if " Console(" in file.read_text()] == []
