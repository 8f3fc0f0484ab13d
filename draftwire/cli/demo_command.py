"""`draftwire demo`: start the services, stream one completion, stop; by default with the embedded pair."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.exits import color_complaints
from draftwire.cli.generate_command import write_completions
from draftwire.cli.option_groups import with_options
from draftwire.cli.up_command import (
    DEMO_PROMPT,
    PAGE,
    DrafterOption,
    SpeculativeOption,
    TargetOption,
    interrupt_on_signals,
    own_command,
    stack_options,
)
from draftwire.cli.writer import Display, TextWriter

if TYPE_CHECKING:
    from draftwire.client import Completion


def gain(completion: "Completion", plain: "Completion") -> str:
    """Returns what is said of a completion beside the same prompt decoded plainly."""
    speeds = [each.tokens_per_second for each in (completion, plain)]
    ratio = speeds[0] / speeds[1]
    return f"{ratio:.2f} times as fast as plain decoding: {speeds[0]:.0f} tokens/s in place of {speeds[1]:.0f}"


@with_options
def demo(
    display: Display,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")] = DEMO_PROMPT,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    num_speculative_tokens: SpeculativeOption = None,
) -> None:
    """Start everything on free ports, stream one completion, print what it took and what it gained, stop everything."""
    from draftwire.cli.console import make_console
    from draftwire.cli.local_stack import LocalStack
    from draftwire.cli.preflight import check_stack
    from draftwire.client import Client

    color_complaints(display.when)
    console = make_console(stderr=True, when=display.when)
    writer = TextWriter(display)
    options = stack_options(target, drafter, num_speculative_tokens, console=console)
    check_stack(options)
    interrupt_on_signals()
    with ExitStack() as cleanup:
        with console.status("starting drafter, verifier and gateway"):
            stack = cleanup.enter_context(LocalStack(options, start_timeout_s=None))
        client = cleanup.enter_context(Client(stack.address))
        client.generate(prompt, max_tokens=8)  # the first request pays for lazy initialisation
        stream = client.stream(prompt, max_tokens=max_tokens, temperature=temperature, token_details=writer.is_colored)
        write_completions(stream, prompt, writer, display, is_single=True)
        drafted = stream.completion is not None and stream.completion.statistics.num_draft_tokens > 0
        if stream.completion is not None and drafted and not display.quiet:
            plain = client.generate(prompt, max_tokens=max_tokens, temperature=temperature, num_speculative_tokens=0)
            console.print(gain(stream.completion, plain), soft_wrap=True)
    if not display.quiet:
        command = own_command()
        console.print(
            f"next: [bold]{command} up[/bold], then open {PAGE}, or in another terminal: {command} generate",
            soft_wrap=True,
        )
