"""Groups of options that several commands share: dataclasses whose fields typer turns into options."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

Command = Callable[..., None]


def with_options(command: Command) -> Command:
    """Returns a command for typer: a parameter whose type is a dataclass becomes an option for each of its fields.

    The function is called with the dataclasses, made from the option values. The help shows the options of a group
    under the first line of the dataclass's docstring.
    """
    kinds = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        else:
            own = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kinds[parameter.name])
            parameters.append(own)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: type) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    panel = inspect.getdoc(group) or group.__name__
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind, given = get_args(kinds[field.name])
        option = copy.copy(given)
        option.rich_help_panel = panel.partition("\n")[0].removesuffix(".")
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
