"""docs/cli.md says what the command line has."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwire.cli import exits
from draftwire.cli.__main__ import app
from draftwire.cli.chat import COMMANDS
from draftwire.services.options import CLIENT_VARIABLES

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
ROOT = typer.main.get_command(app)


def leaves(command: Any, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns every command by how it is typed."""
    if not hasattr(command, "commands"):
        return {" ".join(words): command}
    found: dict[str, Any] = {}
    for name, each in command.commands.items():
        found |= leaves(each, (*words, name))
    return found


COMMANDS_BY_NAME = leaves(ROOT)


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS_BY_NAME)
def test_page_names_every_command(name: str) -> None:
    assert f"`draftwire {name}`" in PAGE.partition("## Start")[0]


def typed() -> list[tuple[str, list[str]]]:
    """Returns each command line of the page, as its command and the options given to it."""
    lines = re.findall(r"^    (?:.*\| )?draftwire (.*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 15
    found = []
    for line in lines:
        line = re.split(r" [|>]|2>", re.sub(r'"[^"]*"|\'[^\']*\'', "X", line))[0]
        words = line.split()
        name = max((name for name in COMMANDS_BY_NAME if line.startswith(name)), key=len, default="")
        found.append((name, [word for word in words if word.startswith("-")]))
    return found


@pytest.mark.parametrize(("name", "options"), typed())
def test_options_in_examples_exist(name: str, options: list[str]) -> None:
    command = COMMANDS_BY_NAME.get(name, ROOT)
    assert set(options) <= options_of(command) | {"--install-completion", "--show-completion"}


def test_every_option_in_the_text_is_one_of_some_command() -> None:
    known = set().union(*map(options_of, COMMANDS_BY_NAME.values())) | options_of(ROOT)
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known | {"--install-completion"}


def test_page_names_every_variable_of_clients_every_status_and_every_command_of_a_chat() -> None:
    assert set(re.findall(r"`(DRAFTWIRE_[A-Z_]+)`", PAGE)) >= CLIENT_VARIABLES
    table = PAGE.partition("## Exit statuses")[2]
    statuses = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == statuses
    assert set(re.findall(r"/[a-z]+", COMMANDS)) <= set(re.findall(r"`(/[a-z]+)`", PAGE))
