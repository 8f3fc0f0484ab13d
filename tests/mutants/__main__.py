"""Plants the mistakes of the lists, one at a time, and shows which test notices each: `python -m tests.mutants`.

A test counts only if it fails with the mistake a second time, alone, and passes without: those that noticed one are run
again on a copy without any. What was noticed by a test that fails there too is planted again, and that test left out.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import ROOT, Mutant, load_mutants
from tests.mutants.selection import ImportGraph, Wave
from tests.mutants.trees import Tree

LIMITS_S = {"named": 600.0, "nearest": 240.0, "unit": 900.0, "served": 1200.0}
"""How long each wave may take: several times as long as it does without a mistake."""
CHECK_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant."""

    name: str
    file: str
    seconds: float
    caught_by: str = ""
    """The test that failed, or how pytest ended; empty if the mistake survived."""
    is_test: bool = False
    """Whether `caught_by` names a test, which is then run without the mistake too."""
    at_import: bool = False
    """Whether a test could not even be imported."""

    def __str__(self) -> str:
        how = f"at import of {self.caught_by}" if self.at_import else self.caught_by or "SURVIVED"
        return f"{self.name:48} {self.file:44} {self.seconds:6.1f} s  {how}"


class Workers:
    """Copies of the tree, each used by one thread at a time."""

    def __init__(self, folder: Path, count: int, *, serves: bool) -> None:
        """Makes the copies.

        Args:
            folder: for them.
            count: how many.
            serves: whether tests that start services are run too.
        """
        self._serves = serves
        self._all = [Tree(folder / str(number)) for number in range(count)]
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        for tree in self._all:
            self._trees.put(tree)
        self._graph = ImportGraph(ROOT)
        self._threads = ThreadPoolExecutor(count)
        self._is_over = False

    def stop(self) -> None:
        """Ends what runs, and starts nothing more."""
        self._is_over = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for tree in self._all:
            tree.stop()
        self._threads.shutdown()

    def run_all(self, mutants: Sequence[Mutant], unreliable: Sequence[str]) -> list[Result]:
        """Plants mistakes, prints a line for each, and returns what became of them."""
        results = []
        for result in self._threads.map(lambda mutant: self._run(mutant, unreliable), mutants):
            print(result, flush=True)
            results.append(result)
        return results

    def failing(self, files: Sequence[str], only: Sequence[str] | None = None) -> set[str]:
        """Returns which tests of some files, or of a few of them, fail without any mistake: all if pytest fails."""
        tree = self._trees.get()
        try:
            outcome = tree.run(files, CHECK_SECONDS, only=only, to_the_end=True)
        finally:
            self._trees.put(tree)
        return set(only or files) if outcome.crash else set(outcome.failed)

    def waves(self, mutant: Mutant) -> list[Wave]:
        """Returns the tests that can notice a mistake."""
        waves = [wave for wave in self._graph.waves(mutant.file) if self._serves or wave.name != "served"]
        return [Wave("named", (mutant.noticed_by,)), *waves] if mutant.noticed_by else waves

    def _run(self, mutant: Mutant, unreliable: Sequence[str]) -> Result:
        tree, started = self._trees.get(), time.monotonic()
        result = Result(mutant.name, mutant.file, 0.0)
        tree.plant(mutant)
        try:
            for wave in self.waves(mutant):
                result = self._run_wave(tree, wave, unreliable, result)
                if result.caught_by or self._is_over:
                    break
        finally:
            tree.restore(mutant)
            self._trees.put(tree)
        return replace(result, seconds=time.monotonic() - started)

    def _run_wave(self, tree: Tree, wave: Wave, unreliable: Sequence[str], result: Result) -> Result:
        """Runs tests until one fails twice, and tells which."""
        left_out = list(unreliable)
        while not self._is_over:
            outcome = tree.run(wave.files, LIMITS_S[wave.name], deselect=left_out)
            if not outcome.failed:
                return replace(result, caught_by=outcome.crash and f"{outcome.crash} in the {wave.name} tests")
            first = outcome.failed[0]
            if not tree.run([file_of(first)], LIMITS_S[wave.name], only=[first]).is_clean:
                return replace(result, caught_by=first, is_test=True, at_import="::" not in first)
            left_out.append(first)
        return result


def file_of(test: str) -> str:
    """Returns the file in which a test is; files are in themselves."""
    return test.partition("::")[0]


def _chosen(names: Sequence[str]) -> list[Mutant]:
    mutants = load_mutants()
    unknown = sorted(set(names) - {mutant.name for mutant in mutants})
    if unknown:
        sys.exit(f"there is no mutant {unknown[0]}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def _baseline(workers: Workers, mutants: Sequence[Mutant]) -> int:
    """Runs all tests that could notice any of the mistakes, without one, and says which fail."""
    files = dict.fromkeys(file for mutant in mutants for wave in workers.waves(mutant) for file in wave.files)
    failing = workers.failing(sorted(files))
    for test in sorted(failing):
        print(f"fails without a mistake: {test}")
    print(f"{len(files)} test files, {len(failing)} failures")
    return int(bool(failing))


def _report(workers: Workers, mutants: Sequence[Mutant], json_path: Path | None) -> int:
    started = time.monotonic()
    by_name: dict[str, Result] = {}
    unreliable: list[str] = []
    trusted: set[str] = set()
    waiting = list(mutants)
    while waiting:
        by_name |= {result.name: result for result in workers.run_all(waiting, unreliable)}
        unchecked = {result.caught_by for result in by_name.values() if result.is_test} - trusted
        files = sorted({file_of(test) for test in unchecked})
        failing = workers.failing(files, sorted(unchecked)) if unchecked else set()
        trusted |= unchecked - failing
        unreliable += sorted(failing & unchecked)
        waiting = [mutant for mutant in waiting if by_name[mutant.name].caught_by in failing & unchecked]
        for mutant in waiting:
            print(f"{mutant.name}: {by_name[mutant.name].caught_by} is unreliable: it fails without the mistake too")
    results = [by_name[mutant.name] for mutant in mutants]
    survivors = [result for result in results if not result.caught_by]
    at_import = sum(result.at_import for result in results)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    caught, seconds = len(results) - len(survivors), time.monotonic() - started
    print(f"{len(results)} mutants, {caught} caught, {len(survivors)} survived, {seconds:.0f} s")
    if at_import:
        print(f"{at_import} of them were caught at import, which any test does")
    if survivors:
        print("survived:", ", ".join(result.name for result in survivors))
    return int(bool(survivors))


def main() -> int:
    """Returns the exit status: 1 if a mistake was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant mistakes; see who notices.")
    parser.add_argument("names", nargs="*", help="mutants; without any, all of the lists")
    parser.add_argument("--workers", type=int, default=2, help="copies of the tree that are used at the same time")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--baseline", action="store_true", help="run all of these tests once without a mistake")
    parser.add_argument("--fast", action="store_true", help="unit and contract tests alone")
    arguments = parser.parse_args()
    mutants = _chosen(arguments.names)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended as by Ctrl-C
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = Workers(Path(folder), arguments.workers, serves=not arguments.fast)
        try:
            return _baseline(workers, mutants) if arguments.baseline else _report(workers, mutants, arguments.json)
        finally:
            workers.stop()


if __name__ == "__main__":
    sys.exit(main())
