"""Settings for all tests, and how many stacks of services a run has started."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from draftwire.models.openvino import runtime

collect_ignore = ["clients"]
"""Of an environment of its own: `make test-clients`."""

# Read when torch is imported: idle torch threads must sleep, for the tests start more processes than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# And one thread each: processes that take two threads on two cores run fifty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Services of tests run our own decoder, which starts in half the time, where a test does not say otherwise.
for service in ("VERIFIER", "DRAFTER"):
    os.environ.setdefault(f"DRAFTWIRE_{service}_ENGINE", "draftwire")

# The same examples in every run, however busy the machine is; `--hypothesis-profile=random` looks for others.
settings.register_profile("random", deadline=None, print_blob=True)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

pytest_plugins = ["tests.stacks"]

SLOW = Path(__file__).parent / "slow"
STARTED = {"in one process": 0, "as processes": 0}
"""Stacks that this run has started, on all its workers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in `tests/slow`, and what is evidence: nobody who leaves out slow tests wants it."""
    for item in items:
        if SLOW in item.path.parents or item.get_closest_marker("evidence"):
            item.add_marker(pytest.mark.slow)


why_no_openvino = runtime.why_not_here
"""Why tests of OpenVINO are skipped; empty if they are not."""


@pytest.fixture(scope="session", autouse=True)
def _models_are_run_by_our_own_decoder() -> None:
    """But in tests of OpenVINO, which put the real function in its place."""
    runtime.why_not_here = lambda: "tests choose it themselves"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a test sets are gone after it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture(scope="session", autouse=True)
def _processes_are_counted() -> None:
    from draftwire.cli.local_stack import LocalStack

    started = LocalStack.start

    def start(self: LocalStack) -> None:
        STARTED["as processes"] += 1
        started(self)

    LocalStack.start = start  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Counts the stacks of this process, for the controller if this is a worker, else for the report."""
    in_process = sys.modules.get("tests.in_process")
    if in_process is not None:
        STARTED["in one process"] += in_process.InProcessStack.num_started
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["stacks"] = STARTED
        return
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "add_global_property"):
            for kind, count in STARTED.items():
                plugin.add_global_property(f"stacks {kind}", str(count))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what a worker has started."""
    for kind, count in getattr(node, "workeroutput", {}).get("stacks", {}).items():
        STARTED[kind] += count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts."""
    counts = ", ".join(f"{count} {kind}" for kind, count in STARTED.items())
    terminalreporter.write_line(f"stacks started: {counts}")
