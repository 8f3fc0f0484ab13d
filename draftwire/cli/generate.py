"""`draftwire generate`: stream a completion, or print several."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftwire.cli.tls_options import TlsCa, TlsCert, TlsKey, TlsTargetName
from draftwire.client import Client, Completion
from draftwire.client.sync import DEFAULT_ADDRESS
from draftwire.errors import InvalidRequestError
from draftwire.services.options import ADDRESS_VARIABLE, TOKEN_VARIABLE
from draftwire.structured_output import StructuredOutput


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    address: Annotated[str, typer.Option(envvar=ADDRESS_VARIABLE, help="host:port of the gateway.")] = DEFAULT_ADDRESS,
    num_choices: Annotated[
        int, typer.Option("--num-choices", "-n", help="Completions, printed one after the other.")
    ] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the server's default is 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this likely beside the most likely one.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: avoid tokens of the text.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0: avoid generated tokens.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0: avoid them more each time.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No stop token before so many tokens.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Make JSON of the schema in this file.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Make a text that matches this expression, all of it.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's stop tokens.")] = False,
    seed: Annotated[int | None, typer.Option(help="Make the run repeatable.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens per round; 0 is plain.")] = None,
    rejection_sample_method: Annotated[
        str | None, typer.Option(help="block, token, coupled, or typical (lossy).")
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_target_name: TlsTargetName = None,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token; the variable hides it from other users."),
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the gateway to come up.")] = 5.0,
) -> None:
    """Stream a completion, or print several, and what they took."""
    security = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "tls_target_name": tls_target_name}
    with Client(address, **security, token=token) as client:
        stream = client.stream(
            prompt,
            num_choices=num_choices,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            structured_output=_form(json_schema, regex),
            stop=stop or (),
            ignore_eos=ignore_eos,
            seed=seed,
            num_speculative_tokens=num_speculative_tokens,
            rejection_sample_method=rejection_sample_method,
            wait_for_server_s=wait,
        )
        if num_choices == 1:
            typer.echo(prompt, nl=False)
        for piece in stream:
            if num_choices == 1:
                typer.echo(piece.text, nl=False)
    for completion in stream.completions:
        if num_choices > 1:
            typer.echo(f"choice {completion.choice}:")
            typer.echo(prompt + completion.text, nl=False)
        typer.echo()
        print_statistics(completion)


def _form(json_schema: Path | None, regex: str | None) -> StructuredOutput | None:
    if json_schema is not None and regex is not None:
        raise InvalidRequestError("--json-schema and --regex exclude each other")
    if json_schema is not None:
        return StructuredOutput.json(json_schema.read_text(encoding="utf-8"))
    return None if regex is None else StructuredOutput.regex(regex)


def print_statistics(completion: Completion) -> None:
    """Prints one line on standard error: tokens, tokens/s, block efficiency, acceptance rate, rounds."""
    console = Console(stderr=True, highlight=False)
    console.print(
        f"[dim]{completion.statistics.num_generated_tokens} tokens · {completion.tokens_per_second:.1f} tokens/s · "
        f"block efficiency {completion.block_efficiency:.2f} · acceptance rate {completion.acceptance_rate:.3f} · "
        f"{completion.statistics.num_rounds} rounds · rule {completion.rejection_sample_method} · "
        f"seed {completion.seed}[/dim]",
        soft_wrap=True,
    )
    if completion.is_lossy:
        name = completion.rejection_sample_method
        console.print(f"[yellow]{name} is lossy: the text is not distributed as the target's[/yellow]", soft_wrap=True)
    if completion.drafter_error:
        console.print(f"[yellow]went on without the drafter: {completion.drafter_error}[/yellow]", soft_wrap=True)
