"""`draftwire generate`: stream one completion."""

from typing import Annotated

import typer
from rich.console import Console

from draftwire.client import Client, Completion
from draftwire.client.sync import DEFAULT_ADDRESS
from draftwire.services.options import (
    ADDRESS_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    TLS_TARGET_NAME_VARIABLE,
    TOKEN_VARIABLE,
)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    address: Annotated[str, typer.Option(envvar=ADDRESS_VARIABLE, help="host:port of the gateway.")] = DEFAULT_ADDRESS,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the server's default is 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this likely beside the most likely one.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: avoid tokens of the text.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0: avoid generated tokens.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0: avoid them more each time.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No stop token before so many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option(help="Make the run repeatable.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens per round; 0 is plain.")] = None,
    rejection_sample_method: Annotated[
        str | None, typer.Option(help="block, token, coupled, or typical (lossy).")
    ] = None,
    tls_ca: Annotated[str | None, typer.Option(envvar=TLS_CA_VARIABLE, help="PEM file: whom to believe.")] = None,
    tls_cert: Annotated[str | None, typer.Option(envvar=TLS_CERT_VARIABLE, help="PEM file: who we are.")] = None,
    tls_key: Annotated[str | None, typer.Option(envvar=TLS_KEY_VARIABLE, help="PEM file: the key of it.")] = None,
    tls_target_name: Annotated[
        str | None, typer.Option(envvar=TLS_TARGET_NAME_VARIABLE, help="Name in the gateway's certificate.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token; the variable hides it from other users."),
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the gateway to come up.")] = 5.0,
) -> None:
    """Stream a completion, then print what it took."""
    security = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "tls_target_name": tls_target_name}
    with Client(address, **security, token=token) as client:
        stream = client.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            min_tokens=min_tokens,
            stop=stop or (),
            seed=seed,
            num_speculative_tokens=num_speculative_tokens,
            rejection_sample_method=rejection_sample_method,
            wait_for_server_s=wait,
        )
        typer.echo(prompt, nl=False)
        for piece in stream:
            typer.echo(piece.text, nl=False)
        typer.echo()
    if stream.completion is not None:
        print_statistics(stream.completion)


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
