"""Plugin of pytest that runs named tests alone, and writes the names of those that fail to a file, as they fail."""

import os
from pathlib import Path

import pytest

VARIABLE = "MUTANTS_REPORT"
"""Names the file of those that fail."""
ONLY = "MUTANTS_ONLY"
"""Names a file of the tests that are run, a name on each line; all are without it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not named. A name that no test has is passed over: some tests exist with a mistake only."""
    if ONLY not in os.environ:
        return
    names = set(Path(os.environ[ONLY]).read_text().splitlines())
    left_out = [item for item in items if item.nodeid not in names]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid in names]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(report.nodeid + "\n")
