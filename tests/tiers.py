"""Runs tiers of tests and says what they took: `python -m tests.tiers fast | test | slow | summary | table`.

A tier is some runs of pytest, one after the other: what starts no services in two workers, then what does. Of the
tests with services, half of the time is waiting, so that two workers take files in turn; those that are marked `alone`
use all cores by themselves. Where one or two of these fail, which a starved machine can do to processes and
browsers, they run again, alone; one that then passes is printed as flaky. Unit tests, and comparisons of distributions,
get no second run. Each tier leaves a report in `build/tests`; `summary` adds up those of `test` and `slow`, as CI does,
and fails where a tier took half as long again as it may, on a machine of the usual speed: shared ones are at times half
as fast, which no test can help. `table` prints the seconds of each file of each tier that has left reports; what it
printed last is in `tests/seconds.md`, from where a tier that has got too long is cut.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.report import million_loops_per_second

REPORTS = Path("build") / "tests"
NUM_SLOWEST = 10
USUAL_SPEED = 20.0
"""Million loops per second of Python, on each of two cores at once, of the machines that the budgets are for."""
TOLERANCE = 1.5
"""A tier that takes so many times what it may, on a slow machine in proportion, fails the summary."""
MOST_AGAIN = 2
"""So many failed tests of a run are run again; more are no accident."""
NEVER_AGAIN = ("law", "exact", "reproducib")
"""In the names of tests that compare distributions: what failed there by chance must be looked at."""
OUTCOMES = ("failed", "passed", "skipped", "error")

WITHOUT_SERVICES = ("tests/unit", "tests/contract")
LEAST_LISTED_S = 1.0
"""Files that take less are listed together."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    folders: tuple[str, ...]
    marks: str
    """Which of their tests run, as pytest's `-m` takes it."""
    num_workers: int = 2

    @property
    def has_services(self) -> bool:
        """Whether its tests start services, which those of a file share."""
        return self.folders != WITHOUT_SERVICES

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of pytest."""
        workers = ("-n", str(self.num_workers)) if self.num_workers > 1 else ()
        by_file = ("--dist", "loadfile") if workers and self.has_services else ()
        return (*self.folders, *workers, *by_file, "-m", self.marks)


@dataclass(frozen=True, slots=True)
class Tier:
    """What is run, one run of pytest after the other."""

    budget_s: float
    runs: tuple[Run, ...]


FAST = Run(WITHOUT_SERVICES, "not slow")
TIERS = {
    "fast": Tier(180.0, (FAST,)),
    "test": Tier(540.0, (FAST, Run(("tests/served",), "not slow"))),
    "slow": Tier(
        1400.0,
        (
            Run(WITHOUT_SERVICES, "slow and not evidence"),
            Run(("tests/served", "tests/slow"), "slow and not evidence and not alone"),
            Run(("tests/slow",), "slow and not evidence and alone", num_workers=1),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a tier."""

    tier: str
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    """Tests by outcome, of `OUTCOMES`."""
    slowest: list[tuple[float, str]] = field(default_factory=list)
    """Seconds and names of tests, setup and teardown included."""
    stacks: str = ""
    """How many stacks of services were started, in words."""
    flaky: list[str] = field(default_factory=list)
    """Tests that passed when they were run again."""
    slowness: float = 1.0
    """Usual speed over the machine's, before the tier and after it, at least 1."""

    @property
    def is_over_budget(self) -> bool:
        """Whether it took `TOLERANCE` times as long as it may."""
        return self.seconds > TOLERANCE * self.slowness * TIERS[self.tier].budget_s

    def __str__(self) -> str:
        tier = TIERS[self.tier]
        over = "  OVER BUDGET" if self.is_over_budget else ""
        flaky = "".join(f"\n  FLAKY: {name}" for name in self.flaky)
        slow = f", on a machine {self.slowness:.1f} times as slow as usual" if self.slowness > 1.0 else ""
        return f"{self.tier:5} {self.seconds:7.1f} s of {tier.budget_s:g} s{slow}; {self.stacks}{over}{flaky}"


def run_tier(name: str, extra: Sequence[str]) -> int:
    """Runs a tier, prints its report and keeps it.

    Args:
        name: of the tier.
        extra: arguments for each run of pytest.

    Returns:
        The exit status of the first run of pytest that failed, also when what failed was run again, or 0. Later runs
        are made all the same.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    # Tests start hundreds of processes: nothing is compiled for each anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    speed = _speed_of_two_cores()
    started, statuses, files, again = time.monotonic(), [], [], []
    for number, run in enumerate(TIERS[name].runs):
        files.append(REPORTS / f"{name}-{number}.xml")
        # Of the tests that failed, a run of its own; `cache_dir` remembers them.
        kept = ("-o", f"cache_dir={REPORTS / f'{name}-{number}-cache'}")
        command = [sys.executable, "-m", "pytest", *run.arguments, *kept, "--cache-clear", *extra]
        statuses.append(_run([*command, f"--junitxml={files[-1]}"], environment))
        if statuses[-1] == 1 and deserves_another_run(run, files[-1]):
            again.append(REPORTS / f"{name}-{number}-again.xml")
            alone = replace(run, num_workers=1).arguments
            selected = [sys.executable, "-m", "pytest", *alone, *kept, "--lf", "--lfnf=none"]
            statuses[-1] = _run([*selected, f"--junitxml={again[-1]}"], environment)
    report = read_report(name, time.monotonic() - started, files, again)
    speed = (speed + _speed_of_two_cores()) / 2
    report = replace(report, slowness=max(1.0, USUAL_SPEED / speed))
    (REPORTS / f"{name}.json").write_text(json.dumps(asdict(report)))
    print_slowest([report])
    print(report, flush=True)
    return next((status for status in statuses if status), 0)


def _speed_of_two_cores() -> float:
    """Returns the mean speed of two processes at once, which is how tests run: two cores may be halves of one."""
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_speed_of_a_core, range(2))) / 2


def _speed_of_a_core(_process: int) -> float:
    return sum(million_loops_per_second() for _ in range(5)) / 5


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    print("$", *command[1:], flush=True)
    return subprocess.run(command, check=False, env=environment).returncode


def deserves_another_run(run: Run, file: Path) -> bool:
    """Whether what failed in a run of pytest may have failed because the machine was busy.

    Args:
        run: the run.
        file: its report.
    """
    failed = [name for name, _, outcome in _cases(file) if outcome in ("failure", "error")]
    is_law = any(word in name for name in failed for word in NEVER_AGAIN)
    return run.has_services and len(failed) <= MOST_AGAIN and not is_law


def _cases(file: Path) -> Iterator[tuple[str, float, str]]:
    """Yields name, seconds and outcome of each test of a run."""
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        tags = ("error", "failure", "skipped")
        outcome = next((tag for tag in tags if case.find(tag) is not None), "passed")
        yield name, float(case.get("time", 0.0)), outcome


def read_report(tier: str, seconds: float, files: Sequence[Path], again: Sequence[Path] = ()) -> Report:
    """Returns what runs of pytest wrote down.

    Args:
        tier: which one ran.
        seconds: how long it took.
        files: reports of its runs.
        again: reports of second runs of what had failed.
    """
    counts: Counter[str] = Counter()
    tests: list[tuple[float, str]] = []
    stacks: Counter[str] = Counter()
    second = {name: outcome for path in again for name, _, outcome in _cases(path)}
    for path in files:
        for name, took_s, outcome in _cases(path):
            tests.append((took_s, name))
            counts[second.get(name, outcome)] += 1
        for kind in ElementTree.parse(path).iter("property"):
            if str(kind.get("name")).startswith("stacks "):
                stacks[str(kind.get("name")).removeprefix("stacks ")] += int(kind.get("value", 0))
    counts["failed"] = counts.pop("failure", 0)
    started = ", ".join(f"{count} stacks {kind}" for kind, count in stacks.items())
    flaky = [name for name, outcome in second.items() if outcome == "passed"]
    return Report(tier, seconds, dict(counts), sorted(tests, reverse=True)[:NUM_SLOWEST], started, flaky)


def print_slowest(reports: Sequence[Report]) -> None:
    """Prints the slowest tests of some tiers."""
    print(f"the {NUM_SLOWEST} slowest tests:")
    for seconds, name in sorted((test for report in reports for test in report.slowest), reverse=True)[:NUM_SLOWEST]:
        print(f"  {seconds:6.1f} s  {name}")


def table(names: Sequence[str]) -> str:
    """Returns the seconds of each file in each tier that has left reports, as a table in Markdown; see `TIERS`."""
    seconds: dict[str, Counter[str]] = {}
    for name in names:
        counted = seconds.setdefault(name, Counter())
        for number in range(len(TIERS[name].runs)):
            for test, took_s, _ in _cases(REPORTS / f"{name}-{number}.xml"):
                counted[file_of(test)] += took_s
    total = sum(seconds.values(), Counter[str]())
    listed = [file for file, took_s in total.most_common() if took_s >= LEAST_LISTED_S]
    lines = [f"| file | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    rows = [(file, [seconds[name][file] for name in names]) for file in listed]
    rest = [sum(took_s for file, took_s in seconds[name].items() if file not in listed) for name in names]
    all_of = [sum(seconds[name].values()) for name in names]
    for label, row in [*rows, (f"{len(total) - len(listed)} others", rest), ("all", all_of)]:
        lines.append(f"| {label} | {' | '.join(f'{took_s:.1f}' if took_s else '' for took_s in row)} |")
    reports = [Report(**json.loads((REPORTS / f"{name}.json").read_text())) for name in names]
    return "\n".join([*lines, "", *(f"    {line}" for report in reports for line in str(report).splitlines())])


def file_of(test: str) -> str:
    """Returns the file of a test that a report names."""
    path = test.partition("::")[0].split("/")
    last = next(index for index, part in enumerate(path) if part.startswith("test_"))
    return "/".join(path[: last + 1]) + ".py"


def summarize(names: Sequence[str]) -> int:
    """Prints what tiers took that were run before, and last a line as pytest ends with; returns an exit status."""
    reports = [Report(**json.loads((REPORTS / f"{name}.json").read_text())) for name in names]
    print_slowest(reports)
    for report in reports:
        print(report)
    print(summary_line(reports), flush=True)
    has_failed = any(report.counts.get(outcome) for report in reports for outcome in ("failed", "error"))
    return int(has_failed or any(report.is_over_budget for report in reports))


def summary_line(reports: Sequence[Report]) -> str:
    """Returns the line that one run of pytest over all these tests would end with."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.counts)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])
    return f" {outcomes or 'no tests ran'} in {sum(report.seconds for report in reports):.2f}s ".center(80, "=")


def main() -> int:
    """Runs a tier, or sums up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tier", choices=[*TIERS, "summary", "table"])
    parser.add_argument("extra", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    if arguments.tier == "summary":
        return summarize(("test", "slow"))
    if arguments.tier == "table":
        print(table([name for name in ("test", "slow") if (REPORTS / f"{name}.json").exists()]))
        return 0
    return run_tier(arguments.tier, arguments.extra)


if __name__ == "__main__":
    sys.exit(main())
