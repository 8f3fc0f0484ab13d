"""Plugin of pytest that writes the names of failed tests to a file, as they fail."""

import os
from pathlib import Path

import pytest

VARIABLE = "MUTANTS_REPORT"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(report.nodeid + "\n")
