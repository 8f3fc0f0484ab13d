"""Set-up of torch devices, and uploads of small arrays to them."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.errors import InvalidRequestError


def prepare(name: str) -> None:
    """Checks that a device is usable, and sets process-wide torch options for it.

    Raises:
        InvalidRequestError: torch cannot compute there; the message says why.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidRequestError(f"device {name!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
    if torch.device(name).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN attention builds a plan for each new sequence length


def upload(
    values: Sequence[Any] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copies values to a tensor on a device without waiting for the device's earlier work.

    Plain `torch.tensor(..., device=...)` waits: memory that is not pinned is copied after all earlier work.

    Args:
        values: nested numbers; or an array or tensor on the CPU, whose memory a tensor on the CPU shares.
        device: the target device.
        dtype: of the tensor; None keeps that of the values.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
