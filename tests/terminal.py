"""Runs commands on a terminal of their own, as a user does."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

SGR = re.compile(r"\x1b\[[0-9;]*m")
OF_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
LAST_SHOWN = 2000
"""Characters of what was shown that a failure quotes."""


START = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes a typed Ctrl-C a signal, also where the tests run in the background of a shell that ignores it there. A program
of its own: what runs between fork and exec beside gRPC's threads, which the tests have, may hang or crash."""


class Terminal:
    """A command of ours whose standard input, output and error are a terminal; what it shows is in `shown`."""

    def __init__(self, *arguments: str, rows: int = 40, columns: int = 120, **environment: str) -> None:
        """Starts it. Variables about the terminal that the tests run with are left out."""
        inherited = {name: value for name, value in os.environ.items() if name not in OF_TERMINALS}
        self._own, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", START, sys.executable, "-m", "draftwire.cli", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**inherited, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(terminal)
        self.shown = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)

    @property
    def text(self) -> str:
        """What was shown, without colours and with plain line ends."""
        return SGR.sub("", self.shown).replace("\r\n", "\n")

    def wait_for(self, text: str, seconds: float = 60.0, after: int = 0) -> None:
        """Reads until a text is shown, behind so many characters."""
        deadline = time.monotonic() + seconds
        while text not in self.shown[after:]:
            assert time.monotonic() < deadline, f"{text!r} is not shown; the last was {self.shown[-LAST_SHOWN:]!r}"
            assert self._read(), f"{text!r} is not shown, and the command has ended: {self.shown[-LAST_SHOWN:]!r}"

    def type(self, keys: str) -> None:
        """Presses keys; "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._own, keys.encode())

    def ends_after(self, keys: str, seconds: float) -> bool:
        """Presses keys, and returns whether the command has ended some seconds later."""
        self.type(keys)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._read():
            pass
        return self.process.poll() is not None

    def wait(self, seconds: float = 60.0) -> int:
        """Reads to the end and returns the exit status."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.shown[-LAST_SHOWN:]!r}"
        return self.process.wait(10.0)

    def _read(self) -> bool:
        """Reads what there is, for a short time; returns False at the end."""
        ready, _, _ = select.select([self._own], [], [], 0.2)
        if not ready:
            return self.process.poll() is None or bool(select.select([self._own], [], [], 0.0)[0])
        try:
            read = os.read(self._own, 65536)
        except OSError:  # Linux says so at the end
            return False
        self.shown += read.decode(errors="replace")
        return bool(read)
