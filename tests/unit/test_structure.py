"""Which part of the sources may import which: docs/decisions/0039. Read off the sources, so that nothing hides."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.imports import arrows, imported, is_in, packages, sources
from tests.path import OPTIONS, ROOTS, imports_of, option_of, options_in

SERVICES = ("draftwire_drafter", "draftwire_verifier", "draftwire_gateway")
MAY_IMPORT_SERVICES = ("draftwire.cli",)
"""The command line starts services. The library is what they are made of, and knows none."""

LAYERS = (
    ("draftwire.cli",),
    SERVICES,
    ("draftwire.training", "draftwire.checking"),
    ("draftwire.options",),
    ("draftwire.engine", "draftwire.client"),
    ("draftwire.runtime", "draftwire.audit", "draftwire.local_loop"),
    ("draftwire.drafting", "draftwire.verification"),
    ("draftwire.models",),
    ("draftwire.method",),
    ("draftwire.requests",),
    ("draftwire.v1", "draftwire.errors", "draftwire.vllm"),
)
"""From the top. A part imports those below it, and none beside it."""

NOT_INSTALLED = frozenset({"benchmarks", "examples", "tests", "tools", "vllm_remote_drafter"})
"""What lies beside the package in the repository."""

FACADE = "draftwire"
"""Names what users import, which it loads when they ask for it. Others take its version from it."""

MAY_IMPORT_GRPC = (
    "draftwire_*.server",
    "draftwire_*.wire",
    "draftwire.runtime.*",
    "draftwire.options.*_messages",
    "draftwire.client.*",
    "draftwire.v1.*",
)
GRPC = ("grpc", "grpc_health", "grpc_reflection", "draftwire.v1")


def layer_of(module: str) -> tuple[int, str]:
    """Returns how far down a module is, and in which part."""
    found = [(number, part) for number, layer in enumerate(LAYERS) for part in layer if is_in(module, part)]
    assert len(found) == 1, f"{module} is in no layer"
    return found[0]


def wrong_arrows(found: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Returns the arrows that do not lead down."""
    wrong = []
    for module, targets in found.items():
        for target in sorted(set(targets) - {FACADE}):
            (own, part), (other, other_part) = layer_of(module), layer_of(target)
            if own > other or (own == other and part != other_part):
                wrong.append((module, target))
    return wrong


def circle_in(found: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns modules that import each other in turn; none if there are none."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def grpc_imports(source: str, package: str) -> list[str]:
    return [name for name in imported(source, package) if any(is_in(name, one) for one in GRPC)]


def test_arrows_lead_down_without_circles() -> None:
    found = arrows({name: source for name, source in sources().items() if name != FACADE})
    assert len(found) > 200
    assert "draftwire.verification.target" in found["draftwire_verifier.engine"], "what is imported is seen"
    assert wrong_arrows(found) == []
    assert circle_in(found) == []


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("draftwire.runtime.one", "from draftwire.engine import two", True),
        ("draftwire.engine.one", "import draftwire_verifier.two", True),
        ("draftwire_drafter.one", "def late():\n    from draftwire_verifier.two import Two", True),
        ("draftwire_drafter.one", "importlib.import_module('draftwire.cli.two')", True),
        ("draftwire.engine.one", "if TYPE_CHECKING:\n    from draftwire.training.two import Two", True),
        ("draftwire_verifier.one", "from draftwire.engine.two import Two", False),
        ("draftwire.engine.one", "from draftwire.engine.two import Two", False),
    ],
)
def test_arrow_that_leads_up_or_sideways_is_seen(module: str, line: str, is_wrong: bool) -> None:
    target = next(name for name in imported(line, module) if name.endswith(".two"))
    found = arrows({module: line, target: ""})
    assert wrong_arrows(found) == ([(module, target)] if is_wrong else [])


def test_library_imports_no_service() -> None:
    own = {name: found for name, found in arrows(sources()).items() if not any(is_in(name, one) for one in SERVICES)}
    users = {name for name, found in own.items() if any(is_in(other, one) for other in found for one in SERVICES)}
    assert users, "what is imported is seen"
    assert [name for name in users if not any(is_in(name, one) for one in MAY_IMPORT_SERVICES)] == []


def test_path_of_a_round_knows_no_option() -> None:
    assert options_in(imports_of(ROOTS)) == []
    assert {option_of(name) for name in sources()} == {*OPTIONS, None}, "each has modules"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("root", ROOTS)
def test_option_that_the_path_imports_is_named(root: str, option: str) -> None:
    module = next(name for name in sorted(sources()) if option_of(name) == option and name not in packages())
    late = f"def late():\n    import {module}\n"
    assert f"{option}: {module} <- {root}" in options_in(imports_of([root], {root: late}))


def test_nothing_that_is_installed_imports_what_is_not() -> None:
    tops = {name: {other.partition(".")[0] for other in imported(source, name)} for name, source in sources().items()}
    assert [name for name, found in tops.items() if found & NOT_INSTALLED] == []


def test_circle_is_seen() -> None:
    ring = {"draftwire.method.a": "from . import b", "draftwire.method.b": "def late(): from draftwire.method import a"}
    assert set(circle_in(arrows(ring))) == set(ring)


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
    users = {name for name, source in sources().items() if grpc_imports(source, name.rpartition(".")[0])}
    assert {"draftwire_drafter.wire", "draftwire_verifier.server", "draftwire_gateway.peers.wire"} <= users
    assert [name for name in users if not any(fnmatchcase(name, edge) for edge in MAY_IMPORT_GRPC)] == []


# Names

OF_EACH_SERVICE = frozenset(
    {"config", "core", "engine", "launch", "metrics", "scheduler", "server", "spans", "wire", "__init__", "__main__"}
)
"""Files that services have alike, of the same kind in each."""
TWINS = frozenset({"Completed", "Scheduler", "Step", "StepItem", "StepResult"})
"""What both schedulers call theirs."""


def defined(source: str) -> Iterator[str]:
    """Yields the classes of a module, and what it gives a name of a class; type variables are nobody's name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper() and "TypeVar" not in ast.unparse(node.value):
                yield name


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1 and not name.startswith("_")}


def test_each_name_of_a_file_or_class_is_there_once() -> None:
    """So that whoever looks for one finds the one that is meant."""
    own = {name: source for name, source in sources().items() if not is_in(name, "draftwire.v1")}
    packages = {name.rpartition(".")[0] for name in own}
    files = [name.rpartition(".")[2] for name in own if name not in packages]
    assert repeated(files) <= OF_EACH_SERVICE
    assert repeated(name for source in own.values() for name in defined(source)) == TWINS


def test_second_class_of_a_name_is_seen() -> None:
    others = ["Ab = int | str", 'Ab = TypeVar("Ab")', "AB = 3", "class _B: ...", "class _B: ..."]
    assert repeated(name for source in ["class Ab: ...", *others] for name in defined(source)) == {"Ab"}
    assert repeated(name for source in others for name in defined(source)) == set()
