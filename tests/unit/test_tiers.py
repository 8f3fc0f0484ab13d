"""The report of a tier says what pytest said."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import tiers
from tiers import Report, read_report, summary_line

TESTS = """
def test_passes(): pass
def test_fails(): assert False
import pytest
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_has_an_error(broken): pass
"""


def test_report_counts_outcomes_and_names_the_slowest(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    file = tmp_path / "one.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", "test_one.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    report = read_report("test", 1.0, [file])
    assert report.counts == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert {name.rpartition("::")[2] for _, name in report.slowest} >= {"test_passes", "test_fails"}
    assert summary_line([report, report]).strip("= ").startswith("2 failed, 2 passed, 2 skipped, 2 error in ")


def test_tier_that_takes_too_long_fails_the_summary(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tiers, "REPORTS", tmp_path)
    limit = tiers.TOLERANCE * tiers.TIERS["test"].budget_s
    for seconds, slowness, counts, status in (
        (limit, 1.0, {"passed": 3}, 0),
        (limit + 1.0, 1.0, {"passed": 3}, 1),
        (limit + 1.0, 1.5, {"passed": 3}, 0),
        (2 * limit, 1.5, {"passed": 3}, 1),
        (1.0, 1.0, {"passed": 2, "failed": 1}, 1),
        (1.0, 1.0, {"passed": 2, "error": 1}, 1),
    ):
        report = Report("test", seconds, counts, slowness=slowness)
        (tmp_path / "test.json").write_text(tiers.json.dumps(tiers.asdict(report)))
        assert tiers.summarize(["test"]) == status, (seconds, counts)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("=")
        assert f"in {seconds:.2f}s" in last


ONCE = """
import pathlib, pytest
def test_starts():
    mark = pathlib.Path("been-here")
    is_second = mark.exists()
    mark.touch()
    assert is_second
def test_law(): assert {law}
def test_passes(): pass
def test_fails(): assert {fails}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "fails", "status", "counts", "flaky"),
    [
        (True, True, 0, {"passed": 4, "failed": 0}, ["test_starts"]),
        (True, False, 1, {"passed": 3, "failed": 1}, ["test_starts"]),
        (False, True, 1, {"passed": 2, "failed": 2}, []),
    ],
)
def test_failures_of_processes_run_again_alone_but_laws_do_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    law: bool,
    fails: bool,
    status: int,
    counts: dict[str, int],
    flaky: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_one.py").write_text(ONCE.format(law=law, fails=fails))
    monkeypatch.setitem(tiers.TIERS, "test", tiers.Tier(60.0, (tiers.Run(("test_one.py",), "not slow", 1),)))
    assert tiers.run_tier("test", []) == status
    report = Report(**tiers.json.loads((tmp_path / tiers.REPORTS / "test.json").read_text()))
    assert {name: report.counts[name] for name in counts} == counts
    assert [name.rpartition("::")[2] for name in report.flaky] == flaky
    assert ("FLAKY" in capfd.readouterr().out) == bool(flaky)


def test_unit_tests_and_what_fails_in_many_places_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "one.xml"
    case = '<testcase classname="tests.served.test_x" name="test_{}" time="1"><failure/></testcase>'
    for count, folders, again in (
        (2, ("tests/served",), True),
        (2, tiers.WITHOUT_SERVICES, False),
        (3, ("tests/slow",), False),
    ):
        file.write_text(f"<testsuites>{''.join(map(case.format, range(count)))}</testsuites>")
        assert tiers.deserves_another_run(tiers.Run(folders, "slow"), file) == again


def test_table_has_the_seconds_of_each_file_in_each_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "REPORTS", tmp_path)
    case = '<testcase classname="tests.{}" name="test_x" time="{}"/>'
    seconds = {"test-0": [("unit.test_a", 2.25), ("unit.test_a.TestB", 1.0), ("unit.test_c", 0.25)], "test-1": []}
    seconds |= {"slow-0": [("unit.test_a", 0.5)], "slow-1": [("slow.test_d", 30.0)], "slow-2": []}
    for name, cases in seconds.items():
        (tmp_path / f"{name}.xml").write_text(
            f"<testsuites>{''.join(case.format(*each) for each in cases)}</testsuites>"
        )
    for tier in ("test", "slow"):
        (tmp_path / f"{tier}.json").write_text(tiers.json.dumps(tiers.asdict(Report(tier, 20.0))))
    assert tiers.table(["test", "slow"]).splitlines()[:6] == [
        "| file | test | slow |",
        "|---|---|---|",
        "| tests/slow/test_d.py |  | 30.0 |",
        "| tests/unit/test_a.py | 3.2 | 0.5 |",
        "| 1 others | 0.2 |  |",
        "| all | 3.5 | 30.5 |",
    ]


def test_each_test_runs_in_one_run_of_its_tier() -> None:
    """What is marked as nothing runs in `test`, what is slow in `slow`, there once, and evidence in neither."""
    for folder in ("tests/unit", "tests/contract", "tests/served", "tests/slow"):
        for marks in product((False, True), repeat=3):
            marked = dict(zip(("slow", "evidence", "alone"), marks, strict=True))
            marked["slow"] |= folder == "tests/slow" or marked["evidence"]  # as conftest.py marks them
            if marked["alone"] and folder != "tests/slow":
                continue
            for tier in ("test", "slow"):
                runs = [run for run in tiers.TIERS[tier].runs if folder in run.folders and eval(run.marks, marked)]
                assert len(runs) == (tier == ("slow" if marked["slow"] else "test") and not marked["evidence"])
