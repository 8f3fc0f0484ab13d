"""Copies of the working tree, in which mistakes are planted and tests are run. The tree itself is never touched."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.mutants import ROOT, Mutant
from tests.mutants.reporter import ONLY, VARIABLE

TEST_SECONDS = 60
"""How long one test may take: a mistake may make it wait for ever."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process of pytest said."""

    failed: tuple[str, ...] = ()
    """Names of the tests that failed, or of what could not be collected."""
    crash: str = ""
    """How the process ended, if it did not end as pytest does."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed."""
        return not self.failed and not self.crash


class Tree:
    """One copy. For one thread."""

    def __init__(self, folder: Path) -> None:
        """Copies what git knows and what it does not ignore."""
        self.root, self._scratch = folder / "tree", folder / "scratch"
        self._stamps = count(1)
        self._original = b""
        self._modified_ns = 0
        self._process: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and os.path.lexists(ROOT / name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)

    def plant(self, mutant: Mutant) -> None:
        """Plants a mistake; `restore` comes after."""
        path = self.root / mutant.file
        self._original, self._modified_ns = path.read_bytes(), path.stat().st_mtime_ns
        path.write_bytes(mutant.planted(self._original.decode()).encode())
        modified_ns = self._modified_ns + next(self._stamps) * 10**9
        os.utime(path, ns=(modified_ns, modified_ns))  # never the time of a version that was compiled before

    def restore(self, mutant: Mutant) -> None:
        """Takes the mistake out again."""
        path = self.root / mutant.file
        path.write_bytes(self._original)
        os.utime(path, ns=(self._modified_ns, self._modified_ns))

    def run(
        self,
        files: Sequence[str],
        limit_s: float,
        *,
        only: Sequence[str] | None = None,
        deselect: Sequence[str] = (),
        to_the_end: bool = False,
    ) -> Outcome:
        """Runs tests in this order.

        Args:
            files: of tests.
            limit_s: how long all of them may take.
            only: the tests of these files that are run; None runs all.
            deselect: tests that are left out.
            to_the_end: whether to go on after the first failure.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        report, names = self._scratch / "failed", self._scratch / "only"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.reporter"]
        command += ["-m", "not slow", f"--timeout={TEST_SECONDS}", f"--basetemp={self._scratch / 'tmp'}"]
        command += [] if to_the_end else ["-x"]
        command += [f"--deselect={test}" for test in deselect]
        paths = os.pathsep.join(str(path) for path in (self.root, *sorted((self.root / "services").iterdir())))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", VARIABLE: str(report)}
        if only is not None:
            names.write_text("\n".join(only))
            environment[ONLY] = str(names)
        with (self._scratch / "output").open("wb") as output:
            process = self._process = subprocess.Popen(
                [*command, *files],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end_session(process)
        self._process = None
        failed = tuple(report.read_text().splitlines()) if report.exists() else ()
        if status is None:
            return Outcome(failed, f"no end within {limit_s:g} s")
        # 0: all passed, 1: some failed, 2: some could not be collected, 5: none was selected
        is_usual = status in (0, 5) or (status in (1, 2) and bool(failed))
        return Outcome(failed, "" if is_usual else f"pytest ended with {status}")

    def stop(self) -> None:
        """Ends what runs. May be called on any thread."""
        process = self._process
        if process is not None:
            _end_session(process)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills what a run has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
