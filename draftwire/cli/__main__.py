"""`draftwire`: run the services, and talk to them."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from draftwire import __version__
from draftwire.cli.chat import chat
from draftwire.cli.check_rule import check_rule
from draftwire.cli.demo import demo
from draftwire.cli.exits import FAILED, READER_GONE, complain
from draftwire.cli.generate import generate
from draftwire.cli.health import health
from draftwire.cli.models import models
from draftwire.cli.synth import synth
from draftwire.cli.token import token
from draftwire.cli.up import up
from draftwire.errors import DraftwireError
from draftwire.services.options import SERVICES, refuse_unknown_variables, serve_command

if TYPE_CHECKING:
    from typer._click import Context  # of which typer's own is a subclass


class Commands(TyperGroup):
    """Ends in silence where whoever reads the output has closed it, as `| head -1` does."""

    def invoke(self, ctx: "Context") -> object:
        """See `TyperGroup`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):  # what is left in buffers goes there when Python ends
                os.dup2(nowhere, stream.fileno())
            raise typer.Exit(READER_GONE) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distributed speculative decoding that does not change a single probability.",
)
serve_app = typer.Typer(no_args_is_help=True, help="Run one service in the foreground.")
app.add_typer(serve_app, name="serve")
for name in SERVICES:
    serve_app.command(name)(serve_command(name))
app.command()(up)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(models)
app.command()(health)
app.command()(check_rule)
app.command()(token)
app.command()(synth)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Options that stand before any command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line; an error that a user can act on is one line on standard error."""
    refuse_unknown_variables()
    try:
        app()
    except DraftwireError as error:
        complain(error)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
