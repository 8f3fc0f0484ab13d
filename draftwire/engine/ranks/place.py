"""Place of a process in its service: the only one, rank 0 of a group that shares the model, or another rank.

Rank 0 serves; the others follow it. They are started by rank 0 on its own machine, or by torchrun on one or several.
"""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from draftwire.errors import UnavailableError
from draftwire.runtime.addresses import host_and_port
from draftwire.runtime.settings import require

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set for each process by torchrun or another launcher."""


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """Size and limits of the group that a service's settings ask for."""

    service: str
    """"verifier" or "drafter"."""
    setting: str
    """Name of the setting that holds `size`, for messages."""
    size: int
    timeout_s: float
    """How long ranks wait for each other, seconds."""
    loader: str = "draftwire.engine.ranks.group_model:load_target_rank"
    """Import path of what loads a rank's share, called with the rank's `RankConfig`."""
    loader_settings: str = ""
    """Settings of the loader, in a format of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in its group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the group's processes on this machine: the index of its GPU."""
    address: str = ""
    """host:port of rank 0, for the rendezvous of the group; empty in a group of one."""
    starts_others: bool = False
    """Whether this process, rank 0, has to start the other ranks."""
    setting: str = ""
    """Name of the setting that holds `size`, for messages."""

    def device(self, given: str) -> str:
        """Returns the device of this process.

        Raises:
            InvalidRequestError: `given` names one device for several processes.
        """
        if self.size == 1 or given == "cpu":
            return given
        fits = given in ("cuda", "cuda:0")
        require(fits, f"device {given} is one: with {self.setting}, cuda gives each process a GPU of its own")
        return f"cuda:{self.local_rank}"

    def check_devices(self, given: str) -> None:
        """Checks that this machine has the GPUs that its ranks will use.

        Raises:
            InvalidRequestError: torch sees too few.
        """
        if self.device(given) == "cpu":
            return
        from torch.cuda import device_count  # imported late: this module is imported before torch is needed

        needed, there = self.size if self.starts_others else self.local_rank + 1, device_count()
        require(needed <= there, f"{self.setting} {self.size} takes {needed} GPUs here; torch sees {there}")


def find_place(wanted: WantedGroup, environment: Mapping[str, str]) -> Place:
    """Returns the place of this process.

    Args:
        wanted: group that the service's settings ask for.
        environment: holds `LAUNCHER_VARIABLES` if a launcher started this process.

    Raises:
        InvalidRequestError: the launcher started another number of processes, or a variable is missing or malformed.
        UnavailableError: torchrun's store, through which rank 0 publishes its port, does not answer.
    """
    size, setting = wanted.size, wanted.setting
    if "RANK" not in environment:
        return Place() if size == 1 else Place(0, size, 0, f"127.0.0.1:{_free_port()}", True, setting)
    missing = [name for name in LAUNCHER_VARIABLES if not environment.get(name)]
    require(not missing, f"RANK is set, as by torchrun, but not {', '.join(missing)}")
    for name in LAUNCHER_VARIABLES:
        is_good = name == "MASTER_ADDR" or environment[name].isdecimal()
        require(is_good, f"{name} must be a number, not {environment[name]!r}")
    started = int(environment["WORLD_SIZE"])
    require(
        started == size,
        f"torchrun started {started} processes (WORLD_SIZE), but {setting} is {size}: they must be equal",
    )
    if size == 1:
        return Place()
    rank = int(environment["RANK"])
    require(rank < size, f"RANK must be below WORLD_SIZE {size}, not {rank}")
    address = _rendezvous_address(environment, rank, wanted.timeout_s)
    return Place(rank, size, int(environment["LOCAL_RANK"]), address, setting=setting)


def end_process(status: int) -> NoReturn:
    """Exits at once, without exit handlers: torch's would wait for a lost rank or a hung device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rendezvous_address(environment: Mapping[str, str], rank: int, timeout_s: float) -> str:
    """Returns host:port where rank 0 is to listen.

    At MASTER_PORT, torchrun itself may listen, with a store for its processes: rank 0 publishes a free port there.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch import distributed

        key = f"draftwire/port/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        timeout = timedelta(seconds=10.0 * timeout_s)
        try:
            store = distributed.TCPStore(  # type: ignore[attr-defined]  # exported by torch, but not in its types
                host, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            if rank == 0:
                store.set(key, str(_free_port()))
            port = int(store.get(key))
        except RuntimeError as error:
            raise UnavailableError(f"torchrun's store at {host}:{port} does not answer") from error
    return host_and_port(host, port)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])
