"""The stack that is attacked, and the list of attacks.

An attack knows addresses alone: it may send what anybody who reaches these can send. It returns when it is over, or
when `Victim.seconds` are, with its figures and what it achieved. Processes that end, memory and other users' gaps are
the runner's to find out.
"""

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import read_metric

Figures = dict[str, Any]
HARM = "harm"
"""Key of an attack's figures: what it achieved, a list of sentences."""
MAX_RATIO = 3.0
"""Longest wait of others under an attack over that under its control."""
LOOK_SECONDS = 0.05
"""Between two looks at the memory."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Running services on this machine."""

    gateway: str
    """host:port of the gateway's gRPC."""
    http: str
    """http://host:port of its HTTP, or https://."""
    verifier: str
    drafter: str
    metrics: dict[str, str]
    """host:port of each service's metrics."""
    pids: dict[str, int]
    """Process of each service."""
    seconds: float
    """How long an attack may go on."""

    def resident_mib(self, service: str) -> float:
        """Returns the memory that a service has, MiB."""
        return resident_mib(self.pids[service])

    def steps(self) -> tuple[float, float]:
        """Returns how many steps the verifier has run, and their seconds; zeros while it does not answer."""
        port = int(self.metrics["verifier"].rpartition(":")[2])
        with suppress(OSError):
            return read_metric(port, "engine_step_seconds_count"), read_metric(port, "engine_step_seconds_sum")
        return 0.0, 0.0


def judged(figures: Figures, harm: Mapping[str, bool]) -> Figures:
    """Returns an attack's figures with what it achieved.

    Args:
        figures: what was sent and answered.
        harm: for each thing that must not be achieved, whether it was.
    """
    return figures | {HARM: [what for what, is_done in harm.items() if is_done]}


Attack = Callable[[Victim], Figures]


@dataclass(frozen=True, slots=True)
class Listed:
    """One attack of the list."""

    name: str
    attacker: str
    """Who can do it: anyone, user, drafter, verifier, gateway, page, network, operator or machine; see
    docs/threats.md."""
    run: Attack
    control: Attack | None = None
    """Sends as much in an honest form, first: what others wait for then is what the attack is compared with."""
    max_ratio: float = MAX_RATIO
    """Most that others may wait longer under it than under its control."""
    over_tls: bool = False
    """Whether the attacked stack is one whose gateway requires TLS."""
    is_long: bool = False
    """Whether it takes most of a minute: it is carried out by name and with `--minutes`."""


_LISTED: list[Listed] = []


def attack(
    attacker: str,
    *,
    control: Attack | None = None,
    max_ratio: float = MAX_RATIO,
    over_tls: bool = False,
    is_long: bool = False,
) -> Callable[[Attack], Attack]:
    """Puts a function on the list; its name is the attack's. It returns what `judged` does.

    Args:
        attacker: see `Listed.attacker`.
        control: see `Listed.control`.
        max_ratio: see `Listed.max_ratio`.
        over_tls: see `Listed.over_tls`.
        is_long: see `Listed.is_long`.
    """

    def list_it(run: Attack) -> Attack:
        name = getattr(run, "__name__", "attack")
        _LISTED.append(Listed(name, attacker, run, control, max_ratio, over_tls, is_long))
        return run

    return list_it


def all_attacks() -> list[Listed]:
    """Returns all attacks of the modules beside this one, in the order of their files."""
    package = __name__.rpartition(".")[0]
    for module in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda one: one.name):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")
    return list(_LISTED)


def resident_mib(pid: int) -> float:
    """Returns the memory that a process and its children have, MiB; 0 if it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * 4096 / 2**20 + sum(resident_mib(int(child)) for child in children)


@contextmanager
def peak_memory(pids: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Watches processes and their children; what is yielded has the most memory of each within the block, MiB."""
    peaks = {name: resident_mib(pid) for name, pid in pids.items()}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            for name, pid in pids.items():
                peaks[name] = max(peaks[name], resident_mib(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()
