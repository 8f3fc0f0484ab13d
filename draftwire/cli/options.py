"""Command-line options and environment variables of the services, made from their configuration classes.

A field `port` of the verifier's configuration becomes `--port` and `DRAFTWIRE_VERIFIER_PORT`; the docstring under the
field becomes its help. So each setting is declared in one place, and an unknown variable is an error.
"""

import ast
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from draftwire.cli.connection_options import CLIENT_VARIABLES
from draftwire.errors import DraftwireError
from draftwire.runtime.log_stream import guard_stderr
from draftwire.runtime.openmp import set_waiting
from draftwire.runtime.settings import AUTO, CacheTokens
from draftwire_drafter.config import DrafterConfig
from draftwire_gateway.config import GatewayConfig
from draftwire_verifier.config import VerifierConfig

PREFIX = "DRAFTWIRE_"

SERVICES: dict[str, type] = {"drafter": DrafterConfig, "verifier": VerifierConfig, "gateway": GatewayConfig}


class PlainHelp(TyperCommand):
    """A command whose help is plain text: in a frame, its long options would leave no room for what they do."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


@dataclass(frozen=True, slots=True)
class Setting:
    """Name, type, default and help of one option of a service."""

    name: str
    kind: Any
    default: Any
    """`MISSING` if a value is required."""
    help: str


def settings_of(config_class: type, defaults: object | None = None) -> Iterator[Setting]:
    """Yields the settings of a configuration class, those of nested classes included."""
    kinds, texts = get_type_hints(config_class), field_docstrings(config_class)
    for field in fields(config_class):
        default = getattr(defaults, field.name) if defaults is not None else field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if is_dataclass(kinds[field.name]):
            nested = kinds[field.name]
            yield from settings_of(nested, None if default is MISSING else default)
        else:
            yield Setting(field.name, kinds[field.name], default, texts.get(field.name, ""))


def build(config_class: type, values: Mapping[str, Any]) -> Any:
    """Builds a configuration from the values of its settings, nested classes included.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    kinds = get_type_hints(config_class)
    arguments = {
        field.name: build(kinds[field.name], values) if is_dataclass(kinds[field.name]) else values[field.name]
        for field in fields(config_class)
    }
    return config_class(**arguments)


def variable(service: str, setting: str) -> str:
    """Returns the environment variable of a service's setting."""
    return f"{PREFIX}{service.upper()}_{setting.upper()}"


@cache
def known_variables() -> frozenset[str]:
    """Returns all variables that set something."""
    own = {variable(name, setting.name) for name, config in SERVICES.items() for setting in settings_of(config)}
    return CLIENT_VARIABLES | own


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables with our prefix that belong to no setting."""
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known_variables())


def meant(name: str) -> str:
    """Returns a question that names the variable most like an unknown one; empty if none is."""
    alike = get_close_matches(name, known_variables(), n=1, cutoff=0.8)
    return f"; did you mean {alike[0]}?" if alike else ""


def serve_command(service: str) -> Callable[..., None]:
    """Returns the function that typer turns into a service's `serve` command."""
    config_class = SERVICES[service]

    def serve(**values: Any) -> None:
        guard_stderr()
        set_waiting()
        try:
            config = build(config_class, values)
            status = importlib.import_module(f"draftwire_{service}.launch").serve(config)
        except DraftwireError as error:
            typer.echo(f"{service}: {error}", err=True)
            status = 2
        except ModuleNotFoundError as error:
            typer.echo(f"{service}: {error}; install the services with: pip install 'draftwire[services]'", err=True)
            status = 2
        raise typer.Exit(status)

    parameters = [_parameter(service, setting) for setting in settings_of(config_class)]
    serve.__doc__ = f"Run a {service} in the foreground until SIGTERM or Ctrl-C."
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def refuse_unknown_variables() -> None:
    """Ends the process if a variable with our prefix sets nothing: it is misspelt, or empty."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    faults = {f"unknown environment variable: {name}{meant(name)}" for name in unknown_variables(ours)}
    faults |= {f"empty environment variable: {name}" for name, value in ours.items() if not value}
    for fault in sorted(faults):
        typer.echo(fault, err=True)
    if faults:
        sys.exit(2)


def _parameter(service: str, setting: Setting) -> inspect.Parameter:
    name = setting.name.replace("_", "-")
    flags = f"--{name}/--no-{name}" if setting.kind is bool else f"--{name}"
    turns_off = setting.kind == int | None and isinstance(
        setting.default, int
    )  # with any other default, omitting the option means None
    parser: dict[str, Any] = {"parser": _int_or_none, "metavar": "INTEGER|none"} if turns_off else {}
    kind = setting.kind
    if kind == CacheTokens:  # of which typer knows no such union
        parser, kind = {"parser": _int_or_auto, "metavar": f"INTEGER|{AUTO}"}, str
    option = typer.Option(flags, envvar=variable(service, setting.name), help=setting.help, **parser)
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _int_or_none(text: str | int) -> int | None:
    return None if str(text).lower() == "none" else int(text)


def _int_or_auto(text: str | int) -> int | str:
    if str(text).lower() == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"neither a number nor {AUTO}: {text}") from None


@cache
def field_docstrings(config_class: type) -> dict[str, str]:
    """Returns the docstring below each field of a class, joined into one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = ast.literal_eval(text.value)
            texts[field.target.id] = " ".join(value.split())
    return texts
