"""How commands end: exit statuses, and the one line that says why."""

from typing import NoReturn

import typer

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


def complain(message: object) -> None:
    """Prints one line on standard error."""
    from rich.console import Console
    from rich.markup import escape

    text = " ".join(str(message).split("\n"))
    Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True)


def end(status: int, message: object) -> NoReturn:
    """Ends the command with a line on standard error."""
    complain(message)
    raise typer.Exit(status)
