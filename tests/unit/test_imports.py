"""What may import what."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import draftwire

ROOT = Path(__file__).parents[2]

MAY_IMPORT_GRPC = (
    "services/*/server.py",
    "services/*/wire.py",
    "draftwire/runtime/*",
    "draftwire/client/*",
    "draftwire/v1/*",
)
GRPC = ("grpc", "grpc_health", "grpc_reflection", "draftwire.v1")

SERVICE_DEPENDENCIES = frozenset(
    {
        "fastapi",
        "jinja2",
        "kubernetes",
        "llguidance",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "pydantic",
        "starlette",
        "structlog",
        "tokenizers",
        "torch",
        "transformers",
        "uvicorn",
    }
)
"""Packages that `pip install draftwire` alone does not bring. grpc itself looks for grpc_health and the like."""


@cache
def source_files() -> list[Path]:
    return [path for folder in ("draftwire", "services") for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "draftwire" else relative.parts[2:]
    return ".".join(parts).removesuffix(".__init__")


def imported(source: str, package: str) -> Iterator[str]:
    """Yields every name that a module imports, also inside functions and for the type checker only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def grpc_imports(source: str, package: str) -> list[str]:
    return [name for name in imported(source, package) if any(name == g or name.startswith(g + ".") for g in GRPC)]


@cache
def imports_grpc(path: Path) -> bool:
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return bool(grpc_imports(path.read_text(), package))


def may_import_grpc(path: Path) -> bool:
    return any(fnmatchcase(path.relative_to(ROOT).as_posix(), pattern) for pattern in MAY_IMPORT_GRPC)


def python(code: str, may_complain: bool = True) -> Any:
    """Runs code in a fresh interpreter and returns what it prints, as JSON."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert may_complain or not result.stderr
    return json.loads(result.stdout.splitlines()[-1])


USES_GRPC = """\
import grpc
import grpc.aio as g
from grpc import aio
from grpc_health.v1 import health
import draftwire.v1.session_pb2
from draftwire.v1 import session_pb2
from draftwire import v1
from ..v1 import session_pb2
from .. import v1
if TYPE_CHECKING: import grpc
def late(): import grpc_reflection
importlib.import_module('grpc')
"""
USES_NONE = ("import grpcio_tools", "from draftwire import version", "from .v1 import x", "x = 'grpc'")


def test_every_way_to_import_grpc_is_noticed_and_no_other() -> None:
    noticed = {source: grpc_imports(source, "draftwire.models") for source in (*USES_GRPC.splitlines(), *USES_NONE)}
    assert {source for source, found in noticed.items() if not found} == set(USES_NONE)


def test_only_the_edges_import_grpc() -> None:
    offenders = [path for path in source_files() if imports_grpc(path) and not may_import_grpc(path)]
    assert offenders == []


def test_walk_sees_the_edges_and_the_library() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in source_files()}
    edges = {path.relative_to(ROOT).as_posix() for path in source_files() if imports_grpc(path)}
    assert {
        "draftwire/method/rounds.py",
        "draftwire/verification/block.py",
        "services/gateway/draftwire_gateway/session/loop.py",
    } <= files - edges
    assert {f"services/{name}/draftwire_{name}/server.py" for name in ("drafter", "gateway", "verifier")} <= edges
    assert {"services/drafter/draftwire_drafter/wire.py", "services/gateway/draftwire_gateway/peers/wire.py"} <= edges


def test_library_imports_without_grpc() -> None:
    left_out = ("client", "cli", "v1", "runtime", "engine")
    names = [
        module_of(path)
        for path in source_files()
        if path.is_relative_to(ROOT / "draftwire") and path.relative_to(ROOT / "draftwire").parts[0] not in left_out
    ]
    assert {"draftwire.method.rounds", "draftwire.models.loading", "draftwire.training.trainer"} <= set(names)
    code = (
        "import importlib, json, sys\n"
        f"sys.modules.update(dict.fromkeys({GRPC}))\n"
        f"for name in {names}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted(set({names}) & set(sys.modules))))"
    )
    assert python(code) == sorted(names)


def test_clients_and_command_line_work_where_the_package_alone_is_installed() -> None:
    """What `pip install draftwire` does not bring cannot be imported; the calls go to where nobody listens.

    The command line starts faster without grpc.
    """
    code = f"""
import asyncio, importlib, importlib.abc, json, sys

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(SERVICE_DEPENDENCIES)}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Without())
importlib.import_module("draftwire.cli.__main__")
import draftwire
said = ["grpc" in sys.modules]

def refused(error):
    said.append(isinstance(error, draftwire.UnavailableError))

form = draftwire.StructuredOutput.json({{"type": "object"}})
with draftwire.Client("127.0.0.1:1") as client:
    try:
        client.generate("a", temperature=0.5, stop=["b"], structured_output=form)
    except draftwire.DraftwireError as error:
        refused(error)

async def ask():
    async with draftwire.AsyncClient("127.0.0.1:1") as client:
        try:
            await client.generate([{{"role": "user", "content": "a"}}], logprobs=1)
        except draftwire.DraftwireError as error:
            refused(error)

asyncio.run(ask())
for name in draftwire.__all__:
    getattr(draftwire, name)
said.append("grpc" in sys.modules)
print(json.dumps([said, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""
    said, loaded = python(code)
    assert said == [False, True, True, True]
    assert not SERVICE_DEPENDENCIES & set(loaded)


def test_top_package_lists_what_it_has() -> None:
    assert set(draftwire.__all__) <= set(dir(draftwire))
    assert all(getattr(draftwire, name) is not None for name in draftwire.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = draftwire.nothing_like_it


def test_gateway_runs_without_torch_and_leaves_it_alone_where_it_is_installed() -> None:
    """Its image has none. A tokenizer travels as it does between verifier and gateway."""
    code = """
import asyncio, json, sys
from draftwire_gateway import launch
from draftwire_gateway.config import GatewayConfig
asyncio.run = lambda coroutine: coroutine.close() or 7
status = launch.serve(GatewayConfig())
import transformers
from draftwire.models.tokenizer import load_tokenizer, tokenizer_files
from transformers import AutoTokenizer
tokenizer = load_tokenizer(tokenizer_files(AutoTokenizer.from_pretrained("models/target")))
text = tokenizer.decode(tokenizer("def f(x):")["input_ids"])
print(json.dumps([status, text, sys.modules["torch"], transformers.is_torch_available()]))
"""
    assert python(code, may_complain=False) == [7, "def f(x):", None, False]
