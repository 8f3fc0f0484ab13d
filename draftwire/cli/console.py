"""rich consoles, tables and progress bars in the command line's own style."""

import sys
from collections.abc import Collection, Iterable
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftwire.cli.colors import ColorWhen, wants_color


class PipeConsole(Console):
    """A console that leaves broken pipes to `main`."""

    def on_broken_pipe(self) -> NoReturn:
        """Raises `BrokenPipeError` where `Console` would exit with 1."""
        raise BrokenPipeError


def make_console(stderr: bool = False, when: ColorWhen = ColorWhen.AUTO) -> Console:
    """Returns a console on standard output, or on standard error.

    Without colours there are no other styles either. rich's own reading of FORCE_COLOR is not used: it treats 0 as set,
    and a pipe as a terminal, to which it would write animations.
    """
    stream = sys.stderr if stderr else sys.stdout
    return PipeConsole(
        stderr=stderr,
        highlight=False,
        force_terminal=stream.isatty(),
        color_system="standard" if wants_color(when, stream) else None,
    )


def make_table(headings: Iterable[str], texts: Collection[str] = ()) -> Table:
    """Returns a table of numbers, without lines; the columns `texts` are aligned to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right")
    return table


def make_progress(console: Console, done: ProgressColumn) -> Progress:
    """Returns a bar that is drawn on terminals alone, and vanishes at its end; `done` shows how far it is."""
    columns = TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
