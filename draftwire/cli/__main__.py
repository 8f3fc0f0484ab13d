"""`draftwire`: run the services, and talk to them."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from draftwire import __version__
from draftwire.cli.check_rule import check_rule
from draftwire.cli.generate import generate
from draftwire.cli.health import health
from draftwire.cli.synth import synth
from draftwire.cli.token import token
from draftwire.cli.up import demo, up
from draftwire.errors import DraftwireError
from draftwire.services.options import SERVICES, refuse_unknown_variables, serve_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {error}", markup=True, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
