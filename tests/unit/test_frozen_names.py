"""Names that users, dashboards and other programs rely on: none goes away unnoticed. docs/upgrade.md has those that do.

`tests/frozen_names.json` holds them. A new name is added to it with `python -m tests.unit.test_frozen_names`, which
removes none.
"""

import ast
import importlib
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import Descriptor, FileDescriptor
from typer.main import get_command

from draftwire.cli.__main__ import app
from draftwire.cli.options import CLIENT_VARIABLES, SERVICES, settings_of, unknown_variables, variable
from draftwire.v1 import gateway_pb2
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_gateway.http.body import ChatBody, CompletionBody
from draftwire_gateway.metrics import GatewayMetrics
from draftwire_verifier.metrics import VerifierMetrics

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "tests" / "frozen_names.json"
PACKAGES = (
    "draftwire",
    "draftwire.client",
    "draftwire.verification",
    "draftwire.checking",
    "draftwire.audit",
)


def options(command: Any, path: str = "draftwire") -> Iterator[str]:
    """Yields the commands of the command line, and their options."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from options(child, f"{path} {name}")
    for parameter in command.params:
        yield from (f"{path} {name}" for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))


def variables() -> Iterator[str]:
    yield from CLIENT_VARIABLES
    for service, config in SERVICES.items():
        yield from (variable(service, setting.name) for setting in settings_of(config))


def metrics() -> Iterator[str]:
    for kind in (DrafterMetrics, VerifierMetrics, GatewayMetrics):
        of_service = kind()
        of_service.of_model.model_name = "any"
        for family in of_service.registry.collect():
            labels = of_service.labels.get(family.name, ())
            yield f"{kind.__name__} {family.name} {family.type} {','.join(labels)}".strip()


def messages(file: FileDescriptor) -> Iterator[str]:
    """Yields the fields of the messages that users send and get, with their numbers."""
    seen: set[str] = set()

    def fields(message: Descriptor) -> Iterator[str]:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        for field in message.fields:
            yield f"{field.full_name} = {field.number}"
            if field.message_type is not None:
                yield from fields(field.message_type)

    for service in file.services_by_name.values():
        for method in service.methods:
            yield method.full_name
            yield from fields(method.input_type)
            yield from fields(method.output_type)


def json_fields() -> Iterator[str]:
    for kind in (CompletionBody, ChatBody):
        yield from (f"{kind.__name__} {field.alias or name}" for name, field in kind.model_fields.items())


def log_events() -> Iterator[str]:
    """Yields the names of log events; what is filled in is left open."""
    files = [path for folder in ("draftwire", "services", "contrib") for path in (ROOT / folder).rglob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            if ast.unparse(node.func.value) == "log" and node.func.attr in ("info", "warning", "error", "exception"):
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def exported() -> Iterator[str]:
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)


def chart_values(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, member in value.items():
            yield from chart_values(member, f"{path}.{name}" if path else name)
    else:
        yield path


def names() -> dict[str, list[str]]:
    """Returns the names of now, by kind."""
    kinds: dict[str, Iterator[str]] = {
        "command line": options(get_command(app)),
        "environment": variables(),
        "metrics": metrics(),
        "messages": messages(gateway_pb2.DESCRIPTOR),
        "json": json_fields(),
        "log events": log_events(),
        "python": exported(),
        "chart values": chart_values(yaml.safe_load((ROOT / "k8s" / "chart" / "values.yaml").read_text())),
    }
    return {kind: sorted(set(found)) for kind, found in kinds.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", names())
def test_no_name_that_others_rely_on_is_gone(kind: str) -> None:
    frozen = json.loads(FROZEN.read_text())[kind]
    assert len(frozen) > 5
    now = names()[kind]
    assert [name for name in frozen if not any(fnmatchcase(name, pattern) for pattern in now)] == []


def test_no_variable_that_was_known_is_refused() -> None:
    """A configuration of an older release starts: an unknown variable would end the process."""
    assert unknown_variables(dict.fromkeys(json.loads(FROZEN.read_text())["environment"], "any")) == []


if __name__ == "__main__":
    known = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    merged = {kind: sorted({*found, *known.get(kind, ())}) for kind, found in names().items()}
    FROZEN.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n")
