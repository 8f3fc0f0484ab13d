"""`draftwire demo`: start the services, let the model answer, stop."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.exits import color_complaints
from draftwire.cli.generate_command import write_completions
from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED
from draftwire.cli.option_groups import with_options
from draftwire.cli.stack_options import answers, default_target, own_command, stack_options
from draftwire.cli.up_command import (
    CHAT_PAGE,
    DEMO_PROMPT,
    PAGE,
    DrafterOption,
    SpeculativeOption,
    TargetOption,
    interrupt_on_signals,
)
from draftwire.cli.writer import Display, TextWriter
from draftwire.models.fetching import PACKAGED

if TYPE_CHECKING:
    from draftwire.client import Completion

QUESTION = "Write a Python function that returns the largest number of a list, with an example."
CHAT_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "seed": 1}
"""Temperature and top-p as the authors of the chat model advise."""


def gain(completion: "Completion", plain: "Completion") -> str:
    """Returns what is said of a completion at temperature 0 beside the same prompt decoded plainly."""
    speeds = [each.tokens_per_second for each in (completion, plain)]
    ratio = speeds[0] / speeds[1]
    speed = f"{speeds[0]:.0f} tokens/s in place of {speeds[1]:.0f}"
    return f"at temperature 0 {ratio:.2f} times as fast as plain decoding: {speed}"


@with_options
def demo(
    display: Display,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A question; a text to continue where the target takes none.", show_default=False),
    ] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy.", show_default="0.2 for an answer, else 0"),
    ] = None,
    num_speculative_tokens: SpeculativeOption = None,
) -> None:
    """Start everything on free ports, stream an answer, print what drafts gained, stop everything."""
    from draftwire.cli.console import make_console
    from draftwire.cli.local_stack import LocalStack
    from draftwire.cli.preflight import check_stack
    from draftwire.client import Client

    color_complaints(display.when)
    console = make_console(stderr=True, when=display.when)
    writer = TextWriter(display)
    if target is None and drafter is None and not PACKAGED[CHAT_MODEL].file.is_file():
        console.print(
            f"{own_command()} fetch {CHAT_MODEL} gets a model that answers; until then the small pair of the "
            "repository continues code",
            soft_wrap=True,
        )
        target = EMBEDDED
    options = stack_options(
        target or default_target({"--drafter": drafter}), drafter, num_speculative_tokens, console=console
    )
    check_stack(options)
    interrupt_on_signals()
    is_chat = answers(str(options["verifier"]["model"]))
    prompt = prompt or (QUESTION if is_chat else DEMO_PROMPT)
    asked: str | list[dict[str, str]] = [{"role": "user", "content": prompt}] if is_chat else prompt
    sampling: dict[str, Any] = dict(CHAT_SAMPLING) if is_chat else {"temperature": 0.0}
    if temperature is not None:
        sampling = {"temperature": temperature}
    with ExitStack() as cleanup:
        with console.status(f"starting {', '.join(options)}"):
            stack = cleanup.enter_context(LocalStack(options, start_timeout_s=None))
        client = cleanup.enter_context(Client(stack.address))
        client.generate(asked, max_tokens=8)  # the first request pays for lazy initialisation
        stream = client.stream(asked, max_tokens=max_tokens, token_details=writer.is_colored, **sampling)
        shown = f"> {prompt}\n\n" if is_chat else prompt
        write_completions(stream, shown, writer, display, is_single=True)
        if not display.quiet:
            greedy: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
            drafted = stream.completion if sampling["temperature"] == 0.0 else client.generate(asked, **greedy)
            if drafted is not None and drafted.statistics.num_draft_tokens > 0:
                plain = client.generate(asked, num_speculative_tokens=0, **greedy)
                console.print(gain(drafted, plain), soft_wrap=True)
    if not display.quiet:
        command = own_command()
        page, talk = (f"{PAGE}/{CHAT_PAGE}", "chat") if is_chat else (PAGE, "generate")
        console.print(
            f"next: [bold]{command} up[/bold], then open {page}, or in another terminal: {command} {talk}",
            soft_wrap=True,
        )
