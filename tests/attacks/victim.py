"""The stack that is attacked, and the list of attacks.

An attack knows addresses alone: it may send what anybody who reaches these can send. It returns when it is over, or
when `Victim.seconds` are. What it cannot do is the runner's to find out: processes that end, memory, other users' gaps.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Victim:
    """Running services on this machine."""

    gateway: str
    """host:port of the gateway's gRPC."""
    http: str
    """http://host:port of its HTTP."""
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


Attack = Callable[[Victim], Figures]


@dataclass(frozen=True, slots=True)
class Listed:
    """One attack of the list."""

    name: str
    attacker: str
    """Who can do it: anyone, user, drafter, verifier, gateway or page; see docs/threats.md."""
    run: Attack


_LISTED: list[Listed] = []


def attack(attacker: str) -> Callable[[Attack], Attack]:
    """Puts a function on the list; its name is the attack's. It returns figures of what was sent and answered.

    Args:
        attacker: see `Listed.attacker`.
    """

    def list_it(run: Attack) -> Attack:
        _LISTED.append(Listed(getattr(run, "__name__", "attack"), attacker, run))
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
