"""`draftwire generate`: stream a completion, or print several."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.exits import color_complaints
from draftwire.cli.option_groups import with_options
from draftwire.cli.request_options import MAX_TOKENS, RequestOptions
from draftwire.cli.statistics_output import show_statistics
from draftwire.cli.writer import Display, TextWriter
from draftwire.errors import DraftwireError, InvalidRequestError

if TYPE_CHECKING:
    from draftwire.client import CompletionStream

NO_ROOM = "; max_tokens must be in 0.."
"""Words of a gateway that refuses a prompt which leaves less room than the default."""


@with_options
def generate(
    connection: ConnectionOptions,
    request: RequestOptions,
    display: Display,
    num_choices: Annotated[
        int, typer.Option("--num-choices", "-n", help="Completions, printed one after the other.")
    ] = 1,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - reads it from standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Reads the text from a file.")
    ] = None,
) -> None:
    """Stream a completion, or print several, and what they took.

    On a terminal, colours say where each token came from. Elsewhere, standard output is the text and nothing else.
    """
    color_complaints(display.when)
    prompt = read_prompt(prompt, prompt_file)
    writer = TextWriter(display)
    with connection.open() as client:

        def write(max_tokens: int | None) -> None:
            stream = client.stream(
                prompt,
                num_choices=num_choices,
                token_details=writer.is_colored,
                wait_for_server_s=connection.wait,
                **request.arguments(max_tokens),
            )
            write_completions(stream, prompt, writer, display, is_single=num_choices == 1)

        try:
            write(MAX_TOKENS)
        except InvalidRequestError as error:
            if request.max_tokens is not None or NO_ROOM not in str(error):
                raise
            write(None)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Returns the prompt that is given as an argument, on standard input ("-") or in a file, to the byte.

    Raises:
        typer.BadParameter: none is given, or two.
        InvalidRequestError: it cannot be read, or is empty.
    """
    if (prompt is None) is (prompt_file is None):
        raise typer.BadParameter("one prompt: as an argument, as - on standard input, or by --prompt-file")
    try:
        if prompt_file is not None:
            text = prompt_file.read_bytes().decode()
        else:
            text = sys.stdin.buffer.read().decode() if prompt == "-" else str(prompt)
    except (OSError, UnicodeError, AttributeError) as error:  # without standard input, there is no `sys.stdin`
        raise InvalidRequestError(f"the prompt cannot be read: {error}") from error
    if not text:
        raise InvalidRequestError("the prompt is empty")
    return text


def write_completions(
    stream: "CompletionStream", prompt: str, writer: TextWriter, display: Display, is_single: bool
) -> None:
    """Writes the completions of a stream: a single one piece by piece, several at the end."""
    has_begun = False

    def begin() -> None:  # not before there is something to write: a gateway may refuse, or not be there
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            writer.legend()
            writer.text(prompt if is_single else "")

    try:
        for piece in stream:
            begin()
            if is_single:
                writer.tokens(piece.text, piece.token_texts, piece.sources)
    except (DraftwireError, KeyboardInterrupt):
        writer.break_line()
        raise
    begin()
    for completion in stream.completions:
        if not is_single:
            writer.text(f"choice {completion.choice}:\n{prompt}")
            writer.tokens(completion.text, completion.token_texts, completion.sources)
        writer.text("\n")
        show_statistics(completion, display)
