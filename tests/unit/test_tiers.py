"""The report of a tier says what pytest said."""

import subprocess
import sys
from pathlib import Path

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


def test_tier_that_takes_half_as_long_again_as_it_may_fails_the_summary(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tiers, "REPORTS", tmp_path)
    limit = tiers.TOLERANCE * tiers.TIERS["test"].budget_s
    for seconds, counts, status in (
        (limit, {"passed": 3}, 0),
        (limit + 1.0, {"passed": 3}, 1),
        (1.0, {"passed": 2, "failed": 1}, 1),
        (1.0, {"passed": 2, "error": 1}, 1),
    ):
        (tmp_path / "test.json").write_text(tiers.json.dumps(tiers.asdict(Report("test", seconds, counts))))
        assert tiers.summarize(["test"]) == status, (seconds, counts)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("=")
        assert f"in {seconds:.2f}s" in last
