"""Process group of the ranks that compute one model together, each on a device of its own, and its collectives.

Tensors on the CPU use gloo, tensors on a GPU use NCCL. A group on GPUs has both backends, so that host data does not
wait for a device.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.method.devices import prepare

JOIN_TIMEOUTS = 10.0
"""Timeout for all ranks to join, in timeouts of a collective."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Rank, size and rendezvous address of a process group."""

    rank: int
    """Rank of this process, 0 to `size` - 1."""
    size: int
    """Number of processes in the group."""
    address: str
    """`host:port` that rank 0 listens on for the lifetime of the group."""
    device: str
    """Device of this rank: `cpu` or `cuda:N`."""
    timeout_s: float = 30.0
    """Timeout of a collective, seconds."""

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError` for invalid values."""
        if not 0 <= self.rank < self.size:
            raise InvalidRequestError(f"rank must be 0 to {self.size - 1} in a group of {self.size}, not {self.rank}")
        if not self.host or not self.address.rpartition(":")[2].isdecimal() or not 0 < self.port < 65_536:
            raise InvalidRequestError(f"the address of a group must be host:port, not {self.address!r}")
        if self.device != "cpu" and not (self.device.startswith("cuda:") and self.device[5:].isdecimal()):
            raise InvalidRequestError(f"a rank computes on cpu or cuda:N, not on {self.device!r}")
        if not 0.0 < self.timeout_s < float("inf"):
            raise InvalidRequestError(f"a collective's timeout must be positive, not {self.timeout_s} s")

    @property
    def host(self) -> str:
        """Host of rank 0."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of rank 0."""
        return int(self.address.rpartition(":")[2])


class ProcessGroup:
    """This process's membership in a group. At most one at a time in a process; used by one thread.

    All ranks call the same collectives in the same order with tensors of the same shapes. A collective that fails
    raises `UnavailableError`, and so does every later one, because the ranks are out of step. A collective on a GPU
    returns before it is carried out. If it then hangs for longer than the timeout, torch ends the process.
    """

    def __init__(self, settings: GroupSettings, collectives: distributed.ProcessGroup) -> None:
        """Use `join`."""
        self._settings = settings
        self._collectives = collectives
        self._failure = ""
        self._has_left = False
        self._sum, self._to_first, self._to_all = (
            distributed.AllreduceOptions(),
            distributed.GatherOptions(),
            c10d.AllgatherOptions(),  # type: ignore[attr-defined]  # which torch has, but not for mypy
        )
        self._from = [distributed.BroadcastOptions() for _ in range(settings.size)]
        for source, options in enumerate(self._from):
            options.rootRank = source
        each: Any
        for each in (self._sum, self._to_first, self._to_all, *self._from):
            each.asyncOp = False  # on a GPU: on the current stream, as graphs need it

    @classmethod
    def join(cls, settings: GroupSettings) -> "ProcessGroup":
        """Waits until all ranks have joined, at most `JOIN_TIMEOUTS` times the timeout of a collective.

        Raises:
            InvalidRequestError: this process is in a group already, or torch cannot compute on the device.
            UnavailableError: another rank did not join in time, or rank 0 does not listen at the address.
        """
        if distributed.is_initialized():
            raise InvalidRequestError("this process belongs to a group already")
        is_cuda = settings.device != "cpu"
        if is_cuda and int(settings.device[5:]) >= torch.cuda.device_count():
            raise InvalidRequestError(f"there is no {settings.device}: torch sees {torch.cuda.device_count()} GPUs")
        if is_cuda:
            torch.cuda.set_device(settings.device)
            prepare(settings.device)
        try:
            patience = timedelta(seconds=JOIN_TIMEOUTS * settings.timeout_s)
            store = distributed.TCPStore(  # type: ignore[attr-defined]  # which torch exports, but not for mypy
                settings.host,
                settings.port,
                settings.size,
                settings.rank == 0,
                patience,
                master_listen_fd=_listen(settings) if settings.rank == 0 else None,
            )
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=store,
                rank=settings.rank,
                world_size=settings.size,
                timeout=timedelta(seconds=settings.timeout_s),
            )
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            raise UnavailableError(
                f"rank {settings.rank} of {settings.size} found no group at {settings.address}: {_cause(error)}"
            ) from error
        group = c10d._get_default_group()
        assert isinstance(group, distributed.ProcessGroup)
        return cls(settings, group)

    @property
    def rank(self) -> int:
        """This process, 0 to `size` - 1."""
        return self._settings.rank

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self._settings.size

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return torch.device(self._settings.device)

    @property
    def timeout_s(self) -> float:
        """How long a collective may take before it fails, seconds."""
        return self._settings.timeout_s

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by its sum over all ranks; bit-identical on all of them.

        Raises:
            UnavailableError: another rank is lost or late, or the group has failed before.
        """
        with self._collective("the sum over all ranks"):
            _finish(self._collectives.allreduce([tensor], self._sum))

    def gather_columns(self, tensor: Tensor) -> Tensor:
        """Gathers the columns of all ranks on rank 0.

        Args:
            tensor: `[rows, columns]`, contiguous, of the same shape on every rank.

        Returns:
            `[rows, size * columns]` in the order of ranks on rank 0, `tensor` itself on the others.

        Raises:
            UnavailableError: as `all_reduce`.
        """
        if len(tensor) == 0:  # so it is on every rank
            return tensor.repeat(1, self.size) if self.rank == 0 else tensor
        with self._collective("the gathering of columns"):
            if self.rank:
                _finish(self._collectives.gather([], [tensor], self._to_first))
                return tensor
            parts = tensor.new_empty(self.size, *tensor.shape)
            _finish(self._collectives.gather([list(parts)], [tensor], self._to_first))
            return parts.transpose(0, 1).flatten(1)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathers the contiguous tensors of all ranks, of the same shape, on every rank.

        Returns:
            `[size, ...]` in the order of ranks.

        Raises:
            UnavailableError: as `all_reduce`.
        """
        parts = tensor.new_empty(self.size, *tensor.shape)
        with self._collective("the gathering of all parts"):
            _finish(self._collectives.allgather([list(parts)], [tensor], self._to_all))
        return parts

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites a contiguous tensor, of the same shape on all ranks, with the source rank's.

        Raises:
            UnavailableError: as `all_reduce`.
        """
        with self._collective(f"rank {source}'s message"):
            _finish(self._collectives.broadcast([tensor], self._from[source]))

    def meet(self, timeout_s: float | None = None) -> None:
        """Barrier of the hosts: waits until all ranks have called it.

        Args:
            timeout_s: timeout, seconds; None is that of every collective. The death of a rank is detected at once.

        Raises:
            UnavailableError: as `all_reduce`.
        """
        options = distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        with self._collective("the meeting of all ranks"):
            _finish(self._collectives.allreduce([torch.zeros(1, dtype=torch.int64)], options))

    def break_off(self, reason: str) -> None:
        """Aborts the group at once, on this rank and the others, because this rank cannot finish the current step.

        Does nothing if the group has failed before.
        """
        if not self._failure:
            self._failure = f"rank {self.rank} of {self.size}: {reason}"
            self.leave()

    def leave(self) -> None:
        """Leaves the group; collectives of the other ranks fail from now on. May be called more than once."""
        if self._has_left:
            return
        self._has_left = True
        self._failure = self._failure or f"rank {self.rank} of {self.size} has left its group"
        del self._collectives  # connections close with the last reference
        if self.device.type == "cuda":
            c10d._abort_process_group()  # does not wait for the other ranks
        else:
            distributed.destroy_process_group()

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        if self._failure:
            raise UnavailableError(self._failure)
        try:
            yield
        except RuntimeError as error:
            self.break_off(f"{name} failed: {_cause(error)}")
            raise UnavailableError(self._failure) from error


def _listen(settings: GroupSettings) -> int:
    """Returns a socket that listens at the group's address only; torch's own would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family).detach()
    except OSError as error:
        raise UnavailableError(f"rank 0 cannot listen at {settings.address}: {error}") from error


def _finish(work: distributed.Work | None) -> None:
    """Waits for a collective on the CPU; for a collective on a GPU, makes the current stream wait."""
    if work is None:
        return
    try:
        work.wait()
    finally:
        del work  # a traceback's frame would keep connections open, and the other ranks waiting


def _cause(error: Exception) -> str:
    """Returns the first sentence of torch's error message, without the source location."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[?\S+:\d+\]\s*", "", line).partition(". This is typically")[0]
