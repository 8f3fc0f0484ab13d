"""The lists of mistakes that `python -m tests.mutants` plants: each is found in the sources, wherever they are."""

import ast
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import FOLDER, ROOT, Mutant, Planted, __main__, load_mutants
from tests.mutants.__main__ import NO_COMMIT, Result, commit_of, nearest_tests, run_mutant, share_of, without_unreliable
from tests.mutants.places import PACKAGES, Sources
from tests.mutants.running import Outcome

MUTANTS = load_mutants()
SOURCE = '''\
"""A module."""


class Rule:
    """A rule."""

    async def decide(self, first, rest):
        """Decides."""
        if first:
            await self.note(  # twice
                first,
                [*rest, 'ä'],
            )
            self.count = 1 - (first  + rest)
        return first + rest


def decide(first):
    return first
'''


@cache
def sources() -> Sources:
    return Sources(ROOT)


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def planted_into(root: Path, find: str, write: str, where: str = "Rule.decide") -> str:
    return Mutant("one", where, find, write, "tests/unit/test_mutants.py").planted(Sources(root)).source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"draftwire/rules/rule.py": SOURCE})
    return tmp_path


# The lists


def fault_of(mutant: Mutant) -> str:
    """Returns what is wrong with a mutant; empty if nothing is."""
    try:
        ast.parse(mutant.planted(sources()).source)
        if ast.dump(ast.parse(mutant.find)) == ast.dump(ast.parse(mutant.write)):
            return f"{mutant.name} changes nothing"
    except (ValueError, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    file, _, function = mutant.test.partition("::")
    if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text():
        return f"{mutant.name}: there is no test {mutant.test}"
    return "" if mutant.name.isidentifier() else f"{mutant.name} is no name"


def test_each_mutant_is_found_once_changes_its_source_and_names_a_test() -> None:
    assert list(filter(None, map(fault_of, MUTANTS))) == []


def test_names_are_unique_and_no_mistake_is_planted_twice() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert max(Counter(mutant.planted(sources()) for mutant in MUTANTS).values()) == 1


def test_no_list_names_a_source_file() -> None:
    assert all(not re.search(r"\.py\b", mutant.where + mutant.find) for mutant in MUTANTS)
    assert all("draftwire/" not in path.read_text() for path in FOLDER.glob("*.toml"))


@pytest.mark.slow
def test_move_of_a_file_edits_no_mutant(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.html", "*.js")
        )
    moves = {
        "draftwire/verification/blocks.py": "draftwire/verification/batches.py",
        "draftwire/verification/deciding.py": "draftwire/method/decisions/steps.py",
        "services/drafter/draftwire_drafter/engine.py": "services/drafter/draftwire_drafter/torch/work.py",
    }
    for source, target in moves.items():
        (tmp_path / target).parent.mkdir(exist_ok=True)
        (tmp_path / source).rename(tmp_path / target)
    elsewhere, found = Sources(tmp_path), set()
    for mutant in MUTANTS:
        before, after = mutant.planted(sources()), mutant.planted(elsewhere)
        assert before.source == after.source
        found.add(str(after.path.relative_to(tmp_path)))
    assert found >= set(moves.values())


# How a place is found


@pytest.mark.parametrize(
    ("find", "write", "expected"),
    [
        ('self.note(first, [*rest, "ä"])', "self.note", "            await (self.note)\n"),
        ("1 - (first + rest)", "first if rest else 0", "            self.count = (first if rest else 0)\n"),
        ("await self.note(first, [*rest, 'ä'])", "pass", "        if first:\n            pass\n"),
        ("return first + rest", "for one in rest:\n    first += one\nreturn first", "        return first\n"),
    ],
    ids=["expression", "operators", "statement", "statements"],
)
def test_code_is_found_in_any_formatting(root: Path, find: str, write: str, expected: str) -> None:
    source = planted_into(root, find, write)
    ast.parse(source)
    assert expected in source
    assert source.endswith("\n\ndef decide(first):\n    return first\n")


def test_operand_that_is_replaced_keeps_its_brackets(root: Path) -> None:
    source = planted_into(root, "self.note(first, [*rest, 'ä'])", "first or rest")
    assert "await (first or rest)" in source


@pytest.mark.parametrize(
    ("where", "find", "count"),
    [
        ("Rule.decide", "rest + first", "0 times, of 1 definitions"),
        ("Rule.decide", "first + rest", "2 times, of 1 definitions"),
        ("Rule.judge", "first + rest", "0 times, of 0 definitions"),
        ("Rule.decide", "self.count = 1\nreturn first + rest", "0 times, of 1 definitions"),
    ],
)
def test_code_that_is_not_there_just_once_is_an_error(root: Path, where: str, find: str, count: str) -> None:
    with pytest.raises(ValueError, match=rf"^one: `.*` is in {where} {count}$"):
        planted_into(root, find, "pass" if "\n" in find else "rest", where)


def test_module_is_named_only_where_a_name_is_not_unique(root: Path) -> None:
    write(root, {"services/one/draftwire_one/rule.py": SOURCE, "draftwire/rules/other.py": "def decide(first): ...\n"})
    with pytest.raises(ValueError, match="2 times, of 3 definitions"):
        planted_into(root, "return first", "return 1", "decide")
    for where in ("rules.rule.decide", "draftwire_one.rule.decide"):
        assert planted_into(root, "return first", "return 1", where).endswith("    return 1\n")
    with pytest.raises(ValueError, match="0 times, of 0 definitions"):
        planted_into(root, "return first", "return 1", "le.decide")


# Which are planted, and who notices


def test_share_is_chosen_by_the_commit_and_all_have_their_turn() -> None:
    commits = [f"{number:040x}" for number in range(200)]
    shares = [{mutant.name for mutant in share_of(MUTANTS, 10, commit)} for commit in commits]
    assert {len(share) for share in shares} == {-(-len(MUTANTS) // 10)}
    assert shares[0] == {mutant.name for mutant in share_of(MUTANTS[::-1], 10, commits[0])}
    assert set.union(*shares) == {mutant.name for mutant in MUTANTS}
    assert len(share_of(MUTANTS, 1, NO_COMMIT)) == len(MUTANTS)


def test_outside_git_the_share_is_always_the_same(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == NO_COMMIT


def test_nearest_tests_import_the_module_its_own_first_then_the_shortest(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "services/one/draftwire_one/pool.py": "",
            "tests/unit/test_long.py": "from draftwire_one.pool import Pool  # the pool\n",
            "tests/unit/test_pool.py": "from draftwire_one.pool import Pool  # and much more than that\n",
            "tests/unit/test_other.py": "from draftwire_one.pools import Pool\n",
            "tests/contract/test_short.py": "from draftwire_one import pool\n",
        },
    )
    found = nearest_tests(tmp_path, tmp_path / "services/one/draftwire_one/pool.py")
    assert found == ["tests/unit/test_pool.py", "tests/contract/test_short.py", "tests/unit/test_long.py"]


def test_named_test_is_run_first_and_then_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[0]
    runs: list[list[str]] = []

    def run_tests(tests: list[str], limit_s: float, *, planted: Planted) -> Outcome:
        runs.append(tests)
        return outcomes[len(runs) - 1]

    monkeypatch.setattr(__main__, "run_tests", run_tests)
    planted = Planted(ROOT / "draftwire/method/rounds.py", "")
    outcomes = [Outcome((), "no end within 1 s"), Outcome(("t.py::fails",))]
    assert run_mutant(mutant, planted).caught_by == "t.py::fails"
    assert (runs[0], "tests/unit/test_rounds.py" in runs[1]) == ([mutant.test], True)
    runs, outcomes[1] = [], Outcome()
    result = run_mutant(mutant, planted)
    assert str(result).endswith("SURVIVED no end within 1 s")


def test_test_that_fails_without_a_mistake_too_notices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Result("one", 1.0, "t.py::fails"), Result("two", 1.0, "t.py::notices"), Result("three", 1.0)]

    def run_tests(tests: list[str], limit_s: float, *, only: set[str]) -> Outcome:
        assert (tests, only) == (["t.py"], {"t.py::fails", "t.py::notices"})
        return Outcome(("t.py::fails",))

    monkeypatch.setattr(__main__, "run_tests", run_tests)
    assert [result.caught_by for result in without_unreliable(results)] == ["", "t.py::notices", ""]
