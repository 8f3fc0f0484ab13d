"""Services whose standard error cannot be written: on a full disk, or into a pipe that nobody reads."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from benchmarks.relay import free_port
from draftwire.cli.local_stack import arguments_of
from tests.observing import wait_until


class Unwritable(Enum):
    """Why nothing can be written."""

    FULL = "full"
    CLOSED = "closed"


@contextmanager
def unwritable(why: Unwritable) -> Iterator[int]:
    """Opens what cannot be written, and returns its descriptor."""
    if why is Unwritable.FULL:
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        other_end, end = os.pipe()
        os.close(other_end)
    try:
        yield end
    finally:
        os.close(end)


class SilentService:
    """A service in a process of its own that cannot log, so that nobody reads its ports there. A context manager."""

    def __init__(self, name: str, options: Mapping[str, object], why: Unwritable) -> None:
        """Starts nothing yet. Ports that are not among the options are free ones."""
        wanted = ("port", "metrics_port", *(["http_port"] if name == "gateway" else []))
        self._options = {**{port: free_port() for port in wanted}, **options}
        self._name = name
        self._why = why
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> "SilentService":
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return f"127.0.0.1:{self._options['port']}"

    @property
    def metrics_port(self) -> int:
        return int(str(self._options["metrics_port"]))

    @property
    def http_address(self) -> str:
        """Of a gateway."""
        return f"http://127.0.0.1:{self._options['http_port']}"

    def begin(self) -> None:
        """Starts the process, and returns at once."""
        command = [sys.executable, "-m", "draftwire.cli", "serve", self._name, *arguments_of(self._options)]
        with unwritable(self._why) as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

    def wait_until_ready(self) -> None:
        """Returns when it is ready."""
        wait_until(lambda: self.process.poll() is not None or self._is_ready(), f"the {self._name} is ready", 60.0)
        assert self.process.poll() is None, f"ended with {self.process.poll()}"

    def stop(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
