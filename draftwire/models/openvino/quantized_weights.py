"""Weights of eight bits, each output channel with a scale and a zero point of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEVELS = 255
"""Steps between the least and the largest weight of a channel."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix that stands for `(levels - zeros) * scales`."""

    levels: NDArray[np.uint8]
    """`[out, in]`."""
    zeros: NDArray[np.uint8]
    """`[out, 1]`."""
    scales: NDArray[np.float32]
    """`[out, 1]`."""

    @classmethod
    def of(cls, weight: Tensor) -> "QuantizedMatrix":
        """Rounds the `[out, in]` weights of a linear layer to the nearest level of each output channel."""
        rows = weight.detach().float()
        low, high = rows.amin(1, keepdim=True).clamp(max=0.0), rows.amax(1, keepdim=True).clamp(min=0.0)
        scales = ((high - low) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = (-low / scales).round_()
        levels = rows.div(scales).round_().add_(zeros).clamp_(0, LEVELS)
        return cls(levels.to(torch.uint8).numpy(), zeros.to(torch.uint8).numpy(), scales.numpy())

    def dense(self) -> NDArray[np.float32]:
        """Returns the matrix that it stands for, `[out, in]`."""
        return (self.levels.astype(np.float32) - self.zeros) * self.scales
