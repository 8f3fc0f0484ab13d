"""How a process ended, in words: by which signal or with which status, and whether memory had run out."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process."""

    status: int
    """Exit status; minus the number of the signal that killed it."""
    memory_ran_out: bool = False
    """Whether the kernel's out-of-memory killer killed a process in this control group while this one ran."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return self.status < 0

    def __str__(self) -> str:
        """Returns what is said after the name of the process."""
        if not self.was_killed:
            after = ", after the kernel's out-of-memory killer had killed a process here" if self.memory_ran_out else ""
            return f"ended with status {self.status}{after}"
        by = ", by the kernel's out-of-memory killer" if self.memory_ran_out and -self.status == signal.SIGKILL else ""
        return f"was killed by {_name_of(-self.status)}{by}"


def num_memory_kills(root: Path = Path("/")) -> int:
    """Returns how many processes the out-of-memory killer has killed in this process's control group, which children
    share; on a machine without such groups, anywhere. 0 where the kernel does not say.
    """
    return next(_counts(root), 0)


def _counts(root: Path) -> Iterator[int]:
    """Yields the counts that can be read, the narrowest first."""
    for file in (*_files_of_groups(root), root / "proc/vmstat"):
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    yield int(number)


def _files_of_groups(root: Path) -> Iterator[Path]:
    """Yields where control groups count kills, of version 2 and 1. In a container the path may be one of the host's,
    which is not there; its own group is the root then.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mount, name = root / "sys/fs/cgroup", "memory.events"
            if controllers:
                mount, name = mount / "memory", "memory.oom_control"
            if not controllers or "memory" in controllers.split(","):
                yield mount / path.lstrip("/") / name
                yield mount / name


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
