"""`draftwire up`: the three services on this machine, with one command."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from draftwire.cli.generate import print_statistics
from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from draftwire.services.local_stack import LocalStack

DEMO_PROMPT = "def merge_sorted(a, b):"
SMALL_MODEL_BYTES = 64 * 2**20
"""Weights of models that one thread runs as fast as several."""
COLORS = {"drafter": "cyan", "verifier": "magenta", "gateway": "green"}

Target = Annotated[str | None, typer.Option(help="Target model: folder or hub name. [default: the embedded one]")]
Drafter = Annotated[str | None, typer.Option(help="Draft model: folder or hub name. [default: the embedded one]")]
Speculative = Annotated[int, typer.Option(help="Draft tokens per round where a request does not say.")]


def up(
    target: Target = None,
    drafter: Drafter = None,
    port: Annotated[int, typer.Option(help="gRPC port of the gateway.")] = 50051,
    verifier_port: Annotated[int, typer.Option(help="gRPC port of the verifier.")] = 50052,
    drafter_port: Annotated[int, typer.Option(help="gRPC port of the drafter.")] = 50053,
    num_speculative_tokens: Speculative = 4,
) -> None:
    """Start drafter, verifier and gateway, and run them until Ctrl-C.

    Everything else is set by environment variables, such as DRAFTWIRE_VERIFIER_DEVICE=cuda:0; see `draftwire serve
    verifier --help`.
    """
    console = Console(stderr=True, highlight=False)
    options = stack_options(target, drafter, num_speculative_tokens)
    options["gateway"]["port"] = port
    options["verifier"].update(port=verifier_port, metrics_port=9052)
    options["drafter"].update(port=drafter_port, metrics_port=9053)

    _interrupt_on_signals()
    with LocalStack(options, on_log=lambda service, line: _print_log(console, service, line)) as stack:
        console.print(f'[bold]ready[/bold] on {stack.address}; in another terminal: draftwire generate "{DEMO_PROMPT}"')
        try:
            ended = stack.wait()
        except KeyboardInterrupt:
            console.print("stopping")
            return
    console.print(f"[red]{ended} ended, so everything was stopped[/red]")
    sys.exit(1)


def demo(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")] = DEMO_PROMPT,
    target: Target = None,
    drafter: Drafter = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    num_speculative_tokens: Speculative = 4,
) -> None:
    """Start everything on free ports, stream one completion, print what it took, stop everything."""
    console = Console(stderr=True, highlight=False)
    options = stack_options(target, drafter, num_speculative_tokens)
    _interrupt_on_signals()
    with ExitStack() as cleanup:
        with console.status("starting drafter, verifier and gateway"):
            stack = cleanup.enter_context(LocalStack(options))
        client = cleanup.enter_context(Client(stack.address))
        client.generate(prompt, max_tokens=8)  # the first request pays for lazy initialisation
        stream = client.stream(prompt, max_tokens=max_tokens, temperature=temperature)
        typer.echo(prompt, nl=False)
        for piece in stream:
            typer.echo(piece.text, nl=False)
        typer.echo()
        if stream.completion is not None:
            print_statistics(stream.completion)


def stack_options(target: str | None, drafter: str | None, num_speculative_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns the options of a `LocalStack`.

    Raises:
        InvalidRequestError: no model is named and the embedded pair is not there.
    """
    models = {"verifier": target or embedded_model("target"), "drafter": drafter or embedded_model("drafter")}
    # Bytes cost next to nothing on one machine, and what a sparse distribution leaves out costs acceptance.
    drafts = {"draft_mass": 0.99, "draft_max_support": 512}
    return {
        "verifier": {"model": models["verifier"], "threads": threads_for(models["verifier"])},
        "drafter": {"model": models["drafter"], "threads": threads_for(models["drafter"]), **drafts},
        "gateway": {"num_speculative_tokens": num_speculative_tokens},
    }


def threads_for(model: str) -> int:
    """Returns how many threads run a model fastest: all cores, unless waking them takes longer than what they save.

    Drafter and verifier work in turn where there is one session, so each may have all cores; see `docs/speed.md`.
    """
    size = sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
    is_small = 0 < size < SMALL_MODEL_BYTES  # one from the hub is not
    return 1 if is_small else os.cpu_count() or 1


def embedded_model(name: str) -> str:
    """Returns the folder of a model of the embedded pair.

    Raises:
        InvalidRequestError: it is not there, because this is not a checkout of the repository.
    """
    folder = Path(__file__).resolve().parents[2] / "models" / name
    if not (folder / "config.json").is_file():
        raise InvalidRequestError(f"the embedded pair is not installed ({folder}); pass --target and --drafter")
    return str(folder)


def _interrupt_on_signals() -> None:
    """Makes SIGINT and SIGTERM stop the services on the way out. A shell starts background jobs with SIGINT ignored.

    Only the first one counts: another must not interrupt the stopping, which takes a bounded time.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _print_log(console: Console, service: str, line: Mapping[str, Any]) -> None:
    shown = {key: value for key, value in line.items() if key not in ("event", "level", "timestamp", "service")}
    pairs = " ".join(f"{key}={value}" for key, value in shown.items())
    style = {"warning": "yellow", "error": "red"}.get(str(line.get("level")), "")
    text = escape(f"{line['event']} {pairs}")
    console.print(f"[{COLORS[service]}]{service:>8}[/] " + (f"[{style}]{text}[/]" if style else text), soft_wrap=True)
