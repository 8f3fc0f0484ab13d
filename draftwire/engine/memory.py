"""How much memory a KV cache may take: of a GPU, of the machine, and of the container that limits it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from draftwire.errors import InvalidRequestError

CPU_SHARE = 0.4
"""Share of the available memory that a cache on a CPU may take. Drafter and verifier of one machine, started at once,
take 0.8 of it then: neither sees what the other will take, because memory is committed when it is written."""
NO_LIMIT = 2**60
"""Limits of control groups that are at least so large are none: version 1 writes one as a large number."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that a KV cache may take, bytes."""

    num_bytes: int
    """May be negative: then there is less than a step needs."""
    bound: str
    """Name of what limits it, for the log."""


class MemoryMeter(Protocol):
    """Measures memory around the largest step of a model. Used on the torch thread."""

    def begin(self) -> None:
        """Notes the state before the step: the weights are loaded."""

    def free(self, num_copies: int) -> FreeMemory:
        """Returns what is left for a cache after the step.

        Args:
            num_copies: how many times what the step held for a while is kept back.
        """


class CpuMeter:
    """Memory of this machine, or of the container."""

    def __init__(self, num_sharers: int = 1, root: Path = Path("/")) -> None:
        """Reads nothing yet. So many ranks share the machine's memory; the files of Linux are below `root`."""
        self._num_sharers = num_sharers
        self._root = root

    def begin(self) -> None:
        """Forgets how much memory the process had at most, as far as the kernel lets it."""
        with suppress(OSError):
            (self._root / "proc/self/clear_refs").write_text("5")

    def free(self, num_copies: int) -> FreeMemory:
        """Returns a share of what is available; see `CPU_SHARE`.

        Raises:
            InvalidRequestError: this system does not say how much that is.
        """
        try:
            available, bound = min(self._available(), key=lambda found: found[0])
            held = num_copies * self._held_for_a_while()
        except (OSError, LookupError) as error:
            raise InvalidRequestError(f"kv_cache_tokens auto reads what Linux says of memory: {error}") from error
        return FreeMemory(int(CPU_SHARE * (available - held)) // self._num_sharers, bound)

    def _available(self) -> Iterator[tuple[int, str]]:
        """Yields the available bytes by each limit, with its name."""
        yield _kibibytes(self._root / "proc/meminfo", "MemAvailable"), "the memory that is available"
        yield from ((free, "the container's memory limit") for free in _free_in_groups(self._root))

    def _held_for_a_while(self) -> int:
        """Returns how much more memory the process has had since `begin` than it has now, bytes."""
        status = self._root / "proc/self/status"
        return max(0, _kibibytes(status, "VmHWM") - _kibibytes(status, "VmRSS"))


class GpuMeter:
    """Memory of a GPU. Made before the weights are loaded: what others have is told from that."""

    def __init__(self, device: str, utilization: float) -> None:
        """Notes what is free.

        Args:
            device: a GPU of torch's.
            utilization: share of the GPU's memory that this process may take, weights included; as vLLM has it.
        """
        import torch

        self._cuda = torch.cuda
        self._device = device
        self._utilization = utilization
        self._free_before, self._total = self._cuda.mem_get_info(device)
        self._held = 0

    def begin(self) -> None:
        """Starts to measure the peak."""
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)
        self._held = self._cuda.memory_allocated(self._device)

    def free(self, num_copies: int) -> FreeMemory:
        """Returns what is left of this process's share, or of what is free, if that is less."""
        self._cuda.synchronize(self._device)
        peak = self._cuda.max_memory_allocated(self._device)
        self._cuda.empty_cache()
        free, _ = self._cuda.mem_get_info(self._device)
        own = self._free_before - free
        allowed, bound = int(self._utilization * self._total) - own, f"gpu_memory_utilization {self._utilization:g}"
        if free < allowed:
            allowed, bound = free, "the GPU's memory that is free"
        return FreeMemory(allowed - num_copies * max(0, peak - self._held), bound)


def _kibibytes(file: Path, name: str) -> int:
    """Returns the bytes of an entry such as "MemAvailable:  12 kB".

    Raises:
        OSError: the file cannot be read.
        LookupError: it has no such entry.
    """
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(f"{file} has no {name}")


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yields what is left of the limit of each control group that this process is in, and of those around them, bytes.

    Memory of files that can be read again counts as free, as the kernel drops it when the limit is reached.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                names = ("memory.max", "memory.current", "inactive_file")
                yield from _free_around(root / "sys/fs/cgroup", path, *names)
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _free_around(root / "sys/fs/cgroup/memory", path, *names)


def _free_around(mount: Path, path: str, limit: str, usage: str, files: str) -> Iterator[int]:
    """Yields what is left in a group and those around it. In a container the path may be one of the host's, which is
    not there; its own group is the root then.
    """
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # a group without a limit says "max"
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            if most < NO_LIMIT:
                stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
                yield max(0, most - max(0, used - int(stat.get(files, 0))))
        if folder == mount:
            return
