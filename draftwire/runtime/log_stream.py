"""Standard error of a service, which can always be written to: a full disk or a reader that is gone ends no service.

Whoever logs is in the middle of something else, such as a call that has to be answered. Python's own stream would raise
the error there, keep the bytes, and end the process with status 120 because they cannot be flushed.
"""

import io
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

PAUSE_SECONDS = 1.0
"""How long nothing is written after a failure: what fails once mostly fails for long."""


@dataclass(slots=True)
class WriteErrors:
    """Count of what this process could not write to its logs."""

    count: int = 0
    """Writes, a line each, that failed or that fell into the pause after a failure."""


WRITE_ERRORS = WriteErrors()


class LogSink(io.RawIOBase):
    """Writes bytes at once, or counts and drops them. No buffer is left that could fail later. For any thread."""

    def __init__(self, stream: Any, *, ends_with_reader: bool) -> None:
        """Wraps a text stream.

        Args:
            stream: where to write; None where the process was started without standard error.
            ends_with_reader: whether `BrokenPipeError` is raised all the same, as in a pipeline on a command line.
        """
        super().__init__()
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115  # as long as the process
        buffer = self._stream.buffer
        self._sink: Any = getattr(buffer, "raw", buffer)
        self._ends_with_reader = ends_with_reader
        self._writing = threading.RLock()
        self._paused_until = 0.0
        self._is_cut = False
        """Whether the last line was written in part, so that the next one has to begin on a line of its own."""

    @override
    def write(self, data: Any) -> int:
        content = bytes(data)
        with self._writing:
            if time.monotonic() < self._paused_until:
                WRITE_ERRORS.count += 1
                return len(content)
            try:
                self._write_all(content)
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                if self._ends_with_reader and isinstance(error, BrokenPipeError):
                    raise
                WRITE_ERRORS.count += 1
                self._paused_until = time.monotonic() + PAUSE_SECONDS
        return len(content)

    def _write_all(self, content: bytes) -> None:
        left = memoryview(b"\n" + content if self._is_cut else content)
        self._is_cut = False
        while left:
            num_written = self._sink.write(left)
            if not num_written:  # None: the pipe is full and does not block
                raise BlockingIOError
            left = left[num_written:]
            self._is_cut = len(left) > 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    @override
    def fileno(self) -> int:
        return int(self._sink.fileno())


def guard_stderr(*, ends_with_reader: bool = False) -> None:
    """Replaces standard error by a `LogSink`, which drops and counts what cannot be written. Again, it does nothing."""
    if isinstance(getattr(sys.stderr, "buffer", None), LogSink):
        return
    encoding, errors = getattr(sys.stderr, "encoding", "utf-8"), getattr(sys.stderr, "errors", "backslashreplace")
    sink = LogSink(sys.stderr, ends_with_reader=ends_with_reader)
    # Over a raw stream, as `python -u` has it: `write_through` leaves nothing in the wrapper either.
    sys.stderr = io.TextIOWrapper(sink, encoding=encoding, errors=errors, write_through=True)
