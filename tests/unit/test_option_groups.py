"""Options of several commands, written once."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from draftwire.cli.option_groups import with_options


@dataclass(frozen=True, slots=True)
class Size:
    """How large it is.

    More of it.
    """

    width: Annotated[int, typer.Option(envvar="TEST_WIDTH", help="Columns.")]
    height: Annotated[int, typer.Option(help="Lines.")] = 2
    flags: Annotated[list[str] | None, typer.Option("--flag")] = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is."""

    left: Annotated[float, typer.Option()] = 0.5


seen: list[object] = []


@with_options
def draw(name: Annotated[str, typer.Argument()], size: Size, place: Place, loud: bool = False) -> None:
    """Draws."""
    seen.append((name, size, place, loud))


def run(*arguments: str, **environment: str):
    app = typer.Typer()
    app.command()(draw)
    return CliRunner(env={"COLUMNS": "120", **environment}).invoke(app, arguments)


def test_function_gets_the_groups_made_of_what_options_and_variables_say() -> None:
    assert run("x", "--width", "3", "--flag", "a", "--flag", "b", "--loud").exit_code == 0
    assert seen.pop() == ("x", Size(3, 2, ["a", "b"]), Place(0.5), True)
    assert run("x", "--left", "2", TEST_WIDTH="9").exit_code == 0
    assert seen.pop() == ("x", Size(9), Place(2.0), False)


def test_field_without_default_is_needed() -> None:
    result = run("x")
    assert result.exit_code == 2
    assert "--width" in result.output


def test_help_shows_each_group_under_its_docstring() -> None:
    text = run("--help").output
    assert "How large it is ─" in text
    assert "Where it is ─" in text
    assert "Draws." in text
    assert text.index("How large it is") < text.index("--height") < text.index("Where it is") < text.index("--left")


def test_groups_of_different_commands_do_not_share_what_help_says() -> None:
    """The option objects stand in the annotations of the class, which several commands use."""
    with_options(draw.__wrapped__)  # type: ignore[attr-defined]
    assert Size.__annotations__["height"].__metadata__[0].rich_help_panel is None
