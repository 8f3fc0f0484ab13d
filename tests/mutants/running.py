"""Runs tests in a fork of this process, which may have a mistake in a module. No file is changed.

The libraries that tests import are imported here once, which takes longer than most tests; the packages are not.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType

import pytest

from tests.mutants import ROOT, Planted

LIBRARIES = (
    "grpc.aio",
    "hypothesis",
    "llguidance.hf",
    "scipy.stats",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
TEST_SECONDS = 60
"""How long one test may take: a mistake may make it wait for ever."""
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of some tests."""

    failed: tuple[str, ...] = ()
    """Names of those that failed."""
    trouble: str = ""
    """Why they did not run, or not to their end; empty if they did."""


def import_libraries() -> None:
    """Imports what tests import, with one thread each. Once, before tests are run."""
    sys.dont_write_bytecode = False  # nothing is compiled for each mistake anew
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in LIBRARIES:
        importlib.import_module(name)


def run_tests(
    tests: Sequence[str], limit_s: float, *, planted: Planted | None = None, only: Collection[str] | None = None
) -> Outcome:
    """Runs tests, in this order.

    Args:
        tests: files, or functions in files.
        limit_s: how long all of them may take.
        planted: a mistake, with which the first test that fails ends the run. Without it, all tests run.
        only: the names of those that are run; None runs all.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(tests, planted, only, sender))
    process.start()
    assert process.pid is not None
    sender.close()
    try:
        process.join(limit_s)
        failed = tuple(_received(receiver))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if process.exitcode in (0, 1):  # all passed, or some failed
        return Outcome(failed)
    is_late = process.exitcode == -signal.SIGKILL
    return Outcome(failed, f"no end within {limit_s:g} s" if is_late else f"pytest ended with {process.exitcode}")


def _received(receiver: Connection) -> Iterator[str]:
    with suppress(EOFError):
        while receiver.poll():
            yield receiver.recv()


def _run(tests: Sequence[str], planted: Planted | None, only: Collection[str] | None, sender: Connection) -> None:
    os.setsid()  # so that all that a test starts can be ended
    os.chdir(ROOT)
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), descriptor)
    if planted is not None:
        _plant(planted)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--timeout={TEST_SECONDS}"]
    options += ["-x"] if planted else []
    status = pytest.main([*options, *tests], plugins=[_Watcher(sender, only)])
    os._exit(status)  # whatever threads there still are


def _plant(planted: Planted) -> None:
    """Lets a module, which nobody has imported yet, have another source."""
    assert not any(name.startswith("draftwire") for name in sys.modules)
    load = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == str(planted.path):
            return compile(planted.source, self.path, "exec", dont_inherit=True)
        return load(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class _Watcher:
    """A plugin of pytest."""

    def __init__(self, sender: Connection, only: Collection[str] | None) -> None:
        self._sender, self._only = sender, only

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._only is not None:
            items[:] = [item for item in items if item.nodeid in self._only]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._sender.send(report.nodeid)
