"""docs/cli.md says what the command line has."""

import re
from pathlib import Path
from typing import Any

import typer

from draftwire.cli import exits
from draftwire.cli.__main__ import app
from draftwire.cli.chat_command import COMMANDS
from draftwire.cli.options import CLIENT_VARIABLES

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
ROOT = typer.main.get_command(app)


def leaves(command: Any, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns every command by how it is typed, but those that only say what is in their place."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {" ".join(words): command}
    shown = {name: each for name, each in inner.items() if not each.hidden}
    return {typed: leaf for name, each in shown.items() for typed, leaf in leaves(each, (*words, name)).items()}


COMMANDS_BY_NAME = leaves(ROOT)


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_page_names_every_command() -> None:
    assert [name for name in COMMANDS_BY_NAME if f"`draftwire {name}`" not in PAGE.partition("## Start")[0]] == []


def parsed(line: str) -> tuple[str, list[str]]:
    """Returns the command that a line begins with, whole words of it, and the options given to it."""
    words = re.split(r" [|>]|2>", re.sub(r'"[^"]*"|\'[^\']*\'', "X", line))[0].split()
    names = (" ".join(words[:count]) for count in (2, 1))
    name = next((name for name in names if name in COMMANDS_BY_NAME), "")
    return name, [word for word in words if word.startswith("-") and word != "-"]


def test_commands_and_options_in_examples_exist() -> None:
    lines = re.findall(r"^    (?:.*\| )?draftwire (.*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 15
    for name, options in map(parsed, lines):
        if name:
            assert set(options) <= options_of(COMMANDS_BY_NAME[name])
        else:
            assert options in (["--install-completion"], ["--show-completion"])


def test_commands_are_read_whole_and_a_misspelt_one_is_none() -> None:
    assert parsed("serve verifier --port 1 2> log") == ("serve verifier", ["--port"])
    assert parsed('up --log "x --y" | head') == ("up", ["--log"])
    assert {parsed(line)[0] for line in ("upx", "upx --log", "serve", "demos --stats", "X up")} == {""}


def test_page_says_how_a_start_that_is_stopped_ends() -> None:
    """What `up` itself does then is in the end-to-end tests, of a terminal."""
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.partition("## Exit statuses")[2], re.MULTILINE))
    assert "once it is ready" in rows["0"]
    assert "`up` that has not come up yet" in rows["130"]


def test_every_option_in_the_text_is_one_of_some_command() -> None:
    known = set().union(*map(options_of, COMMANDS_BY_NAME.values())) | options_of(ROOT)
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known | {"--install-completion"}


def test_page_names_every_client_variable_status_and_chat_command() -> None:
    assert set(re.findall(r"`(DRAFTWIRE_[A-Z_]+)`", PAGE)) >= CLIENT_VARIABLES
    table = PAGE.partition("## Exit statuses")[2]
    statuses = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == statuses
    assert set(re.findall(r"/[a-z]+", COMMANDS)) <= set(re.findall(r"`(/[a-z]+)`", PAGE))
