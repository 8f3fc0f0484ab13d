"""`draftwire models`: the models, defaults and verification rules of a gateway."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from draftwire.cli.colors import visible
from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.option_groups import with_options

COLUMNS = ("role", "name", "dtype", "context", "vocabulary", "revision")


@dataclass(frozen=True, slots=True)
class Model:
    """Description of a model, as its service reports it."""

    name: str
    revision: str
    dtype: str
    vocab_size: int
    context_length: int
    stop_token_ids: list[int]
    weights_fingerprint: str

    @classmethod
    def of(cls, description: Any) -> "Model":
        """Converts a `ModelDescription` of the protos, which the command line does not import."""
        return cls(
            description.name,
            description.revision,
            description.dtype,
            description.vocab_size,
            description.context_length,
            list(description.stop_token_ids),
            description.weights_fingerprint.hex(),
        )

    def cells(self, role: str) -> tuple[str, ...]:
        """Returns a row of the table, with control characters replaced."""
        sizes = (str(self.context_length), str(self.vocab_size))
        return (role, visible(self.name), visible(self.dtype), *sizes, visible(self.revision) or "-")


@dataclass(frozen=True, slots=True)
class Server:
    """Description of a gateway: its models, speculation limits and verification rules."""

    target: Model
    drafters: list[Model]
    num_speculative_tokens: int
    max_speculative_tokens: int
    rejection_sample_methods: list[str]
    lossy_rejection_sample_methods: list[str]
    chooses_draft_lengths: bool
    drafter_names: list[str]

    @classmethod
    def of(cls, response: Any) -> "Server":
        """Converts a `GetServerResponse` of the protos."""
        return cls(
            Model.of(response.target),
            [Model.of(drafter) for drafter in response.drafters],
            response.num_speculative_tokens,
            response.max_speculative_tokens,
            list(response.rejection_sample_methods),
            list(response.lossy_rejection_sample_methods),
            response.chooses_draft_lengths,
            list(response.drafter_names),
        )


@with_options
def models(
    connection: ConnectionOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the models that answer at a gateway, its defaults, and the verification rules that it offers."""
    with connection.open() as client:
        client.wait_ready(connection.wait)
        server = Server.of(client.server())
    if as_json:
        typer.echo(json.dumps(asdict(server), indent=2))
        return
    rows = [server.target.cells("target"), *(drafter.cells("drafter") for drafter in server.drafters)]
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


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from draftwire.cli.console import make_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in COLUMNS:
        table.add_column(heading, justify="right" if heading in ("context", "vocabulary") else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    make_console().print(table)


def _print_aligned(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
