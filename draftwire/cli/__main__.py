"""`draftwire`: the command line of the services and of their client."""

import sys
from typing import Annotated

import typer

from draftwire import __version__
from draftwire.cli.bench_command import bench
from draftwire.cli.chat_command import chat
from draftwire.cli.check_rule_command import check_rule
from draftwire.cli.demo_command import demo
from draftwire.cli.exits import FAILED, MISUSED, complain, end, end_in_silence
from draftwire.cli.fetch_command import fetch_model
from draftwire.cli.generate_command import generate
from draftwire.cli.health_command import health
from draftwire.cli.index_command import index_app
from draftwire.cli.models_command import models
from draftwire.cli.options import SERVICES, PlainHelp, refuse_unknown_variables, serve_command
from draftwire.cli.token_command import token
from draftwire.cli.train_command import train
from draftwire.cli.up_command import up
from draftwire.cli.writer import encode_as_utf8
from draftwire.errors import DraftwireError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Distributed speculative decoding that does not change a single probability.",
)
serve_app = typer.Typer(no_args_is_help=True, help="Run one service in the foreground.")
app.add_typer(serve_app, name="serve")
for name in SERVICES:
    serve_app.command(name, cls=PlainHelp)(serve_command(name))
for command in (up, demo, generate, chat, models, bench, health, check_rule, token, train):
    app.command(cls=PlainHelp if command is up else None)(command)
app.command("fetch")(fetch_model)
app.add_typer(index_app, name="index")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Options that stand before any command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(
    hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def synth() -> None:
    """Print where synthetic pairs are made now."""
    end(
        MISUSED,
        "synthetic pairs are made by `python -m tools.synth`, with the same options, in a clone of the repository",
    )


def main() -> None:
    """Runs the command line.

    A `DraftwireError` becomes one line on standard error. If the reader of standard output has closed it, as
    `| head -1` does, the command exits without a message.
    """
    refuse_unknown_variables()
    encode_as_utf8()
    try:
        _run()
    except BrokenPipeError:
        end_in_silence()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer, and rich when it prints help, exit with 1
            end_in_silence()
        raise


def _run() -> None:
    """Runs the command line. Wrong usage is one line too, not typer's box."""
    try:
        status = app(standalone_mode=False)
    except DraftwireError as error:
        complain(error)
        sys.exit(FAILED)
    except typer.Abort:
        sys.exit(FAILED)
    except Exception as error:
        if not hasattr(error, "format_message"):  # which errors of usage have
            raise
        message, context = str(error.format_message()), getattr(error, "ctx", None)
        if "\n" in message:  # the help of a command that was called without anything
            typer.echo(message, err=True)
        else:
            complain(f"{message.removesuffix('.')}: {context.command_path} --help" if context else message)
        sys.exit(MISUSED)
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
