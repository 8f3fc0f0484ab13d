"""Exit statuses of the commands, and their error line."""

import os
import sys
from typing import NoReturn

import typer

from draftwire.cli.colors import ColorWhen, visible

OK = 0
FAILED = 1
"""An error that the user can act on; one line on standard error describes it."""
MISUSED = 2
"""Wrong usage: an invalid option, argument or environment variable."""
NOT_NOW = 3
"""No gateway answers, or the gateway is full or draining: the same command may succeed later."""
INTERRUPTED = 130
"""Ctrl-C; by the convention of shells, 128 plus the number of SIGINT."""
READER_GONE = 141
"""The reader of standard output has closed it, as `head` does: 128 plus the number of SIGPIPE."""

_complaint_color = ColorWhen.AUTO


def color_complaints(when: ColorWhen) -> None:
    """Sets when error lines are coloured, for the rest of this process."""
    global _complaint_color
    _complaint_color = when


def complain(message: object) -> None:
    """Prints an error as one line on standard error."""
    from rich.markup import escape

    from draftwire.cli.console import make_console

    text = visible(" ".join(str(message).split("\n")))
    make_console(stderr=True, when=_complaint_color).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True)


def end(status: int, message: object) -> NoReturn:
    """Prints an error line and exits with a status."""
    complain(message)
    raise typer.Exit(status)


def end_in_silence() -> NoReturn:
    """Exits without a message, after the reader of standard output has closed it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # Python flushes the buffers there at exit
        os.dup2(nowhere, stream.fileno())
    sys.exit(READER_GONE)
