"""`draftwire models`: the models, defaults and verification rules of a gateway."""

import json
import sys
from typing import Annotated, Any

import typer

from draftwire.cli.colors import visible
from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.option_groups import with_options

COLUMNS = ("role", "name", "dtype", "context", "vocabulary", "revision")


@with_options
def models(
    connection: ConnectionOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the models that answer at a gateway, its defaults, and the verification rules that it offers."""
    with connection.open() as client:
        client.wait_ready(connection.wait)
        server = client.server()
    if as_json:
        typer.echo(json.dumps(server_fields(server), indent=2))
        return
    rows = [_row("target", server.target), *(_row("drafter", drafter) for drafter in server.drafters)]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        _print_aligned(rows)
    lossy = server.lossy_rejection_sample_methods
    rules = [name + (" (lossy)" if name in lossy else "") for name in server.rejection_sample_methods]
    fixed = str(server.num_speculative_tokens)
    chosen = f"chosen by measurement, {fixed} where a text depends on its seed and on drafts"
    default = chosen if server.chooses_draft_lengths else fixed
    typer.echo(f"draft tokens per round: {default}, at most {server.max_speculative_tokens}")
    if server.drafter_names:
        typer.echo(f"may draft, by name: {visible(', '.join(server.drafter_names))}")
    typer.echo(f"rules, the default first: {visible(', '.join(rules))}")


def server_fields(server: Any) -> dict[str, Any]:
    """Returns a `GetServerResponse` of the protos, which the command line does not import, as JSON values."""
    return {
        "target": model_fields(server.target),
        "drafters": [model_fields(drafter) for drafter in server.drafters],
        "num_speculative_tokens": server.num_speculative_tokens,
        "max_speculative_tokens": server.max_speculative_tokens,
        "rejection_sample_methods": list(server.rejection_sample_methods),
        "lossy_rejection_sample_methods": list(server.lossy_rejection_sample_methods),
        "chooses_draft_lengths": server.chooses_draft_lengths,
        "drafter_names": list(server.drafter_names),
    }


def model_fields(model: Any) -> dict[str, Any]:
    """Returns a `ModelDescription` of the protos as JSON values."""
    return {
        "name": model.name,
        "revision": model.revision,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "stop_token_ids": list(model.stop_token_ids),
        "weights_fingerprint": model.weights_fingerprint.hex(),
    }


def _row(role: str, model: Any) -> tuple[str, ...]:
    """Returns a row of the table, with control characters replaced."""
    sizes = (str(model.context_length), str(model.vocab_size))
    return (role, visible(model.name), visible(model.dtype), *sizes, visible(model.revision) or "-")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape

    from draftwire.cli.console import make_console, make_table

    table = make_table(COLUMNS, texts=set(COLUMNS) - {"context", "vocabulary"})
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    make_console().print(table)


def _print_aligned(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
