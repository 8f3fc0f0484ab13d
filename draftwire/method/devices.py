"""Where tensors are, and how small things get there."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.errors import InvalidRequestError


def prepare(name: str) -> None:
    """Makes sure that there is a device, and chooses how this process computes on it.

    Args:
        name: of a torch device.

    Raises:
        InvalidRequestError: torch cannot compute there; the message says why.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidRequestError(f"device {name!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
    if torch.device(name).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its attention makes a plan for each new length of a text


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns values as a tensor on a device, and does not wait for what the device is doing.

    Plain `torch.tensor(..., device=...)` does: memory that is not pinned is copied when all earlier work is done.

    Args:
        values: numbers, nested as the tensor is to be; or an array or tensor on the CPU, with which a tensor there
            shares its memory.
        device: where to.
        dtype: of the tensor; None takes that of the values.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
