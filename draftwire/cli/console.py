"""Consoles of rich that keep to our own rules: when there are colours, and what happens when nobody reads."""

import sys
from typing import NoReturn

from rich.console import Console

from draftwire.cli.colors import ColorWhen, wants_color


class PipeConsole(Console):
    """Leaves it to `main` how the command ends where whoever reads its output has closed it."""

    def on_broken_pipe(self) -> NoReturn:
        """Raises what `Console` would end the process for, with 1."""
        raise BrokenPipeError


def make_console(stderr: bool = False, when: ColorWhen = ColorWhen.AUTO) -> Console:
    """Returns a console on standard output, or on standard error.

    Without colours there are no other styles either. rich's own reading of FORCE_COLOR takes 0 for a yes, and a pipe
    for a terminal, where it would draw what moves.
    """
    stream = sys.stderr if stderr else sys.stdout
    return PipeConsole(
        stderr=stderr,
        highlight=False,
        force_terminal=stream.isatty(),
        color_system="standard" if wants_color(when, stream) else None,
    )
