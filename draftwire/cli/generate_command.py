"""`draftwire generate`: stream a completion, or print several."""

from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.exits import color_complaints
from draftwire.cli.option_groups import with_options
from draftwire.cli.request_options import MAX_TOKENS, RequestOptions
from draftwire.cli.statistics_output import show_statistics
from draftwire.cli.writer import Display, TextWriter
from draftwire.errors import DraftwireError

if TYPE_CHECKING:
    from draftwire.client import CompletionStream


@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    connection: ConnectionOptions,
    request: RequestOptions,
    display: Display,
    num_choices: Annotated[
        int, typer.Option("--num-choices", "-n", help="Completions, printed one after the other.")
    ] = 1,
) -> None:
    """Stream a completion, or print several, and what they took.

    On a terminal, colours say where each token came from. Elsewhere, standard output is the text and nothing else.
    """
    color_complaints(display.when)
    writer = TextWriter(display)
    arguments = request.arguments()
    if request.max_tokens is None:
        arguments["max_tokens"] = MAX_TOKENS
    with connection.open() as client:
        stream = client.stream(
            prompt,
            num_choices=num_choices,
            token_details=writer.is_colored,
            wait_for_server_s=connection.wait,
            **arguments,
        )
        write_completions(stream, prompt, writer, display, is_single=num_choices == 1)


def write_completions(
    stream: "CompletionStream", prompt: str, writer: TextWriter, display: Display, is_single: bool
) -> None:
    """Writes the completions of a stream: a single one piece by piece, several at the end."""
    writer.legend()
    if is_single:
        writer.text(prompt)
    try:
        for piece in stream:
            if is_single:
                writer.tokens(piece.text, piece.token_texts, piece.sources)
    except (DraftwireError, KeyboardInterrupt):
        writer.break_line()
        raise
    for completion in stream.completions:
        if not is_single:
            writer.text(f"choice {completion.choice}:\n{prompt}")
            writer.tokens(completion.text, completion.token_texts, completion.sources)
        writer.text("\n")
        show_statistics(completion, display)
