"""`draftwire token`: make a bearer token."""

from typing import Annotated

import typer

from draftwire_gateway.auth.tokens import TokenEntry, digest_of, new_token, read_time


def token(
    name: Annotated[str, typer.Argument(help="Who will hold it; names the holder in logs and messages.")],
    max_sessions: Annotated[int | None, typer.Option(help="Requests that may run at once.")] = None,
    max_tokens_per_minute: Annotated[int | None, typer.Option(help="Generated tokens a minute.")] = None,
    expires_at: Annotated[
        str | None, typer.Option(help="When it is refused from, with an offset from UTC: 2027-01-31T12:00:00Z.")
    ] = None,
) -> None:
    """Make a random bearer token: it goes to standard error, its entry for --tokens-file to standard output.

    `draftwire token alice >> tokens.toml` shows the token, once, and adds the entry, which does not hold it.
    """
    secret = new_token()
    entry = TokenEntry(name, digest_of(secret), max_sessions, max_tokens_per_minute, read_time(expires_at))
    typer.echo(secret, err=True)
    typer.echo(entry.to_toml())
