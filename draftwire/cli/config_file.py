"""Settings of all services in one file: `draftwire up --config FILE`.

[verifier]
model = "models/large"
threads = 8

[gateway]
http_port = 8080
"""

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from draftwire.cli.options import SERVICES, settings_of, variable
from draftwire.errors import InvalidRequestError


def use_config_file(file: Path) -> None:
    """Sets the variable of each setting of a file, in TOML or YAML, unless it is set: variables are stronger.

    Raises:
        InvalidRequestError: the file cannot be read, or a service, a setting or a kind of value is not known.
    """
    for name, value in variables_of(file).items():
        os.environ.setdefault(name, value)


def variables_of(file: Path) -> dict[str, str]:
    """Returns a file's settings as variables; raises as `use_config_file`."""
    found = {}
    for service, settings in _sections(file).items():
        if service not in SERVICES:
            raise InvalidRequestError(f"{file}: {service} is no service; options are under {', '.join(SERVICES)}")
        if not isinstance(settings, dict):
            raise InvalidRequestError(f"{file}: {service} has no settings, but {settings!r}")
        known = [setting.name for setting in settings_of(SERVICES[service])]
        for name, value in settings.items():
            setting = str(name).replace("-", "_")
            if setting not in known:
                alike = get_close_matches(setting, known, 1)
                meant = f"; did you mean {alike[0]}?" if alike else ""
                raise InvalidRequestError(f"{file}: {service} has no setting {name}{meant}")
            found[variable(service, setting)] = _as_text(value, f"{file}: {service}.{name}")
    return found


def _sections(file: Path) -> Mapping[Any, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise InvalidRequestError(f"{file} is no UTF-8") from error
    try:
        sections = _yaml(text) if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(sections, dict):
        raise InvalidRequestError(f"{file} names no service: {', '.join(SERVICES)}")
    return sections


def _yaml(text: str) -> Any:
    """Parses YAML; raises `ValueError` as the other parser does."""
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem}{line}") from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _as_text(value: Any, where: str) -> str:
    """Returns a value as its variable has it; what is null is none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str) and str(value):
        return str(value)
    raise InvalidRequestError(f"{where} is neither text, a number, nor true or false: {value!r}")
