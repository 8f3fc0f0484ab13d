"""Runs commands of ours in this process: a tenth of the time of a process of their own.

What a process is the point of needs one: a terminal (see `Terminal`), signals, pipes that are closed.
"""

import sys
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from draftwire.cli import exits
from draftwire.cli.__main__ import main
from draftwire.cli.colors import ColorWhen


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, typed: str = "", **environment: str) -> Ended:
    """Runs a command to its end, with pipes for its streams.

    Args:
        *arguments: of the command line.
        typed: what it reads.
        **environment: variables to set.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exits, "_complaint_color", ColorWhen.AUTO)  # that of a command before this one
        patch.setattr(sys, "argv", ["draftwire", *arguments])
        with CliRunner(env=environment).isolation(typed) as (out, err, _):
            try:
                main()
                status: object = 0
            except SystemExit as ended:
                status = ended.code or 0
            sys.stdout.flush()
            sys.stderr.flush()
            assert isinstance(status, int), status
            return Ended(status, out.getvalue().decode(), err.getvalue().decode())
