"""Work that is replayed by CUDA graphs where there are any, and counts of operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftwire.models.static_steps import Recorder

NO_GRAPHS = "CUDA graphs need a GPU"


def recorded(work: Callable[[], Tensor], recorder: Recorder | None) -> Callable[[], object]:
    """Returns what replays some work: a CUDA graph, or the work itself if there is no recorder."""
    return work if recorder is None else recorder.record(work)[0].replay


def recorder_of(device: torch.device) -> Recorder | None:
    """Returns what records CUDA graphs; None on a CPU."""
    return Recorder(device) if device.type == "cuda" else None


class OperationCount(TorchDispatchMode):
    """Counts the operations within a context that launch something on a GPU: no views, nothing that only allocates.

    Kernels are a few more, since some operations launch several.
    """

    NOT_LAUNCHED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "_pin_memory"})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Counts one operation and runs it."""
        self.count += not func.is_view and func.overloadpacket.__name__ not in self.NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


def num_operations(work: Callable[[], object]) -> int:
    """Returns how many operations some work launches."""
    counted = OperationCount()
    with counted:
        work()
    return counted.count
