"""Request options of the commands that generate texts."""

from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.options import field_docstrings
from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import NUMBERS, SamplingParams

if TYPE_CHECKING:
    from draftwire.requests.structured_output import StructuredOutput


MAX_TOKENS = 128
"""Default `max_tokens` of `generate` and `bench`."""


RULE_NAMES = ("block", "token", "coupled", "typical")
"""Rules that shell completion suggests; a server may offer others too."""


def rule_names(incomplete: str) -> list[str]:
    """Completes the name of a verification rule."""
    return [name for name in RULE_NAMES if name.startswith(incomplete)]


if TYPE_CHECKING:
    SamplingNumbers = object
else:
    HELP = field_docstrings(SamplingParams)
    SamplingNumbers = make_dataclass(
        "SamplingNumbers",
        [(name, Annotated[kind | None, typer.Option(help=HELP[name])], None) for name, kind in NUMBERS.items()],
        frozen=True,
        slots=True,
    )


@dataclass(frozen=True, slots=True)
class RequestOptions(SamplingNumbers):
    """Options of a request; the server decides those that are not set."""

    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens to generate.", show_default=f"{MAX_TOKENS}; in a chat, what the context leaves"),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Make JSON of the schema in this file."),
    ] = None
    regex: Annotated[str | None, typer.Option(help="Make a text that matches this expression, all of it.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's stop tokens.")] = False
    seed: Annotated[int | None, typer.Option(help="Make the run repeatable.")] = None
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens per round; 0 is plain. By default the server chooses.")
    ] = None
    num_draft_nodes: Annotated[
        int | None, typer.Option(help="Draft tokens of a token tree per round; 0 drafts chains.")
    ] = None
    stop_below: Annotated[
        float | None, typer.Option(help="End blocks before a place that the drafter is less sure of; 0 ends none.")
    ] = None
    drafter: Annotated[
        list[str] | None, typer.Option(help="What may draft, by name; may be given several times. By default all.")
    ] = None
    rejection_sample_method: Annotated[
        str | None, typer.Option(help="block, token, coupled, or typical (lossy).", autocompletion=rule_names)
    ] = None

    def arguments(self, max_tokens: int | None = None) -> dict[str, Any]:
        """Returns the options as arguments of `Client.stream`; `max_tokens` is the default of that option.

        Raises:
            InvalidRequestError: two options exclude each other, or a file cannot be read.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        del given["json_schema"], given["regex"]
        if self.max_tokens is None:
            given["max_tokens"] = max_tokens
        return {**given, "stop": self.stop or (), "structured_output": self._form()}

    def _form(self) -> "StructuredOutput | None":
        from draftwire.requests.structured_output import StructuredOutput

        if self.json_schema is not None and self.regex is not None:
            raise InvalidRequestError("--json-schema and --regex exclude each other")
        if self.json_schema is not None:
            return StructuredOutput.json(_read(self.json_schema))
        return None if self.regex is None else StructuredOutput.regex(self.regex)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InvalidRequestError(f"--json-schema: {path} cannot be read: {reason}") from error
