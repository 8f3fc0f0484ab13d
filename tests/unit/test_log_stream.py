"""Standard error of a service takes whatever is written, whether it can be written or not."""

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from draftwire.runtime import log_stream
from draftwire.runtime.log_stream import WRITE_ERRORS, LogSink, guard_stderr
from draftwire.runtime.metrics import ServiceMetrics
from tests.unwritable_logs import Unwritable, unwritable


class Disk(io.RawIOBase):
    """A disk with so much room."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(28, "No space left on device")
        self.room -= len(taken)
        self.content += taken
        return len(taken)


class Stream:
    """A text stream, as far as it is looked at."""

    def __init__(self, disk: Disk) -> None:
        self.buffer = io.BufferedWriter(disk)


@pytest.fixture(autouse=True)
def _zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WRITE_ERRORS, "count", 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(log_stream.time, "monotonic", lambda: now[0])
    return now


def exported() -> float | None:
    return ServiceMetrics().registry.get_sample_value("draftwire:log_write_errors_total")


def test_what_does_not_fit_is_counted_and_left_out_for_a_second(clock: list[float]) -> None:
    disk = Disk(8)
    sink = LogSink(Stream(disk), ends_with_reader=False)
    for line in (b"one\n", b"second\n", b"x\n"):
        assert sink.write(line) == len(line)
    assert (disk.content, exported()) == (b"one\nseco", 2.0)
    disk.room = 100
    sink.write(b"y\n")
    assert disk.content == b"one\nseco", "not tried again so soon"
    clock[0] += log_stream.PAUSE_SECONDS
    sink.write(b"z\n")
    assert (disk.content, exported()) == (b"one\nseco\nz\n", 3.0), "a line that was cut is ended"


@pytest.mark.parametrize("why", Unwritable)
def test_process_whose_errors_go_nowhere_ends_with_its_own_status(why: Unwritable) -> None:
    """Even with a traceback, and with more than a buffer holds. Without the guard the status would be 120."""
    program = (
        "import sys; from draftwire.runtime.log_stream import *; guard_stderr(); guard_stderr();"
        "[print('x' * 5000, file=sys.stderr) for _ in range(3)]; print(WRITE_ERRORS.count); {end}"
    )
    for end, status in (("sys.exit(3)", 3), ("", 0), ("raise KeyError", 1)):
        with unwritable(why) as stderr:
            ended = subprocess.run(
                [sys.executable, "-c", program.format(end=end)], stderr=stderr, stdout=subprocess.PIPE, timeout=60
            )
        assert (ended.returncode, int(ended.stdout) >= 3) == (status, True)


def test_reader_that_is_gone_can_end_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with unwritable(Unwritable.CLOSED) as end, os.fdopen(os.dup(end), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        guard_stderr(ends_with_reader=True)
        with pytest.raises(BrokenPipeError):
            sys.stderr.write("a\n")


def test_process_without_standard_error_can_be_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    guard_stderr()
    sys.stderr.write("a\n")
    assert (sys.stderr.isatty(), exported()) == (False, 0.0)
