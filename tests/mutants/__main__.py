"""Plants the mistakes of the lists, one at a time, and shows which test notices each: `python -m tests.mutants`.

With `--share 10` a tenth of them is planted, chosen by the commit, as CI does. A mistake is caught if a test fails with
it that passes without: those that noticed one are run again without any.
"""

import argparse
import hashlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants import ROOT, Mutant, Planted, load_mutants
from tests.mutants.places import Sources, module_of
from tests.mutants.running import import_libraries, run_tests

LIMIT_S = 300.0
"""How long the tests that are tried at once may take: several times as long as they do."""
NEAREST = 8
"""So many test files that import a module are tried where the named test notices nothing."""
NO_COMMIT = "0" * 40


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant."""

    name: str
    seconds: float
    caught_by: str = ""
    """The test that failed; empty if the mistake survived."""
    trouble: str = ""
    """Why some tests said nothing."""

    def __str__(self) -> str:
        return f"{self.name:64} {self.seconds:6.1f} s  {self.caught_by or 'SURVIVED ' + self.trouble}"


def share_of(mutants: Sequence[Mutant], one_in: int, commit: str) -> list[Mutant]:
    """Returns one mutant in so many, which the hash of a commit chooses."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.blake2b(f"{commit} {mutant.name}".encode()).digest()

    chosen = sorted(mutants, key=place)[: -(-len(mutants) // one_in)]
    return [mutant for mutant in mutants if mutant in chosen]


def commit_of(root: Path) -> str:
    """Returns the hash of the commit that is checked out; zeros outside git."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else NO_COMMIT


def nearest_tests(root: Path, path: Path) -> list[str]:
    """Returns the test files that import a module: those named after it, and the shortest, first."""
    package, _, name = module_of(root, path).rpartition(".")
    found = []
    for test in sorted([*(root / "tests/unit").glob("test_*.py"), *(root / "tests/contract").glob("test_*.py")]):
        text = test.read_text()
        if f"{package}.{name} " in text or f"from {package} import {name}" in text:
            found.append((name not in test.name, len(text), str(test.relative_to(root))))
    return [test for _, _, test in sorted(found)[:NEAREST]]


def run_mutant(mutant: Mutant, planted: Planted) -> Result:
    """Returns which test notices a mistake: the one that the list names, or one of the nearest."""
    started, trouble = time.monotonic(), ""
    for tests in filter(None, ([mutant.test], nearest_tests(ROOT, planted.path))):
        outcome = run_tests(tests, LIMIT_S, planted=planted)
        if outcome.failed:
            return Result(mutant.name, time.monotonic() - started, outcome.failed[0])
        trouble = trouble or outcome.trouble
    return Result(mutant.name, time.monotonic() - started, trouble=trouble)


def without_unreliable(results: Sequence[Result]) -> list[Result]:
    """Returns results of which none is owed to a test that fails without a mistake too."""
    tests = {result.caught_by for result in results if result.caught_by}
    files = sorted({test.partition("::")[0] for test in tests})
    outcome = run_tests(files, LIMIT_S * len(files), only=tests)
    failing = tests if outcome.trouble else set(outcome.failed)
    trouble = "but for a test that fails without it too"
    return [replace(one, caught_by="", trouble=trouble) if one.caught_by in failing else one for one in results]


def _busy_s() -> float:
    """Returns for how long this process and those that ended were on a core: others may be there too."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Returns the exit status: 1 if a mistake was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant mistakes; see who notices.")
    parser.add_argument("names", nargs="*", help="mutants; without any, all of the lists")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one in N, chosen by the commit")
    arguments = parser.parse_args()
    mutants = load_mutants()
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        parser.error(f"there is no mutant {min(unknown)}")
    chosen = [mutant for mutant in mutants if not arguments.names or mutant.name in arguments.names]
    chosen = share_of(chosen, arguments.share, commit_of(ROOT))
    started, sources = time.monotonic(), Sources(ROOT)
    import_libraries()
    results = []
    for mutant in chosen:
        results.append(run_mutant(mutant, mutant.planted(sources)))
        print(results[-1], flush=True)
    checked = without_unreliable(results)
    survivors = [result for result in checked if not result.caught_by]
    for result in survivors:
        if result not in results:
            print(result)
    caught, took_s = len(results) - len(survivors), time.monotonic() - started
    print(f"{caught} mutants caught, {len(survivors)} survived, {took_s:.0f} s, {_busy_s():.0f} s of them on a core")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
