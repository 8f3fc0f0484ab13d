"""The command line where readers are gone, where encodings lack characters, and where colours are not wanted."""

import io
import json
import subprocess
import sys
from functools import partialmethod
from itertools import product
from pathlib import Path

import pytest
from cli_fakes import TEXT, FakeClient, fake_client
from typer.testing import CliRunner

from draftwire.cli.__main__ import app, main
from draftwire.cli.console import make_console
from draftwire.cli.exits import complain
from draftwire.errors import DraftwireError, InvalidRequestError, UnavailableError

HOSTILE = "gone\x1b[2J \x9b1m[/x]"
SHOWN = "gone␛[2J �1m[/x]"


client = pytest.fixture(fake_client)


UNREAD: list[tuple[int, list[str]]] = [
    (1, ["--help"]),
    (1, ["generate", "--help"]),
    (1, ["--version"]),
    (1, ["check-rule", "typical"]),  # 1 would say that a rule is not what it declares
    (2, ["generate", "--nonsense"]),
    (2, ["generate", "x", "--regex", "a", "--json-schema", __file__]),
]
"""Streams that nobody reads, and commands that write there."""
RUN_EACH = """
import json, os, sys
from draftwire.cli.__main__ import main
statuses = []
for stream, arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        reader, nobody = os.pipe()
        os.close(reader)
        os.dup2(nobody, stream)
        sys.argv = ["draftwire", *arguments]
        sys.exit(main())
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(statuses)
"""
"""Processes, for what is left in a stream is written when Python ends. They share the imports."""


@pytest.mark.slow
def test_whatever_is_written_where_nobody_reads_ends_with_141_in_silence() -> None:
    command = [sys.executable, "-c", RUN_EACH, json.dumps(UNREAD)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True)
    assert (result.stdout, result.stderr) == (f"{[141] * len(UNREAD)}\n", ""), "and nothing on the other stream"


def test_texts_are_utf8_in_pipes_whatever_the_locale_says(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "latin-1"):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größer ε\n".encode()), encoding))
        assert status_of(monkeypatch, "chat", "--quiet") == 0
        assert written.getvalue() == f"{TEXT}\n".encode()
        assert client.asked.pop()[0] == [{"role": "user", "content": "größer ε"}]


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["draftwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_question_mark_for_what_it_lacks(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(written, "ascii"))
    assert status_of(monkeypatch, "generate", "ε", "--no-color", "--quiet") == 0
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


def test_errors_and_statistics_have_the_colors_that_are_wanted(client: FakeClient) -> None:
    """FORCE_COLOR means what it says on standard error too."""
    for force, is_colored in (("0", False), ("1", True)):
        client.fails = [None, (0, UnavailableError("lost")), None]
        for arguments in ([], [], ["--stats"]):
            result = CliRunner(env={"FORCE_COLOR": force}).invoke(app, ["generate", "x", *arguments])
            assert ("\x1b[" in result.stderr) == is_colored, (force, arguments)
    colored = "\x1b[31merror:\x1b[0m lost\n"
    for command, option in product((["generate", "x"], ["chat"]), ("--no-color", "--color=never")):
        for arguments, expected in (([option], "error: lost\n"), ([], colored)):
            client.fails = [(0, UnavailableError("lost"))]
            result = CliRunner(env={"FORCE_COLOR": "1"}).invoke(app, [*command, *arguments, "--quiet"], input="one\n")
            assert (result.exit_code, result.stderr) == (3, expected), (command, arguments)


def test_pipe_is_no_terminal_for_what_moves_however_colored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    console = make_console(stderr=True)
    assert not console.is_terminal
    assert console.color_system == "standard"


def test_error_starts_a_line_on_a_terminal_and_adds_nothing_to_a_pipe(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = (UnavailableError("lost"), InvalidRequestError("bad"), KeyboardInterrupt())
    for is_terminal, error in product((True, False), errors):
        isatty = partialmethod(lambda stream, is_terminal: is_terminal and stream.name != "<stdin>", is_terminal)
        monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", isatty)
        end = "\n" if is_terminal else ""
        client.fails = [(1, error)]
        assert CliRunner().invoke(app, ["generate", "def", "--no-color"]).stdout == f"def a{end}"
        client.fails = [(0, error)]
        assert CliRunner().invoke(app, ["generate", "def\n", "--no-color"]).stdout == ""
        if isinstance(error, DraftwireError):
            client.fails = [None, (1, error)]
            assert CliRunner().invoke(app, ["chat", "--no-color"], input="one\n").stdout == f" a{end}"


def test_files_of_the_command_line_make_no_console_of_their_own() -> None:
    folder = Path(__file__).parents[2] / "draftwire" / "cli"
    assert [file.name for file in folder.glob("*.py") if " Console(" in file.read_text()] == []
