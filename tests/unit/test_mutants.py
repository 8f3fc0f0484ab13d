"""The lists of mistakes that `python -m tests.mutants` plants: each fits the sources, and some test can see it."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, load_mutants
from tests.mutants.__main__ import Result, Workers
from tests.mutants.selection import ImportGraph, Wave
from tests.mutants.trees import Outcome

LEAST, LEAST_NEW = 80, 20
PACKAGES = (
    "draftwire/audit",
    "draftwire/checking",
    "draftwire/cli",
    "draftwire/client",
    "draftwire/drafting",
    "draftwire/models",
    "draftwire/training",
    "draftwire/verification",
    "draftwire/engine",
    "draftwire/engine/ranks",
    "draftwire/method",
    "draftwire/requests",
    "draftwire/runtime",
    "services/drafter/draftwire_drafter",
    "services/gateway/draftwire_gateway/auth",
    "services/gateway/draftwire_gateway/http",
    "services/gateway/draftwire_gateway/peers",
    "services/gateway/draftwire_gateway/playground",
    "services/gateway/draftwire_gateway/session",
    "services/gateway/draftwire_gateway/text",
    "services/verifier/draftwire_verifier",
)
MUTANTS = load_mutants()


@cache
def source_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_there_are_enough_mutants_and_enough_of_new_kinds() -> None:
    assert len(MUTANTS) >= LEAST
    assert sum(mutant.new for mutant in MUTANTS) >= LEAST_NEW


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_no_mutant_is_planted_twice() -> None:
    planted = Counter((mutant.file, mutant.planted(source_of(mutant.file))) for mutant in MUTANTS)
    assert max(planted.values()) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_a_mutant_of_a_new_kind(package: str) -> None:
    assert any(mutant.new and Path(mutant.file).parent == Path(package) for mutant in MUTANTS)


def fault_of(mutant: Mutant) -> str:
    """Returns what is wrong with a mutant; empty if nothing is."""
    try:
        planted = mutant.planted(source_of(mutant.file))
        if mutant.file.endswith(".py"):
            compile(planted, mutant.file, "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    return "" if mutant.name.isidentifier() and mutant.origin else f"{mutant.name}: no name or no origin"


def test_each_mutant_fits_its_source_and_compiles() -> None:
    assert list(filter(None, map(fault_of, MUTANTS))) == []


def test_some_unit_test_is_selected_for_each_file() -> None:
    graph = ImportGraph(ROOT)
    for file in sorted({mutant.file for mutant in MUTANTS}):
        waves = graph.waves(file)
        assert waves, file
        assert waves[0].name == "nearest", file
        assert all((ROOT / test).exists() for wave in waves for test in wave.files)


def test_tests_that_are_named_exist_and_come_first() -> None:
    named = [mutant for mutant in MUTANTS if mutant.noticed_by]
    assert named
    assert all((ROOT / mutant.noticed_by).is_file() for mutant in named)
    workers = Workers.__new__(Workers)
    workers._graph, workers._serves = ImportGraph(ROOT), False
    first, second, *_ = workers.waves(named[0])
    assert (first, second.name) == (Wave("named", (named[0].noticed_by,)), "nearest")


def test_what_a_mutant_replaces_must_be_there_once() -> None:
    mutant = Mutant("one", "any.py", find="a < b", replace="a <= b", origin="review")
    assert mutant.planted("if a < b:") == "if a <= b:"
    with pytest.raises(ValueError, match="0 times"):
        mutant.planted("if a > b:")
    with pytest.raises(ValueError, match="2 times"):
        mutant.planted("a < b or a < b")
    with pytest.raises(ValueError, match="changes nothing"):
        Mutant("two", "any.py", find="a", replace="a", origin="review").planted("a")


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def test_nearest_tests_come_first_and_types_alone_do_not_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "services/one/draftwire_one/pool.py": "",
            "services/one/draftwire_one/loop.py": "from draftwire_one.pool import (\n    Pool,\n)\n",
            "draftwire/typed.py": "if TYPE_CHECKING:\n    from draftwire_one.pool import Pool\nimport os\n",
            "draftwire/stack.py": 'COMMAND = ["-m", "draftwire_one"]\n',
            "services/one/draftwire_one/__main__.py": "import draftwire_one.loop\n",
            "tests/unit/fakes.py": "def make():\n    from draftwire_one import pool\n",
            "tests/unit/test_pool.py": "import draftwire_one.pool\n",
            "tests/unit/test_fakes.py": "from fakes import make\n",
            "tests/unit/test_loop.py": "from draftwire_one.loop import Loop\n",
            "tests/unit/test_typed.py": "from draftwire.typed import Typed\n",
            "tests/served/conftest.py": "from draftwire.stack import Stack\n",
            "tests/served/test_all.py": "def test() -> None: ...\n",
        },
    )
    waves = ImportGraph(tmp_path).waves("services/one/draftwire_one/pool.py")
    assert [(wave.name, wave.files) for wave in waves] == [
        ("nearest", ("tests/unit/test_pool.py",)),
        ("unit", ("tests/unit/test_fakes.py", "tests/unit/test_loop.py")),
        ("served", ("tests/served/test_all.py",)),
    ]


class FakeTree:
    """Of whose two tests one always fails, and the other only the first time."""

    def __init__(self) -> None:
        self.failing = ["t.py::fails_by_chance", "t.py::fails"]

    def run(self, files: tuple[str, ...], limit_s: float, *, only: list[str] = (), deselect: list[str] = ()) -> Outcome:  # type: ignore[assignment]
        if "t.py::fails_by_chance" in only:
            return Outcome()
        return Outcome(tuple(test for test in self.failing if test not in deselect)[:1])


def test_test_that_fails_by_chance_does_not_count() -> None:
    workers = Workers.__new__(Workers)
    workers._is_over = False
    result = workers._run_wave(FakeTree(), Wave("unit", ("t.py",)), [], Result("mutant", "file", 0.0))  # type: ignore[arg-type]
    assert (result.caught_by, result.is_test) == ("t.py::fails", True)
