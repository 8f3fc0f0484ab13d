"""How commands end: exit statuses, and the one line that says why."""

import os
import sys
from typing import NoReturn

import typer

from draftwire.cli.colors import ColorWhen, visible

OK = 0
FAILED = 1
"""Something is wrong that the user can act on; one line on standard error says what."""
MISUSED = 2
"""Wrong usage: an option, an argument or an environment variable that cannot be."""
NOT_NOW = 3
"""No gateway answers, or it is full, or draining: the same command may succeed later."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and SIGINT."""
READER_GONE = 141
"""Whoever read standard output has closed it, as `head` does: 128 and SIGPIPE."""

_complaint_color = ColorWhen.AUTO


def color_complaints(when: ColorWhen) -> None:
    """Says when complaints are coloured, of all that follow in this process."""
    global _complaint_color
    _complaint_color = when


def complain(message: object) -> None:
    """Prints one line on standard error."""
    from rich.markup import escape

    from draftwire.cli.console import make_console

    text = visible(" ".join(str(message).split("\n")))
    make_console(stderr=True, when=_complaint_color).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True)


def end(status: int, message: object) -> NoReturn:
    """Ends the command with a line on standard error."""
    complain(message)
    raise typer.Exit(status)


def end_in_silence() -> NoReturn:
    """Ends the process where whoever reads its output has closed it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what is left in buffers goes there when Python ends
        os.dup2(nowhere, stream.fileno())
    sys.exit(READER_GONE)
