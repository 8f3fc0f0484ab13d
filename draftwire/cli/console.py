"""rich consoles with the command line's own rules for colours and broken pipes."""

import sys
from typing import NoReturn

from rich.console import Console

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
