"""`draftwire chat`: a conversation through the target's chat template."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.connection_options import ConnectionOptions
from draftwire.cli.exits import INTERRUPTED, color_complaints, complain
from draftwire.cli.option_groups import with_options
from draftwire.cli.request_options import RequestOptions
from draftwire.cli.statistics_output import show_statistics
from draftwire.cli.writer import Display, TextWriter
from draftwire.errors import DraftwireError, InvalidRequestError

if TYPE_CHECKING:
    from draftwire.client import Client, Completion

PROMPT = "> "
COMMANDS = "/reset begins anew, /stats tells what the last answer took, /exit leaves; Ctrl-C stops an answer"


@with_options
def chat(
    connection: ConnectionOptions,
    request: RequestOptions,
    display: Display,
    system: Annotated[str | None, typer.Option(help="System message: what the model is told beforehand.")] = None,
) -> None:
    """Hold a conversation with the target, through its chat template.

    Standard input may be a pipe: one message per line, and standard output is the answers.
    """
    color_complaints(display.when)
    with connection.open() as client:
        client.wait_ready(connection.wait)
        conversation = ChatHistory(client, request.arguments(), system, TextWriter(display))
        conversation.check()
        if sys.stdin.isatty():
            _talk(conversation, display)
            return
        for line in _piped():
            if line.strip() and not command(conversation, display, line.strip()):
                conversation.say(line.rstrip("\n"))
                _end_answer(conversation, display)
            if conversation.is_over:
                break


class ChatHistory:
    """The messages of a conversation. Sends the next one and writes its answer."""

    def __init__(self, client: "Client", arguments: dict[str, Any], system: str | None, writer: TextWriter) -> None:
        self._client = client
        self._arguments = arguments
        self._system = system
        self.writer = writer
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        """The last answer, for its statistics; None before the first answer and after one that was stopped."""
        self.is_over = False
        self.reset()

    def reset(self) -> None:
        """Drops all messages but the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.last = None

    def check(self) -> None:
        """Checks, before the user types, that the server accepts conversations with these options.

        Raises:
            InvalidRequestError: it refuses them; the message holds the reason.
        """
        question = [*self.messages, {"role": "user", "content": "Hello"}]
        nothing = {"max_tokens": 0, "min_tokens": None}
        try:
            for _ in self._client.stream(question, **{**self._arguments, **nothing}):
                pass
        except InvalidRequestError as error:
            hint = ": `draftwire generate` continues texts" if "no chat template" in str(error) else ""
            raise InvalidRequestError(f"{error}{hint}") from error

    def say(self, text: str) -> None:
        """Sends a user message and streams the answer to the writer.

        If the stream breaks, message and answer stay in the history if any text was shown; otherwise neither does.

        Raises:
            DraftwireError: the server refuses the request, or the connection is lost.
            KeyboardInterrupt: the user stopped the answer; the request is cancelled.
        """
        self.last = None
        self.messages.append({"role": "user", "content": text})
        answer = ""
        stream = None
        try:
            stream = self._client.stream(self.messages, token_details=self.writer.is_colored, **self._arguments)
            for piece in stream:
                answer += piece.text
                self.writer.tokens(piece.text, piece.token_texts, piece.sources)
            self.last = stream.completion
        except BaseException as error:
            if stream is not None:
                stream.cancel()
            if isinstance(error, DraftwireError):
                self.writer.break_line()
            raise
        finally:
            if answer or self.last is not None:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()


def _talk(conversation: ChatHistory, display: Display) -> None:
    """Reads messages at a terminal and writes answers until the user leaves.

    Raises:
        typer.Exit: the user left by Ctrl-C.
    """
    with suppress(ImportError):  # line editing and history
        import readline  # noqa: F401
    conversation.writer.legend()
    if not display.quiet:
        typer.echo(COMMANDS, err=True)
    while not conversation.is_over:
        try:
            text = _ask()
        except EOFError:
            typer.echo(err=True)
            return
        except KeyboardInterrupt as stopped:
            typer.echo(err=True)
            raise typer.Exit(INTERRUPTED) from stopped
        if text.strip() and not command(conversation, display, text.strip()):
            _answer(conversation, display, text)


def _answer(conversation: ChatHistory, display: Display, text: str) -> None:
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        conversation.writer.text("\n")
        typer.echo("(stopped)", err=True)
    except DraftwireError as error:
        complain(error)
    else:
        _end_answer(conversation, display)


def command(conversation: ChatHistory, display: Display, text: str) -> bool:
    """Runs a line that is a command; returns False if the line is a message.

    Raises:
        InvalidRequestError: the command is unknown and standard input is not a terminal. On a terminal, the command is
            reported and the conversation goes on.
    """
    match text:
        case "/exit" | "/quit":
            conversation.is_over = True
        case "/reset":
            conversation.reset()
        case "/stats" if conversation.last is None:
            typer.echo("there is no answer to tell of", err=True)
        case "/stats" if conversation.last is not None:
            show_statistics(conversation.last, Display(display.color, display.no_color, stats=True))
        case "/help":
            typer.echo(COMMANDS, err=True)
        case _ if text.startswith("/") and text[1:].isalpha():
            if not sys.stdin.isatty():
                raise InvalidRequestError(f"unknown command {text}: {COMMANDS}")
            typer.echo(f"unknown command {text}: {COMMANDS}", err=True)
        case _:
            return False
    return True


def _end_answer(conversation: ChatHistory, display: Display) -> None:
    conversation.writer.text("\n")
    if conversation.last is not None:
        show_statistics(conversation.last, display)


def _piped() -> Iterator[str]:
    """Yields the lines of standard input.

    Raises:
        InvalidRequestError: standard input is not UTF-8.
    """
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is no UTF-8: {error}") from error


def _ask() -> str:
    """Returns a line that the user types. If standard output is not a terminal, the prompt goes to standard error.

    Raises:
        EOFError: Ctrl-D.
    """
    if sys.stdout.isatty():
        return input(PROMPT)
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
